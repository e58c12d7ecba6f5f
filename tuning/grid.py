"""The trials of a search space as Tune's grid search, in an order of our own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import tune
from ray.tune.search.basic_variant import BasicVariantGenerator

from grpo_trainable.config import GRPOConfig, flatten, set_dotted


def param_space(trials: Sequence[GRPOConfig]) -> dict[str, Any]:
    """The trials as a Tune search space: a grid over arm and seed.

    A key that differs between arms is sampled from the arm, so that it stands in its own place in
    params.json and among TensorBoard's hparams; every other key is a constant. Where arms run tasks
    with different keys, the section `task` is sampled as a whole.

    Raises:
        ValueError: the trials are not a full grid of their arms and seeds.
    """
    arms = list(dict.fromkeys(trial.arm for trial in trials))
    seeds = list(dict.fromkeys(trial.seed for trial in trials))
    if len(arms) * len(seeds) != len(trials):
        raise ValueError(
            f"{len(trials)} trials are no grid of {len(arms)} arms x {len(seeds)} seeds"
        )
    by_arm = {trial.arm: flatten(trial.to_dict()) for trial in trials}
    if len({frozenset(flat) for flat in by_arm.values()}) > 1:
        by_arm = {trial.arm: _with_task_whole(trial.to_dict()) for trial in trials}
    space: dict[str, Any] = {}
    for key in by_arm[arms[0]]:
        values = {arm: by_arm[arm][key] for arm in arms}
        if key in ("arm", "seed"):
            set_dotted(space, key, tune.grid_search(arms if key == "arm" else seeds))
        elif all(value == values[arms[0]] for value in values.values()):
            set_dotted(space, key, values[arms[0]])
        else:
            set_dotted(space, key, tune.sample_from(_ByArm(values)))
    return space


def _with_task_whole(config: Mapping[str, Any]) -> dict[str, Any]:
    others = {name: value for name, value in config.items() if name != "task"}
    return {**flatten(others), "task": config["task"]}


@dataclass(frozen=True)
class _ByArm:
    """The value of one key, given the arm."""

    values: Mapping[str, Any]

    def __call__(self, config: Mapping[str, Any]) -> Any:
        return self.values[config["arm"]]


class OrderedGrid(BasicVariantGenerator):
    """Makes the trials of a grid over `arm` and `seed`, in the given `order` of (arm, seed) pairs.

    How many of them run at a time is for the scheduler to say: see `tuning.schedulers`.

    Each trial stays a grid search, over one arm and one seed, so that both remain searched
    parameters for TensorBoard and what is sampled from the arm is resolved as in any grid.
    """

    def __init__(self, order: Sequence[tuple[str, int]]) -> None:
        super().__init__()
        self._order = list(order)

    def add_configurations(self, experiments: Any) -> None:
        (experiment,) = experiments  # Tune gives its only one
        for arm, seed in self._order:
            one = copy.copy(experiment)
            searched = {"arm": tune.grid_search([arm]), "seed": tune.grid_search([seed])}
            one.spec = {**experiment.spec, "config": {**experiment.spec["config"], **searched}}
            super().add_configurations([one])
