"""Grids that repeat figures and tables of the papers."""
