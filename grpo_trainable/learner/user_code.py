"""Test of a user's loss, advantage and engine in a separate process, before any actor starts.

`python -m grpo_trainable.learner.user_code LOSS ADVANTAGE GROUP_SIZE ENGINE`

Importing a user's file can run any code, and a mistake in the file must not end the command that
starts the trials. If the test fails, the last line on standard error says what is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys

from grpo_trainable.config import GRPOConfig
from grpo_trainable.plugins import PluginError, is_reference, load

CHECK_DEADLINE_S = 60.0


def check_user_code(config: GRPOConfig) -> None:
    """Load and try the user-defined code that a trial names, if any.

    Raises:
        PluginError: The code cannot be loaded, or a function fails its test call.
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
        raise PluginError(f"{users}: the test took more than {CHECK_DEADLINE_S:g} s") from None
    if done.returncode != 0:
        *_, reason = ["", *done.stderr.splitlines()]
        raise PluginError(reason or f"{users}: ended the process with status {done.returncode}")


def main(loss: str, advantage: str, group_size: str, engine: str) -> None:
    """Load the engine and try the functions. If that fails, exit with the error's message."""
    try:
        if is_reference(engine):
            load("engine", engine)
        if is_reference(loss) or is_reference(advantage):
            try_functions(loss, advantage, int(group_size))
    except PluginError as error:
        sys.exit(str(error))


def try_functions(loss: str, advantage: str, group_size: int) -> None:
    """Load a loss and an advantage, and call them on small batches.

    Raises:
        PluginError: A function cannot be loaded or fails its test call.
    """
    import torch  # a test of an engine alone does not need torch

    from grpo_trainable.learner.user_functions import advantage_function, loss_function

    loss_function(loss, torch.device("cpu"))
    if is_reference(advantage):
        advantage_function(advantage, group_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
