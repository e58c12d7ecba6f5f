"""The trials of a search space as a Tune grid search, in a chosen order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import tune
from ray.tune.search.basic_variant import BasicVariantGenerator

from grpo_trainable.config import GRPOConfig, flatten, set_dotted


def param_space(trials: Sequence[GRPOConfig]) -> dict[str, Any]:
    """Return the trials as a Tune search space: a grid over arm and seed.

    If the value of a key differs between arms, `tune.sample_from` derives it from the arm. So the
    key appears under its own name in params.json and among TensorBoard's hparams. Every other key
    is a constant. If arms run tasks with different keys, the whole section `task` is derived.

    Raises:
        ValueError: The trials are not a full grid of their arms and seeds.
    """
    arms = list(dict.fromkeys(trial.arm for trial in trials))
    seeds = list(dict.fromkeys(trial.seed for trial in trials))
    if len(arms) * len(seeds) != len(trials):
        raise ValueError(
            f"{len(trials)} trials do not form a grid of {len(arms)} arms x {len(seeds)} seeds"
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
    """Value of one key as a function of the arm."""

    values: Mapping[str, Any]

    def __call__(self, config: Mapping[str, Any]) -> Any:
        return self.values[config["arm"]]


class OrderedGrid(BasicVariantGenerator):
    """Search algorithm that creates the trials of a grid over `arm` and `seed` in a given order.

    The scheduler decides how many trials run at the same time: see `tuning.schedulers`.

    Each trial remains a grid search, over one arm and one seed. So TensorBoard still treats arm and
    seed as searched parameters, and Tune's `sample_from` still derives the other values from the
    arm.
    """

    def __init__(
        self, order: Sequence[tuple[str, int]], is_any_waiting: Callable[[], bool]
    ) -> None:
        """Store the order of the trials.

        Args:
            order: A pair (arm, seed) for each trial.
            is_any_waiting: Returns True if a created trial waits for its turn.
        """
        super().__init__()
        self._order = list(order)
        self._is_any_waiting = is_any_waiting

    def add_configurations(self, experiments: Any) -> None:
        """Add a grid search of one trial for each pair, in order."""
        (experiment,) = experiments  # Tune passes exactly one experiment
        for arm, seed in self._order:
            one = copy.copy(experiment)
            searched = {"arm": tune.grid_search([arm]), "seed": tune.grid_search([seed])}
            one.spec = {**experiment.spec, "config": {**experiment.spec["config"], **searched}}
            super().add_configurations([one])

    def is_finished(self) -> bool:
        """Return True once every trial has been created and none of them waits for its turn.

        Tune ends the processes of a finished trial if the search is finished and no trial is about
        to start. But at that moment, the scheduler has not chosen the next trial yet.
        """
        return super().is_finished() and not self._is_any_waiting()

    def get_state(self) -> dict[str, Any]:
        """Return the state that Tune stores for a resume. It does not contain the trials."""
        state = super().get_state()
        assert state, "Tune stores no state of huge grids, but each grid here has one trial"
        del state["_is_any_waiting"]
        return state
