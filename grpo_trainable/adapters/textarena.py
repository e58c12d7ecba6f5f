"""Adapter for single-player games of TextArena (https://www.textarena.ai)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from grpo_trainable.adapters.optional_library import library
from grpo_trainable.environments import JSONValue, Turn


def textarena_environment(name: str, **options: Any) -> type:
    """Return a class for `env.name` that plays `textarena.make(name, **options)`.

    An episode's specification is {"seed": N}. The policy reads each message from the game only
    once. The last action earns the game's reward.

    Args:
        name: Name of the game in TextArena.
        **options: Options of `textarena.make`.

    Raises:
        ValueError: If TextArena is not installed or has no game of this name. The message is one
            line.
    """
    textarena = library("textarena", extra="textarena")
    if name not in textarena.envs.registration.ENV_REGISTRY:
        raise ValueError(f"TextArena has no game {name}")

    class Adapted:
        def __init__(self) -> None:
            self._game = self._inner = textarena.make(name, **options)
            while isinstance(self._inner, textarena.Wrapper):  # wrappers repeat earlier messages
                self._inner = self._inner.env
            self._randomness = OwnRandomness()  # games use Python's global random generator

        def reset(self, spec: JSONValue) -> str:
            assert isinstance(spec, Mapping), spec
            with self._randomness.in_use():
                self._game.reset(num_players=1, seed=spec["seed"])
                return self._heard()

        def step(self, action: str) -> Turn:
            with self._randomness.in_use():
                done, _ = self._game.step(action.strip())
                if not done:
                    return Turn(self._heard())
                rewards, games = self._game.close()
            invalid = float(bool(games[0].get("invalid_move")))
            return Turn(reward=float(rewards[0]), done=True, info={"invalid": invalid})

        def _heard(self) -> str:
            player, messages = self._inner.get_observation()
            return "".join(f"{text}\n" for sender, text, _ in messages if sender != player)

        def close(self) -> None:
            """No resources to release."""

    return Adapted


class OwnRandomness:
    """Isolates one user of Python's global random generator from all other users."""

    def __init__(self) -> None:
        self._state = random.Random().getstate()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Switch `random` to this object's state, and restore the previous state on exit."""
        others = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(others)
