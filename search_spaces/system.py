"""The space of whole systems, for your own `tune.Tuner`: how to sample, train and move weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_trainable.config import (
    CHECKS,
    ConfigError,
    GRPOConfig,
    expand_set,
    flatten,
    of_other_placement,
    shown,
)
from search_spaces.spaces import ROUNDS, fresh

EVALUATIONS = 6  # number of evaluations in a trial that has enough rounds

# Setting that the space chooses -> the argument that has its values. `rounds` takes one value.
ARGUMENTS = {
    "rounds": "rounds",
    "lag": "lags",
    "weight_update": "weight_updates",
    "transport": "transports",
    "k": "ks",
    "k_mode": "k_modes",
    "buffer_capacity": "buffer_capacities",
}


def system_space(
    settings: Mapping[str, Any] | None = None,
    *,
    grid: bool = False,
    rounds: int = ROUNDS,
    lags: Sequence[int] = (1, 2, 4),
    weight_updates: Sequence[str] = CHECKS["weight_update"].choices,
    transports: Sequence[str] = ("auto", "object_store"),
    resources: Mapping[str, Any] | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
    k_modes: Sequence[str] = CHECKS["k_mode"].choices,
    buffer_capacities: Sequence[int] = (1, 2, 4),
) -> dict[str, Any]:
    """Return a `param_space` over placement, lag, weight update, transport, k and replay.

    The space has three parameters. Each is one choice among combinations of settings that are valid
    together, written as for `--set`:

    - `set/actors`: colocated actors, or separate actors with a lag (0 or one of `lags`), a point at
      which weights are updated (`weight_update`), and a transport.
    - `set/steps`: the number and kind of gradient steps, with the number of rounds. All trials
      sample the same number of responses, and are evaluated equally often.
    - `buffer_capacity`: number of rounds whose rollouts are kept for replay. With replay, a
      gradient step trains on older groups in addition to all fresh ones.

    With one parameter per setting, some combinations would be invalid: `lag` and `transport` have
    an effect only with separate actors, and `weight_update` only with a lag. Tune cannot express
    such conditions in a form that every searcher accepts: Optuna and HyperOpt reject
    `tune.sample_from`, only Optuna accepts a function that draws values, and only HyperOpt accepts
    nested choices. Here, every value of a parameter is valid with every value of the others. So a
    grid, a random search, Optuna and HyperOpt all work, and a searcher can learn about each
    parameter separately.

    Some combinations are invalid with other settings. For example, a rollout batch of 4 prompts
    cannot be divided into 8 minibatches. So pass constant settings as `settings`. Add domains to
    the result, as in `{**system_space(settings), "optim": {"lr": …}}`. To fix a parameter, pass a
    single value.

    Args:
        settings: Settings of every trial, as nested constants. The space contains them, and leaves
            out the combinations that are invalid with them.
        grid: Use `tune.grid_search` in place of `tune.choice`. The default space has 630
            combinations.
        rounds: Number of rounds in a trial with one rollout batch per round; a multiple of each k.
        lags: The lags. Lag 0 is always included.
        weight_updates: Values of `weight_update`.
        transports: Values of `transport` for separate actors.
        resources: Settings of `resources` without the prefix, such as `{"worker_gpus": 1}`. Each
            is given only to trials whose placement reads it.
        ks: Values of `k`.
        k_modes: Values of `k_mode` for k above 1.
        buffer_capacities: Values of `buffer_capacity`.

    Raises:
        ConfigError: A value is invalid, no value of a parameter is valid with `settings`,
            `settings` contains a setting that the space chooses, or `rounds` is not a multiple of
            each k.
    """
    from ray import tune  # Ray is slow to import, and reports read the other spaces without it

    base = dict(settings or {})
    _refuse_chosen(base)
    lags = [lag for lag in _list("lags", lags) if lag != 0]
    weight_updates = _list("weight_updates", weight_updates)
    transports = _list("transports", transports)
    ks, k_modes = _list("ks", ks, 1), _list("k_modes", k_modes, 1)
    buffer_capacities = _list("buffer_capacities", buffer_capacities, 1)
    rounds = GRPOConfig.from_dict({"rounds": rounds}).rounds  # rejects an invalid number
    reserved = {f"resources.{name}": value for name, value in (resources or {}).items()}
    separate = _separate_actors(lags, weight_updates, transports)
    actors = [
        {
            **one,
            **{k: v for k, v in reserved.items() if not of_other_placement(k, one["placement"])},
        }
        for one in ({"placement": "colocated"}, *separate)
    ]
    combinations = {
        "actors": _texts("actors", actors),
        "steps": _texts("steps", _steps(rounds, ks, k_modes)),
    }
    for capacity in buffer_capacities:
        GRPOConfig.from_dict({"buffer_capacity": capacity})
    choose = tune.grid_search if grid else tune.choice
    values = [*combinations.values(), buffer_capacities]
    if base:  # without settings, every combination is valid
        values = _valid_together(values, lambda *drawn: _config(base, *drawn))
    actors_, steps, capacities = map(choose, values)
    return _config(base, actors_, steps, capacities)


def _refuse_chosen(settings: Mapping[str, Any]) -> None:
    """Refuse settings that the space chooses.

    Raises:
        ConfigError: `settings` contains such a setting.
    """
    for key, value in flatten(expand_set(settings)).items():
        text = f"{key}={shown(value)}: system_space chooses this setting; leave it out"
        if key in ("placement", "eval.every"):
            raise ConfigError(text)
        if key in ARGUMENTS:
            values = value if key == "rounds" else [value]
            raise ConfigError(f"{text}, and use system_space({ARGUMENTS[key]}={values!r})")


def _list(argument: str, values: Any, fewest: int = 0) -> list:
    """Return the values of an argument of `system_space`.

    Raises:
        ConfigError: The argument is not a list, or has fewer than `fewest` values.
    """
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise ConfigError(f"{argument}={shown(values)}: must be a list, such as [{values!r}]")
    found = list(values)
    if len(found) < fewest:
        raise ConfigError(f"{argument}=[]: must have at least one value")
    return found


def _config(base: Mapping[str, Any], actors: Any, steps: Any, capacity: Any) -> dict[str, Any]:
    together = {**base.get("set", {}), "actors": actors, "steps": steps}
    return {**base, "set": together, "buffer_capacity": capacity}


def _separate_actors(
    lags: Sequence[int], weight_updates: Sequence[str], transports: Sequence[str]
) -> Iterator[dict[str, Any]]:
    for transport in transports:
        apart = {"placement": "disaggregated", "transport": transport}
        yield {**apart, "lag": 0}
        for lag in lags:
            for update in weight_updates:
                yield {**apart, "lag": lag, "weight_update": update}


def _steps(rounds: int, ks: Sequence[int], k_modes: Sequence[str]) -> Iterator[dict[str, Any]]:
    ks = [GRPOConfig.from_dict({"k": k}).k for k in ks]  # rejects an invalid k
    common = math.lcm(*ks)
    if rounds % common:
        raise ConfigError(
            f"rounds={rounds}: must be a multiple of {common}, so that trials with any k sample "
            "the same number of responses"
        )
    every = max(1, rounds // EVALUATIONS // common) * common
    for k in ks:
        for mode in k_modes if k > 1 else k_modes[:1]:
            batches = k if mode == "fresh_batches" else 1
            yield {**fresh(batches, rounds, every), "k": k, "k_mode": mode}


def _valid_together(
    values: Sequence[list], config_of: Callable[..., Mapping[str, Any]]
) -> list[list]:
    """Leave out values of the parameters until every combination of the remaining values is valid.

    The value with the largest share of invalid combinations is left out first.

    Raises:
        ConfigError: No value of a parameter is left.
    """
    errors = {drawn: _error(config_of(*drawn)) for drawn in itertools.product(*values)}
    left = [list(own) for own in values]
    while wrong := [drawn for drawn in itertools.product(*left) if errors[drawn] is not None]:
        share = {
            (place, value): sum(drawn[place] == value for drawn in wrong) * len(own)
            for place, own in enumerate(left)
            for value in own
        }
        place, value = max(share, key=share.__getitem__)
        left[place].remove(value)
        error = errors[wrong[-1]]
        if not left[place] and error is not None:
            raise error
    return left


def _error(config: Mapping[str, Any]) -> ConfigError | None:
    try:
        GRPOConfig.from_dict(config)
    except ConfigError as error:
        return error
    return None


def _texts(name: str, combinations: Sequence[dict[str, Any]] | Iterator[dict[str, Any]]) -> list:
    """Return each combination as a string for `set`. Check first that each combination is valid."""
    texts = [",".join(f"{key}={value}" for key, value in one.items()) for one in combinations]
    for text in texts:
        GRPOConfig.from_dict({"set": {name: text}})
    return texts
