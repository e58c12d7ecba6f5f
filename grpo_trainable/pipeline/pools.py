"""Difficulty pools, which choose training examples by how often the policy solves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_trainable.config import GRPOConfig

# Last element of the key that seeds the draws from the pools. Numpy pads shorter keys with zeros.
# This key is longer than all other keys and does not end with a zero, so no other draw has the same
# key.
POOLS = 3

NAMES = ("easy", "mid", "hard")


class Pick(NamedTuple):
    """The example that was picked for a prompt, and the pool that the example was in."""

    example: int
    pool: str


class DifficultyPools:
    """Three pools (easy, mid and hard) of training examples, grouped by running pass rate.

    An example that has never been scored is in the mid pool. For each prompt, one of the non-empty
    pools is drawn at random, with probabilities proportional to the shares in the settings. Then an
    example is drawn at random from the examples of this pool that have been picked least often. The
    random numbers are a function of (seed, prompt index). Pass rates change only once per round,
    before the gradient steps, so at lag 0 the picks do not depend on timing.

    The pass rate of an example starts as the mean answer reward of its first group. Each further
    group, with mean answer reward r, updates the rate: rate ← memory · rate + (1 − memory) · r,
    where memory is `pools.memory`.
    """

    def __init__(self, config: GRPOConfig, size: int) -> None:
        """Create pools in which no example has been scored.

        Args:
            config: The trial's settings.
            size: Number of training examples.
        """
        self._settings, self._seed = config.pools, config.seed
        self._rates = np.full(size, np.nan)  # NaN: never scored
        self._times_picked = np.zeros(size, dtype=np.int64)
        # Prompt index -> its pick, which is kept until a round has reported the prompt.
        self._picks: dict[int, Pick] = {}

    # ---- Picking -----------------------------------------------------------------------------

    def pick(self, prompt_indices: Sequence[int]) -> list[int]:
        """Return the example of each prompt. A repeated call returns the same examples."""
        for index in prompt_indices:
            if index not in self._picks:
                self._picks[index] = self._pick(index)
        return [self._picks[index].example for index in prompt_indices]

    def _pick(self, prompt_index: int) -> Pick:
        rng = np.random.default_rng((self._seed, prompt_index, 0, 0, 0, POOLS))
        members = {pool: examples for pool in NAMES if len(examples := self._members(pool))}
        shares = np.array([self._shares[pool] for pool in members])
        if not shares.any():  # every pool with a share above 0 is empty
            shares = np.ones(len(members))
        pool = list(members)[rng.choice(len(members), p=shares / shares.sum())]
        times = self._times_picked[members[pool]]
        example = int(rng.choice(members[pool][times == times.min()]))
        self._times_picked[example] += 1
        return Pick(example, pool)

    @property
    def _shares(self) -> dict[str, float]:
        return {pool: getattr(self._settings, pool) for pool in NAMES}

    def _members(self, pool: str) -> np.ndarray:
        """Return the examples of a pool, in ascending order."""
        easy = self._rates > self._settings.easy_above
        hard = self._rates < self._settings.hard_below
        mask = {"easy": easy, "mid": ~(easy | hard), "hard": hard}[pool]
        return mask.nonzero()[0]

    # ---- Learning ----------------------------------------------------------------------------

    def settle(self, drawn: Sequence[int], answers: Mapping[int, float]) -> dict[str, float]:
        """Update pass rates with the results of a round's prompts, and return the pools' metrics.

        The metrics count the prompts drawn from each pool, the examples in each pool after the
        update, and the examples that have never been scored.

        Args:
            drawn: Indices of the prompts drawn for the round, in order.
            answers: Prompt index -> mean answer reward. Prompts whose reward failed are missing.
        """
        of_round = [self._picks.pop(index) for index in drawn]
        for index, pick in zip(drawn, of_round, strict=True):
            if index in answers:
                self._move(pick.example, answers[index])
        row = {f"pool/{name}_drawn": 0.0 for name in NAMES}
        for pick in of_round:
            row[f"pool/{pick.pool}_drawn"] += 1.0
        sizes = {f"pool/{name}_size": float(len(self._members(name))) for name in NAMES}
        return {**row, **sizes, "pool/new_size": float(np.isnan(self._rates).sum())}

    def _move(self, example: int, answer: float) -> None:
        rate, memory = self._rates[example], self._settings.memory
        known = not np.isnan(rate)
        self._rates[example] = memory * rate + (1 - memory) * answer if known else answer

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state of the pools as plain data."""
        seen = self._times_picked.nonzero()[0]
        return {
            "size": len(self._rates),
            "examples": [
                [int(i), int(self._times_picked[i]), None if np.isnan(rate) else float(rate)]
                for i, rate in zip(seen, self._rates[seen], strict=True)
            ],
            "drawn": [[index, *pick] for index, pick in sorted(self._picks.items())],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of pools with the same number of examples."""
        assert state["size"] == len(self._rates), "the state has a different number of examples"
        for example, times, rate in state["examples"]:
            self._times_picked[example] = times
            self._rates[example] = np.nan if rate is None else rate
        self._picks = {index: Pick(example, pool) for index, example, pool in state["drawn"]}
