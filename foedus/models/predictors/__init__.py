"""Given predictors, which `fd.FedBoost` and `fd.AFLBoost` learn to mix."""
