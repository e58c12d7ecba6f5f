"""Tune's grid search in an order of our own.

Apart from `launch.tune`, because Ray is imported here: the launcher answers bad usage without it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from ray import tune
from ray.tune.search.basic_variant import BasicVariantGenerator


class OrderedGrid(BasicVariantGenerator):
    """The trials of a grid over `arm` and `seed`, one after the other as `order` names them.

    Each stays a grid search, over one arm and one seed, so that both stay searched parameters for
    TensorBoard and what is sampled from the arm is resolved as ever.
    """

    def __init__(self, order: Sequence[tuple[str, int]], max_concurrent: int = 0) -> None:
        super().__init__(max_concurrent=max_concurrent)
        self._order = list(order)

    def add_configurations(self, experiments: Any) -> None:
        (experiment,) = experiments  # Tune gives its only one
        for arm, seed in self._order:
            one = copy.copy(experiment)
            searched = {"arm": tune.grid_search([arm]), "seed": tune.grid_search([seed])}
            one.spec = {**experiment.spec, "config": {**experiment.spec["config"], **searched}}
            super().add_configurations([one])

    def set_state(self, state: dict[str, Any]) -> None:
        """A resumed experiment keeps its order, and takes the limit that it is resumed with."""
        super().set_state({**state, "max_concurrent": self.max_concurrent})
