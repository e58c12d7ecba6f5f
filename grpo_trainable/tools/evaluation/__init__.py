"""Evaluation of one policy on the held-out prompts of a task, without Ray: what launch/evaluate.py
runs. `reports.evaluations` makes figures and files of what comes out."""
