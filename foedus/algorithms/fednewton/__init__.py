"""FedNewton and ridge regression on features."""
