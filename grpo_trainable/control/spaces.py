"""Gymnasium environments (https://gymnasium.farama.org) in which a small policy acts.

Observations and actions are numbers, not text. `model.env` names the environment. Each episode is a
response, and the actions are its tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from grpo_trainable.plugins import is_reference, load, missing_library

HELD_OUT = 1 << 30  # the first held-out seed; training seeds start at 0
INSTALL = "pip install -e '.[control]'"
# (channels, kernel size) of each convolution for images, all with stride 2.
CONVOLUTIONS = ((16, 4), (32, 4), (32, 3))
UNBOUNDED = 1e3  # a component whose bound is at least this large is not scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class Spaces:
    """Observations and actions of a control policy."""

    observation: tuple[int, ...]  # (components,), or (height, width, channels) for an image
    scale: tuple[float, ...] | float  # one divisor per component, or one for all
    choices: int | None  # number of discrete actions; None if actions are continuous
    first: int = 0  # the environment's number for the first discrete action
    low: tuple[float, ...] = ()  # lower bound of each component of a continuous action
    high: tuple[float, ...] = ()

    @property
    def is_image(self) -> bool:
        """Return True if observations are images."""
        return len(self.observation) == 3

    @property
    def seen(self) -> str:
        """Description of the observations, for display."""
        if self.is_image:
            return f"images of {' × '.join(map(str, self.observation))}"
        return f"{self.observation[0]} numbers"

    @property
    def done(self) -> str:
        """Description of the actions, for display."""
        if self.choices is not None:
            return f"one of {self.choices} actions"
        bounds = (f"{a:g} to {b:g}" for a, b in zip(self.low, self.high, strict=True))
        return f"continuous actions from {', '.join(bounds)}"

    @property
    def action_numbers(self) -> int:
        """Number of components of a continuous action, or 0 for discrete actions."""
        return len(self.low)


def episode_seed(stream: str, example: int) -> int:
    """Return the seed of an example's episodes. All responses of a group share this seed."""
    return HELD_OUT + example if stream == "eval" else example


def make_environment(name: str) -> Any:
    """Create an environment with `gymnasium.make(name)`, or by calling a user's `file.py:name`.

    Raises:
        ValueError: If Gymnasium is not installed, or if there is no such environment. The message
            is one line that begins with the name.
    """
    missing = missing_library("gymnasium", INSTALL)
    if missing is not None:
        raise ValueError(f"{name}: {missing}")
    import gymnasium

    make = load("model.env", name) if is_reference(name) else functools.partial(_known, name)
    try:
        made = make()
    except Exception as error:  # user code and rendering libraries may raise anything
        raise ValueError(f"{name}: cannot be created: {' '.join(str(error).split())}") from error
    if not isinstance(made, gymnasium.Env):
        raise ValueError(f"{name}: is of type {type(made).__name__}, not a Gymnasium environment")
    return made


def _known(name: str) -> Any:
    import gymnasium

    # Gymnasium's checker would take longer per step than a small environment itself.
    return gymnasium.make(name, disable_env_checker=True)


@functools.lru_cache(maxsize=8)
def spaces_of(name: str) -> Spaces:
    """Return the spaces of the environment that `make_environment` creates.

    Raises:
        ValueError: For the same reasons as in `make_environment`, or if a space is not supported.
    """
    env = make_environment(name)
    try:
        shape, scale = _observations(name, env.observation_space)
        return Spaces(observation=shape, scale=scale, **_actions(name, env.action_space))
    finally:
        env.close()


def _observations(name: str, space: Any) -> tuple[tuple[int, ...], tuple[float, ...] | float]:
    from gymnasium.spaces import Box

    if not isinstance(space, Box) or len(space.shape) not in (1, 3):
        raise ValueError(
            f"{name}: observations are {space}; they must be a Box with the shape (n,), or "
            "(height, width, channels) for images"
        )
    if len(space.shape) == 3:
        if min(convolved(space.shape)[:2]) < 1:
            raise ValueError(
                f"{name}: images of {space.shape[0]} x {space.shape[1]} are too small for the "
                "convolutions of the policy; the smallest valid size is 18 x 18"
            )
        return space.shape, 255.0 if space.dtype.kind == "u" else 1.0
    largest = [
        max(abs(float(a)), abs(float(b))) for a, b in zip(space.low, space.high, strict=True)
    ]
    return space.shape, tuple(size if 0 < size < UNBOUNDED else 1.0 for size in largest)


def convolved(image: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (height, width, channels) of an image after `CONVOLUTIONS`."""
    height, width, channels = image
    for out, size in CONVOLUTIONS:
        height, width, channels = (height - size) // 2 + 1, (width - size) // 2 + 1, out
    return height, width, channels


def _actions(name: str, space: Any) -> dict[str, Any]:
    from gymnasium.spaces import Box, Discrete

    if isinstance(space, Discrete):
        return {"choices": int(space.n), "first": int(space.start)}
    if isinstance(space, Box) and len(space.shape) == 1 and _bounded(space.low, space.high):
        low, high = (tuple(float(v) for v in bound) for bound in (space.low, space.high))
        return {"choices": None, "low": low, "high": high}
    raise ValueError(
        f"{name}: actions are {space}; they must be discrete, or a bounded Box with the shape (n,)"
    )


def _bounded(low: Iterable[float], high: Iterable[float]) -> bool:
    return all(math.isfinite(value) for bound in (low, high) for value in bound)
