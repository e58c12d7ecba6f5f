"""What a search space is: named arms, resolved to whole configs before anything starts."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_trainable.config import ConfigError, GRPOConfig, flatten, set_dotted


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """A grid over `arms`: label -> the dotted keys that the arm decides, with their values."""

    name: str
    question: str  # one line
    arms: Mapping[str, Mapping[str, Any]]
    missing: Callable[[str], str | None] = lambda arm: None  # what this machine lacks for an arm

    def not_available(self) -> dict[str, str]:
        """arm -> why it cannot run here."""
        missing = {arm: self.missing(arm) for arm in self.arms}
        return {arm: reason for arm, reason in missing.items() if reason is not None}

    def trials(
        self, fixed: Mapping[str, Any], seeds: Sequence[int], without: Collection[str] = ()
    ) -> list[GRPOConfig]:
        """The config of every trial: each arm with each seed, `fixed` keys replacing the arm's.
        Arms `without` are left out unless `fixed` names one.

        Trials that `fixed` has made equal but for their label are merged into the first of them.

        Raises:
            ConfigError: a trial is invalid, or `fixed` names an arm that the space does not have.
        """
        trials: dict[str, GRPOConfig] = {}
        for arm in self._chosen_arms(fixed, without):
            for seed in seeds:
                data: dict[str, Any] = {}
                keys = {"seed": seed, **self.arms[arm], **fixed, "arm": arm}
                for key, value in keys.items():
                    set_dotted(data, key, value)
                try:
                    config = GRPOConfig.from_dict(data)
                except ConfigError as error:
                    raise ConfigError(f"{error} (arm {arm} of {self.name})") from None
                same = {**flatten(config.to_dict()), "arm": None}
                trials.setdefault(repr(sorted(same.items())), config)
        return list(trials.values())

    def _chosen_arms(self, fixed: Mapping[str, Any], without: Collection[str]) -> list[str]:
        if "arm" not in fixed:
            return [arm for arm in self.arms if arm not in without]
        arm = str(fixed["arm"])
        if arm in self.arms:
            return [arm]
        near = difflib.get_close_matches(arm, self.arms, n=1)
        hint = f"did you mean {near[0]}?" if near else f"valid: {', '.join(self.arms)}"
        raise ConfigError(f"arm={arm}: not an arm of {self.name}; {hint}")


def param_space(trials: Sequence[GRPOConfig]) -> dict[str, Any]:
    """The same trials as a Tune search space: a grid over arm and seed.

    A key that differs between arms is sampled from the arm, so that it stands in its own place in
    params.json and among TensorBoard's hparams; every other key is a constant.

    Raises:
        ValueError: the trials are no full grid of their arms and seeds.
    """
    from ray import tune

    arms = list(dict.fromkeys(trial.arm for trial in trials))
    seeds = list(dict.fromkeys(trial.seed for trial in trials))
    if len(arms) * len(seeds) != len(trials):
        raise ValueError(
            f"{len(trials)} trials are no grid of {len(arms)} arms x {len(seeds)} seeds"
        )
    by_arm = {trial.arm: flatten(trial.to_dict()) for trial in trials}
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


@dataclass(frozen=True)
class _ByArm:
    """The value of one key, given the arm."""

    values: Mapping[str, Any]

    def __call__(self, config: Mapping[str, Any]) -> Any:
        return self.values[config["arm"]]
