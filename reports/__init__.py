"""Read an experiment from disk, compare its arms, and write the table, the plots and the page."""

EXPERIMENT_FILE = "experiment.json"  # in an experiment's directory; describes the experiment
EXTENSIONS = "extensions"  # directory in an experiment; has one numbered directory per extension
