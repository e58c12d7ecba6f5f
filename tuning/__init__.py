"""Takes a search space to Ray Tune: the plan of an experiment, its checks, order and schedulers.

For a `tune.Tuner` of your own, `tuning.grid` has the grid in randomised blocks and
`tuning.schedulers` has FIFO, ASHA and PBT that work with checkpoints and retries of GRPO trials.
"""
