"""The work of the commands besides `launch/tune.py`."""
