"""Compute the figures of an evaluation (launch/evaluate.py), and write its files and its page."""
