"""Engines: what runs the clients of a federation."""
