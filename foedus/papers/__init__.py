"""The papers' tables and figures, as definitions that run."""
