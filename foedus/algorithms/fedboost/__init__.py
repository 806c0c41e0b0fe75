"""FedBoost and AFLBoost: mixtures of given predictors."""
