"""Compute the figures of an alignment run (launch/align.py), and write its files and its page."""
