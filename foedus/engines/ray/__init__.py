"""Clients on a Ray cluster."""
