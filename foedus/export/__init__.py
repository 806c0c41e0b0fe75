"""Trained models: what they are made of, and how they leave foedus."""
