"""Given predictors, for FedBoost."""
