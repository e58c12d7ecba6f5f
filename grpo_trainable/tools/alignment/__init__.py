"""Use TRL to fine-tune policies, to train reward models, and to train policies with DPO.

`launch/align.py` runs this package. `reports.alignment` turns the results into figures and a page.
Only `training.py` and `measuring.py` import trl.
"""
