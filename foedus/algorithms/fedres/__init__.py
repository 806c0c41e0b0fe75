"""FedRes: a shared global model and private local models learn each other's residual."""
