"""Tries a user's loss, advantage and engine in a process of its own, before any actor starts:
`python -m grpo_trainable.learner.user_code LOSS ADVANTAGE GROUP_SIZE ENGINE`.

A user's file may do anything when it is imported, and a mistake in it must not end the command. Its
last line on standard error is what is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys

from grpo_trainable.config import GRPOConfig
from grpo_trainable.plugins import PluginError, is_reference, load

CHECK_DEADLINE_S = 60.0


def check_user_code(config: GRPOConfig) -> None:
    """Loads and tries what a trial names of the user's, if it names any.

    Raises:
        PluginError: one of them cannot be loaded, or a function fails its trial.
    """
    loss, advantage, engine = config.loss.type, config.loss.advantage, config.engine
    settings = {"loss.type": loss, "loss.advantage": advantage, "engine": engine}
    users = ", ".join(f"{key}={name}" for key, name in settings.items() if is_reference(name))
    if not users:
        return
    arguments = (loss, advantage, str(config.rollout.group_size), engine)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "grpo_trainable.learner.user_code", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            timeout=CHECK_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        raise PluginError(f"{users}: trying it took over {CHECK_DEADLINE_S:g} s") from None
    if done.returncode != 0:
        *_, reason = ["", *done.stderr.splitlines()]
        raise PluginError(reason or f"{users}: ended the process with status {done.returncode}")


def main(loss: str, advantage: str, group_size: str, engine: str) -> None:
    try:
        if is_reference(engine):
            load("engine", engine)
        if is_reference(loss) or is_reference(advantage):
            try_functions(loss, advantage, int(group_size))
    except PluginError as error:
        sys.exit(str(error))


def try_functions(loss: str, advantage: str, group_size: int) -> None:
    """PluginError when one of them cannot be loaded, or fails its trial."""
    import torch  # not for an engine alone

    from grpo_trainable.learner.user_functions import advantage_function, loss_function

    loss_function(loss, torch.device("cpu"))
    if is_reference(advantage):
        advantage_function(advantage, group_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
