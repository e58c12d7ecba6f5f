"""The command lines: a file each, and what they share. No other package imports them."""

EXPERIMENT_FILE = "experiment.json"  # what an experiment was started with, in its directory
