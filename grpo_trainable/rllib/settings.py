"""Conversion of RLlib's settings to a trial's, and rejection of settings that GRPO ignores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.utils import force_list

from grpo_trainable.config import (
    CHECKS,
    ConfigError,
    GRPOConfig,
    converted,
    expand_set,
    flatten,
    prepared,
    set_dotted,
    shown,
)

# RLlib has no last round, but a trial needs one, because its learning rate may fall until that
# round.
ENDLESS = 10**9

# RLlib's name -> our name, for settings with the same meaning.
SAME = {"lr": "optim.lr", "grad_clip": "optim.grad_clip", "seed": "seed"}

# Settings of a trial that `grpo` may not contain -> the way to set them in RLlib.
IN_RLLIBS_WAY = {
    "optim.lr": "training(lr=…)",
    "optim.grad_clip": "training(grad_clip=…)",
    "seed": "debugging(seed=…)",
    "placement": "env_runners(num_env_runners=…), where 0 means colocated",
    "resources.num_generators": "env_runners(num_env_runners=…)",
    "resources.num_learners": "learners(num_learners=…)",
    "eval.every": "evaluation(evaluation_interval=…)",
    "checkpoint.every": "save_to_path() or Tune's CheckpointConfig",
    "checkpoint.keep": "Tune's CheckpointConfig",
    "callbacks.kl_band": "callbacks(…)",
    "callbacks.verbose": "callbacks(…)",
}

# The methods of RLlib's callbacks that GRPO calls.
CALLED = (
    *("on_algorithm_init", "on_train_result", "on_checkpoint_loaded"),
    *("on_evaluate_start", "on_evaluate_end"),
)

# The settings of RLlib that GRPO reads, by their names in `to_dict`.
READ = {
    *SAME,
    *("num_env_runners", "num_learners", "evaluation_interval", "grpo"),
    *("callbacks", *(f"callbacks_{hook}" for hook in CALLED)),
    *("log_level", "log_sys_usage", "_use_msgpack_checkpoints", "class"),
}

# RLlib's other settings -> the reason why GRPO does not read them, or the setting to use instead.
WHY_NOT = {
    "env": "use training(grpo={'task': {…}})",
    "gamma": "a response has one reward, at its end",
    "train_batch_size": "use training(grpo={'rollout': {'prompts': …, 'group_size': …}})",
    "train_batch_size_per_learner": "use training(grpo={'rollout': {'prompts': …}})",
    "minibatch_size": "use training(grpo={'k': …, 'k_mode': 'minibatches'})",
    "num_epochs": "use training(grpo={'k': …})",
    "num_cpus_per_env_runner": "use training(grpo={'resources': {'generator_cpus': …}})",
    "num_gpus_per_env_runner": "use training(grpo={'resources': {'generator_gpus': …}})",
    "num_cpus_per_learner": "use training(grpo={'resources': {'learner_cpus': …}})",
    "num_gpus_per_learner": "use training(grpo={'resources': {'learner_gpus': …}})",
    "evaluation_duration": "use training(grpo={'eval': {'prompts': …, 'samples': …}})",
    "evaluation_num_env_runners": "the env runners that sample also evaluate",
    "model_config": "use training(grpo={'model': {…}})",
    "rl_module_spec": "use training(grpo={'model': {…}})",
}


def trial_data(config: Any, *, must_fetch: bool = True) -> dict[str, Any]:
    """Convert a `GRPOAlgorithmConfig` without search spaces to a trial's settings, as plain data.

    Args:
        config: The algorithm's config.
        must_fetch: See `prepared`.

    Raises:
        ConfigError: A setting is invalid, `grpo` contains a setting that has a name in RLlib, or
            the small files of the model cannot be downloaded. The message is one line.
    """
    given = flatten(expand_set(config.grpo))
    for key, way in IN_RLLIBS_WAY.items():
        if key in given:
            raise ConfigError(f"grpo: {key} cannot be set here; use {way}")
    rounds = given.get("rounds", ENDLESS)
    data: dict[str, Any] = {
        "rounds": rounds,
        **_actors(config, given),
        **dict(_same(config)),
        "eval.every": config.evaluation_interval or rounds,
        **given,
    }
    nested: dict[str, Any] = {}
    for key, value in data.items():
        set_dotted(nested, key, value)
    nested = prepared(nested, must_fetch=must_fetch)
    settings = GRPOConfig.from_dict(nested)
    if "rounds" not in given and settings.optim.schedule != "constant":
        raise ConfigError(
            f"optim.schedule={settings.optim.schedule}: needs grpo={{'rounds': …}}, the number of "
            "rounds over which the learning rate falls"
        )
    return nested


def _same(config: Any) -> Iterator[tuple[str, Any]]:
    """For each setting in `SAME`, yield our key and the value.

    Raises:
        ConfigError: A value is invalid. The message contains RLlib's name of the setting.
    """
    for theirs, ours in SAME.items():
        value = config[theirs]
        if theirs == "lr" and isinstance(value, list | tuple):
            raise ConfigError(
                f"lr={shown(value)}: must be a number; for a schedule, use "
                "training(grpo={'rounds': …, 'optim': {'schedule': 'linear'}})"
            )
        if value is not None:
            yield ours, converted(theirs, value, CHECKS[ours])


def _actors(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for the placement and the actors.

    In RLlib, 0 env runners and 0 learners mean that the algorithm's own process does the work.
    """
    runners, learners = config.num_env_runners, config.num_learners
    if not _is_count(runners):
        raise ConfigError(f"num_env_runners={shown(runners)}: must be a whole number >= 0")
    if not _is_count(learners):
        raise ConfigError(f"num_learners={shown(learners)}: must be a whole number >= 0")
    if runners:
        return {
            "placement": "disaggregated",
            "resources.num_generators": int(runners),
            "resources.num_learners": max(1, int(learners)),
        }
    needs = "needs env_runners(num_env_runners=…) >= 1; with 0, one process samples and trains"
    if learners:
        raise ConfigError(f"num_learners={shown(learners)}: {needs}")
    if given.get("lag") and given.get("lag_mode") != "exact":
        raise ConfigError(f"lag={shown(given['lag'])}: {needs}; or set lag_mode=exact")
    return {"placement": "colocated"}


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def refuse_unread(config: AlgorithmConfig, untouched: AlgorithmConfig) -> None:
    """Reject settings of RLlib that differ from `untouched` but have no effect with GRPO.

    Raises:
        ConfigError: A setting has no effect, a key is unknown, or a callback has a method that is
            never called.
    """
    defaults = untouched.to_dict()
    for name, value in config.to_dict().items():
        if name in READ or name.startswith("__"):  # a key of Tune, such as __stdout_file__
            continue
        shown_name = name.removeprefix("_")
        if name not in defaults:
            # Tune uses `update_from_dict`, which accepts any name.
            raise ConfigError(
                f"{shown(name)}: unknown key; use training(grpo={{…}}) for settings of GRPO"
            )
        if value != defaults[name]:
            why = WHY_NOT.get(shown_name, "docs/howto/rllib.md says how to set what GRPO reads")
            raise ConfigError(f"{shown_name}: has no effect with GRPO; {why}")
    for callback in force_list(config.callbacks_class):
        _refuse_uncalled(callback)


def _refuse_uncalled(callback: type[RLlibCallback]) -> None:
    """Raise ConfigError if `callback` has a method that would never be called."""
    for hook in dir(RLlibCallback):
        if not hook.startswith("on_") or hook in CALLED:
            continue
        if getattr(callback, hook) is not getattr(RLlibCallback, hook):
            raise ConfigError(
                f"callbacks: {callback.__name__}.{hook} is never called, because generators sample "
                f"the responses; use one of {', '.join(CALLED)}"
            )
