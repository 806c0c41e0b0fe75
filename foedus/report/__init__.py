"""Comparisons of algorithms: tables, plots and the HTML page."""
