"""Callbacks for Ray Tune that follow a GRPO experiment in the driver's process.

They know the names of metrics and the details that come with a row, but no actor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.tune import Callback


def grpo_callbacks(*, verbose: bool = False, console: bool = True) -> list[Callback]:
    """All callbacks in the order they need, for `tune.RunConfig(callbacks=…)`.

    For the Trainable that `grpo_trainable.trainable.register` makes known as "GRPO": plain
    `GRPOTrainable` rows have no responses, spans and version changes in them. They replace Tune's
    loggers of result.json, progress.csv and TensorBoard. Set `verbose=0` in the RunConfig, or
    Tune's own reporter prints beside the console.
    """
    from callbacks.checkpoints import CheckpointCallback
    from callbacks.console import ConsoleCallback
    from callbacks.kl import KLCallback
    from callbacks.mirror import MirrorCallback
    from callbacks.result_files import ProgressCsvCallback, ResultJsonCallback
    from callbacks.round_files import (
        GradientStepsCallback,
        RolloutsCallback,
        VersionLogCallback,
    )
    from callbacks.save_on_interrupt import CheckpointOnInterrupt
    from callbacks.stage_timings import StageTimingsCallback
    from callbacks.tensorboard import TensorBoardCallback
    from callbacks.trace import TraceCallback
    from callbacks.trial_files import set_verbose

    set_verbose(verbose)
    return [
        CheckpointCallback(),
        KLCallback(),
        StageTimingsCallback(),  # adds to the row: before all that write it
        VersionLogCallback(),
        RolloutsCallback(),
        GradientStepsCallback(),
        TraceCallback(),
        TensorBoardCallback(),
        *([ConsoleCallback()] if console else []),
        ResultJsonCallback(),  # takes the details out of the row: after all that read them
        ProgressCsvCallback(),
        MirrorCallback(),  # may wait for what the others have written: after all of them
        CheckpointOnInterrupt(),
    ]
