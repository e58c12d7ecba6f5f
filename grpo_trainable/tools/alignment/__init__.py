"""Train with TRL: fine-tuned policies, reward models, and policies by DPO.

`launch/align.py` runs this package. `reports.alignment` turns the results into figures and a page.
Only `training.py` and `measuring.py` import trl.
"""
