"""Train by TRL before and beside GRPO: fine-tuned policies, reward models and DPO.

`launch/align.py` runs this package. `reports.alignment` turns the results into figures and a page.
Only `training.py` and `measuring.py` import trl.
"""
