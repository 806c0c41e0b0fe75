"""Mini-batch training at the clients."""
