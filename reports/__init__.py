"""Reads an experiment from disk, compares its arms, writes table, figures and page."""

EXPERIMENT_FILE = "experiment.json"  # what an experiment was started with, in its directory
