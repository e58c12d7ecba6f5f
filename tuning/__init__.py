"""Run a search space under Ray Tune: plan, checks, order of trials, and schedulers.

If you build a `tune.Tuner` yourself, use `tuning.grid` for a grid search that runs the trials in an
order of your choice. `tuning.schedulers` provides versions of FIFO, ASHA and PBT that work with the
checkpoints and retries of GRPO trials.
"""
