"""FFGB: boosting with functions as messages."""
