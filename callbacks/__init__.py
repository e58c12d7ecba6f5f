"""Callbacks for Ray Tune that follow a GRPO experiment in the driver's process.

The callbacks read the row of metrics that a trial reports after each round, and the details that
come with the row. They do not use the trial's actors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.tune import Callback


def grpo_callbacks(
    *,
    verbose: bool = False,
    console: bool = True,
    trackers: Sequence[str] = (),
    experiment: str | None = None,
) -> list[Callback]:
    """Return all callbacks, in the required order, for `tune.RunConfig(callbacks=…)`.

    Your own callbacks may come before or after these. All callbacks get the same rows, whose
    values are plain data.

    The callbacks need the Trainable that `grpo_trainable.trainable.register` registers as "GRPO",
    because rows of a plain `GRPOTrainable` have no responses, spans or version changes. The
    callbacks replace Tune's loggers for result.json, progress.csv and TensorBoard. Set `verbose=0`
    in the RunConfig; otherwise Tune's own reporter also prints to the console.

    While Tune runs, the last callback handles Ctrl-C and SIGTERM: it stops and saves every trial.
    To keep your own handlers, leave this callback out of the list.

    Args:
        verbose: Print more lines, such as version changes.
        console: Include the callback that shows the trials on the console.
        trackers: Send each round to these trackers: "wandb", "mlflow" or "trackio".
        experiment: Name under which the trackers group the runs. By default, the name of the
            experiment's directory.

    Raises:
        TrackerError: A tracker cannot be used.
    """
    from callbacks.bands import BandsCallback
    from callbacks.checkpoints import CheckpointCallback
    from callbacks.console import ConsoleCallback
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
    from callbacks.trackers.tracked_run import refuse_unusable
    from callbacks.trackers.tracker_callback import TrackerCallback
    from callbacks.trial_files import set_verbose
    from callbacks.unplaceable_trials import UnplaceableTrialsCallback

    for tracker in trackers:
        refuse_unusable(tracker)
    set_verbose(verbose)
    mirror = MirrorCallback()
    return [
        UnplaceableTrialsCallback(),
        CheckpointCallback(),
        BandsCallback(),
        StageTimingsCallback(),
        VersionLogCallback(),
        RolloutsCallback(),
        GradientStepsCallback(),
        TraceCallback(),
        TensorBoardCallback(),
        *([ConsoleCallback()] if console else []),
        ResultJsonCallback(),
        ProgressCsvCallback(),
        mirror,  # may wait until the object store has the files that the callbacks above wrote
        # The trackers' callbacks read result.json. They come after the mirror, so that a slow
        # tracker does not delay the copies in the object store.
        *(TrackerCallback(name, experiment) for name in trackers),
        CheckpointOnInterrupt(mirror.not_copied),
    ]
