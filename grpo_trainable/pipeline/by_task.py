"""Metrics of each task in a mix of tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from grpo_trainable.config import GRPOConfig
from grpo_trainable.pipeline.rollout_metrics import rollout_metrics
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.tasks.mix import mixture_of

# Name in `task/<label>/<name>` -> the metric that measures the same quantity over all tasks.
OF_A_ROUND = {
    "reward_mean": "reward/train_mean",
    "length_mean": "response/length_mean",
    "truncated_fraction": "response/truncated_fraction",
    "zero_advantage_fraction": "group/zero_advantage_fraction",
}


class ByTask:
    """Computes metrics for each task in `task.mix`. Without a mix, there are no such metrics."""

    def __init__(self, config: GRPOConfig) -> None:
        self._mixture = mixture_of(config)
        self.labels = () if self._mixture is None else self._mixture.labels

    def drawn(self, prompt_indices: Iterable[int]) -> dict[str, float]:
        """For each task, count the prompts that were drawn for a round."""
        counts = Counter(self._label("train", index) for index in prompt_indices)
        return {f"task/{label}/drawn": float(counts[label]) for label in self.labels}

    def trained(self, groups: Sequence[RolloutGroup], learner_round: int) -> dict[str, float]:
        """For each task, return metrics of the groups that a round trained on.

        If a task has no groups, its only metric is the number of groups.

        Args:
            groups: The groups of all tasks.
            learner_round: Number of rounds of training before this one.
        """
        row: dict[str, float] = {}
        for label in self.labels:
            own = [g for g in groups if self._label("train", g.example) == label]
            row[f"task/{label}/groups"] = float(len(own))
            if not own:
                continue
            of_round = rollout_metrics(own, learner_round)
            row |= {f"task/{label}/{name}": of_round[whole] for name, whole in OF_A_ROUND.items()}
            for name in ("format_mean", "answer_mean"):
                means = [mean for group in own if (mean := getattr(group, name)) is not None]
                if means:
                    row[f"task/{label}/{name}"] = math.fsum(means) / len(means)
        return row

    def held_out(
        self,
        groups: Sequence[RolloutGroup],
        unscored: Sequence[int],
        before: Mapping[str, Mapping[str, float]],
    ) -> dict[str, dict[str, float]]:
        """Return the figures of each task in an evaluation, keyed by the task's label.

        The figures of a task are:

        - `unscored`: number of prompts that could not be scored
        - `reward_mean`: mean reward of the scored prompts, if there are any
        - `reward_first`: `reward_mean` of the first evaluation that has one

        Args:
            groups: The scored groups of all tasks.
            unscored: Indices of the prompts that could not be scored.
            before: The result of this method for the previous evaluation, or an empty mapping.
        """
        failed = Counter(self._label("eval", index) for index in unscored)
        found: dict[str, dict[str, float]] = {}
        for label in self.labels:
            own = [g for g in groups if self._label("eval", g.example) == label]
            figures = {"unscored": float(failed[label])}
            rewards = [float(group.rewards.mean()) for group in own]
            if rewards:
                figures["reward_mean"] = math.fsum(rewards) / len(rewards)
            first = before.get(label, {}).get("reward_first", figures.get("reward_mean"))
            if first is not None:
                figures["reward_first"] = first
            found[label] = figures
        return found

    def _label(self, stream: str, index: int) -> str | None:
        return None if self._mixture is None else self._mixture.origin(stream, index).label
