"""Figures, files and a page of the responses that an evaluation sampled (launch/evaluate.py)."""
