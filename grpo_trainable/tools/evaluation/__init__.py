"""Evaluate one policy on the held-out prompts of a task, without Ray.

`launch/evaluate.py` runs this package. `reports.evaluations` turns the results into figures and
files.
"""
