"""Send the rounds of trials to experiment trackers: W&B, MLflow and Trackio.

Each tracker has a module, such as `mlflow_run`, with a class `Run` that implements `TrackedRun`.
"""
