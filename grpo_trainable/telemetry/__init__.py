"""Measurements of a trial: the time that each stage takes, and the load of the trial's machine."""
