"""Run a search space under Ray Tune: plan, checks, order of trials, and schedulers.

If you build a `tune.Tuner` yourself, take the grid in randomised blocks from `tuning.grid`.
`tuning.schedulers` has FIFO, ASHA and PBT that work with checkpoints and retries of GRPO trials.
"""
