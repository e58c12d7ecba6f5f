"""The implementation of the commands in `launch/`, except `tune.py`, `report.py` and `verdict.py`."""
