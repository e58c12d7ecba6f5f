"""Figures, files and the page of an evaluation's responses (launch/evaluate.py)."""
