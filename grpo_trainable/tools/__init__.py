"""The implementation of the commands in `launch/`, except `tune.py` and `report.py`."""
