"""FedFW: projection-free learning on a convex set."""
