"""Trained models: their forms, and their export."""
