"""Validation in `GRPOConfig.from_dict`: valid values, invalid values, and error messages."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainable.config import (
    CHECKS,
    ConfigError,
    GRPOConfig,
    LossSettings,
    OptimSettings,
    choice_or_reference,
    converted,
    expand_set,
    expanded,
    flatten,
    fresh_wanted,
    make_absolute,
    parse_assignment,
    parse_assignments,
    resources,
    schedule,
    set_dotted,
    shown,
    threads,
)
from grpo_trainable.config.describe import COMMAND, page
from grpo_trainable.config.loss import TO_THE_SAMPLER
from grpo_trainable.config.task import CommonTaskSettings
from grpo_trainable.config.values import Settings


def nested(**dotted):
    """Convert `nested(optim__lr=1)` to `{"optim": {"lr": 1}}`."""
    result: dict = {}
    for key, value in dotted.items():
        set_dotted(result, key.replace("__", "."), value)
    return result


def error(data) -> str:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.from_dict(data)
    text = str(caught.value)
    assert "\n" not in text
    return text


def config_or_line(data) -> GRPOConfig | str:
    try:
        return GRPOConfig.from_dict(data)
    except ConfigError as caught:
        return str(caught)


def keys_of(section: str) -> str:
    names = (key.removeprefix(f"{section}.") for key in CHECKS if key.startswith(f"{section}."))
    return ", ".join(names)


# ---- Defaults and shape ----------------------------------------------------------------------

DEFAULTS = {
    "arm": "custom",
    "placement": "colocated",
    "rounds": 96,
    "k": 1,
    "k_mode": "same_batch",
    "lag": 0,
    "lag_mode": "bounded",
    "weight_update": "between_batches",
    "buffer_capacity": 1,
    "buffer_sampling": "recency",
    "engine": "auto",
    "transport": "auto",
    "transport_dtype": "float32",
    "seed": 0,
    "model": {
        "preset": "tiny",
        "path": None,
        "env": None,
        "chat_template": "off",
        "system": None,
        "template_args": None,
        "dtype": "float32",
        "head_fp32": True,
        "sampler_dtype": "float32",
        "gradient_checkpointing": False,
        "packing": True,
        "adapter": None,
        "lora_rank": None,
        "lora_alpha": None,
        "lora_targets": "all-linear",
    },
    "task": {
        "name": "keyword",
        "keywords_file": None,
        "keywords_per_prompt": 1,
        "match": "word",
        "train_file": None,
        "eval_file": None,
        "reward": None,
        "reward_deadline_s": 10.0,
        "max_error_rate": 0.1,
        "reward_weights": None,
        "normalize_parts": False,
        "length_penalty": 0.0,
        "length_target": None,
        "strict": False,
    },
    "rollout": {
        "prompts": 16,
        "unit_prompts": None,
        "slots": None,
        "group_size": 4,
        "min_new_tokens": 1,
        "max_new_tokens": 60,
        "stop": None,
        "temperature": 0.8,
        "zero_advantage": "keep",
        "oversample": 4.0,
        "redraws": 8,
        "stragglers": "wait",
        "overlong": "score",
        "overlong_buffer": None,
        "overlong_penalty": 1.0,
        "interruption": ("Okay, time is up. Let me formulate a final answer now. </think>"),
        "thinking_end": "</think>",
    },
    "env": {
        "name": "off",
        "role": "user",
        "allow_unsafe": False,
        "max_turns": 8,
        "discount": 1.0,
        "step_deadline_s": 10.0,
        "episode_deadline_s": 60.0,
        "patience_s": 1.0,
    },
    "pools": {
        "enabled": False,
        "easy": 0.1,
        "mid": 0.8,
        "hard": 0.1,
        "easy_above": 0.8,
        "hard_below": 0.2,
        "memory": 0.5,
    },
    "loss": {
        "type": "grpo_clip",
        "advantage": "group_std",
        "advantage_eps": 1e-8,
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "whiten": True,
        "aggregation": "sequence_mean",
        "clip": 0.2,
        "clip_high": None,
        "dual_clip": None,
        "tau_positive": 1.0,
        "tau_negative": 1.05,
        "second_moment": 0.04,
        "cov_fraction": 2e-4,
        "cov_band": [1.0, 5.0],
        "cov_kl_coef": 1.0,
        "teacher": None,
        "teacher_coef": 1.0,
        "kl_coef": 0.0,
        "kl_in": "loss",
        "kl_target": None,
        "kl_gain": 0.1,
        "kl_estimator": "k3",
        "kl_monitor": True,
        "kl_monitor_responses": 16,
        "importance_cap": None,
        "importance_level": "token",
        "importance_rule": "truncate",
        "importance_floor": None,
    },
    "critic": {"body": "own", "lr": None, "coef": 0.5, "clip": 0.2},
    "vine": {"samples": 4, "states": "chunks", "chunk_tokens": 16},
    "optim": {
        "lr": 3e-4,
        "betas": [0.9, 0.95],
        "weight_decay": 0.0,
        "grad_clip": 1.0,
        "microbatch": 16,
        "microbatch_tokens": None,
        "epochs": 1,
        "schedule": "constant",
        "warmup_rounds": 0,
        "max_skipped_steps": 3,
    },
    "eval": {
        "every": 16,
        "prompts": 128,
        "final_prompts": None,
        "samples": 2,
        "temperature": 0.8,
        "top_p": 1.0,
    },
    "buffer": {"sample_batches": None, "max_age": None, "fresh_fraction": 0.5},
    "checkpoint": {"every": 10, "keep": 2},
    "callbacks": {
        "kl_band": None,
        "kl_stop": None,
        "verbose": False,
        "leave_out_disturbed": True,
    },
    "resources": {
        "num_generators": 1,
        "reference": "learner",
        "generator_cpus": None,
        "generator_gpus": 0.0,
        "num_learners": 1,
        "learner_strategy": "replicated",
        "elastic": False,
        "learner_cpus": 0.95,
        "learner_gpus": 0.0,
        "worker_cpus": 0.95,
        "worker_gpus": 0.0,
        "vllm_memory_share": None,
        "spread": "pack",
        "reward_workers": 1,
        "reward_cpus": 0.0,
        "deadline_s": 600.0,
    },
}


def test_an_empty_dict_gives_every_default_in_its_place():
    assert GRPOConfig.from_dict({}).to_dict() == DEFAULTS
    assert GRPOConfig() == GRPOConfig.from_dict({})


def test_sections_are_attributes_and_dotted_keys():
    config = GRPOConfig.from_dict(nested(optim__lr=3e-4, rollout__prompts=8))
    assert config.optim.lr == config["optim.lr"] == 3e-4
    assert config.rollout.prompts == config["rollout.prompts"] == 8
    assert config["k"] == 1


def test_config_is_frozen_and_keyword_only():
    config = GRPOConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lag = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim.lr = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        OptimSettings(1e-3)  # type: ignore[misc]


def test_config_survives_pickling():
    config = GRPOConfig.from_dict(nested(optim__betas=[0.8, 0.9]))
    assert pickle.loads(pickle.dumps(config)) == config


def test_direct_construction_and_replace_are_checked_too():
    with pytest.raises(ConfigError, match=r"^optim\.lr=-1: must be a number >= 0$"):
        OptimSettings(lr=-1)
    with pytest.raises(ConfigError, match=r"^lag=2: needs placement=disaggregated"):
        dataclasses.replace(GRPOConfig(), lag=2)
    with pytest.raises(ConfigError, match=r"^loss=.*: must be a mapping with keys from type, "):
        GRPOConfig(loss={"type": "dapo"})  # type: ignore[arg-type]


def test_from_dict_leaves_its_argument_alone():
    data = nested(optim__betas=[0.8, 0.9])
    GRPOConfig.from_dict(data)
    assert data == {"optim": {"betas": [0.8, 0.9]}}


# ---- Round trip ------------------------------------------------------------------------------

valid_values = {
    "arm": st.sampled_from(["custom", "lag 1, k=4", "async"]),
    "rounds": st.integers(1, 10**6),
    "k": st.integers(1, 64),
    "k_mode": st.sampled_from(["same_batch", "fresh_batches"]),
    "seed": st.integers(0, 2**32 - 1),
    "model.path": st.none() | st.just("/policy"),
    "task.match": st.sampled_from(["word", "substring"]),
    "task.reward": st.sampled_from(
        [None, "my.rewards:score", "/a b/reward.py:score", "model:/a b", '["a:b", "model:/c"]']
    ),
    "task.max_error_rate": st.floats(0, 1),
    "rollout.prompts": st.integers(1, 512),
    "rollout.unit_prompts": st.none() | st.just(1),
    "rollout.slots": st.none() | st.just(1),
    "rollout.group_size": st.integers(2, 64),
    "rollout.temperature": st.floats(0.01, 10),
    "rollout.stop": st.none() | st.lists(st.sampled_from(["</answer>", "\n\n", "é"])).map(tuple),
    "model.chat_template": st.sampled_from(["off", "on", "/mine.jinja"]),
    "model.system": st.none() | st.just("Be brief."),
    "model.template_args": st.none() | st.just('{"enable_thinking": false}'),
    "loss.clip": st.floats(0.01, 0.99),
    "loss.kl_monitor_responses": st.just("all") | st.integers(2, 999),
    "loss.clip_high": st.none() | st.floats(0.01, 10),
    "loss.advantage": st.sampled_from(["group_std", "group_mean", "rloo", "batch"]),
    "optim.lr": st.floats(0, 1) | st.integers(0, 1),
    "optim.betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    "checkpoint.keep": st.none() | st.integers(1, 9),
    "callbacks.kl_stop": st.none() | st.floats(0.01, 100),
    "callbacks.verbose": st.booleans(),
    "resources.generator_cpus": st.none() | st.floats(0.01, 64),
}


@pytest.mark.slow
@given(st.fixed_dictionaries({}, optional=valid_values))
def test_config_survives_json(values):
    together = {**{name: check.default for name, check in CHECKS.items()}, **values}
    values = {key: value for key, value in values.items() if not CHECKS[key].unmet(together)}
    data: dict = {}
    for key, value in values.items():
        set_dotted(data, key, value)
    config = GRPOConfig.from_dict(data)
    assert GRPOConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert all(config[key] == value for key, value in values.items())


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from([*DEFAULTS, "optimm", "set"]), anything), anything)
def test_any_input_gives_a_config_or_one_line(data, other):
    data = {**data, "optim": {"lr": other}} if "optim" not in data else data
    got = config_or_line(data)
    if isinstance(got, str):
        assert len(got.splitlines()) == 1
    else:
        json.dumps(got.to_dict(), allow_nan=False)


# ---- Unknown keys ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"optim": {"lrr": 1}}, "optim.lrr: unknown key; did you mean optim.lr?"),
        ({"placment": 1}, "placment: unknown key; did you mean placement?"),
        ({"optimizer": {}}, "optimizer: unknown key; did you mean optim?"),
        ({"lr": 1}, "lr: unknown key; did you mean critic.lr or optim.lr?"),
        (
            {"rollout": {"lr": 1}},
            "rollout.lr: unknown key; did you mean critic.lr or optim.lr?",
        ),
        (
            {"temperature": 1},
            "temperature: unknown key; did you mean rollout.temperature or eval.temperature?",
        ),
        ({"group_sise": 1}, "group_sise: unknown key; did you mean rollout.group_size?"),
        ({"optim.lr": 1}, "optim.lr: must be nested, as optim: {…}"),
        (
            {"checkpoint": {"zzz": 1}},
            "checkpoint.zzz: unknown key; valid: checkpoint.every, checkpoint.keep",
        ),
        ({"optim": {"SECTION": "x"}}, None),
        ({"optim": {3: 1}}, None),
        ({"a\nb": 1}, None),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(data, text):
    got = error(data)
    assert "unknown key" in got or "must be nested" in got
    assert text is None or got == text


@pytest.mark.parametrize("key", ["zzzz", "shuffle", "batch_size", "elsewhere.enable"])
def test_unknown_key_without_a_neighbour_lists_the_keys(key):
    with pytest.raises(ConfigError) as caught:
        parse_assignment(f"{key}=1")
    assert str(caught.value).startswith(f"{key}: unknown key; valid: arm, placement, rounds, k, ")


# ---- Types and ranges ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (nested(lag=-1), "lag=-1: must be an integer >= 0"),
        (nested(k=0), "k=0: must be an integer >= 1"),
        (nested(k=True), "k=true: must be an integer >= 1"),
        (nested(k="1"), 'k="1": must be an integer >= 1'),
        (nested(k=2.5), "k=2.5: must be an integer >= 1"),
        (nested(k=math.nan), "k=NaN: must be an integer >= 1"),
        (nested(k=math.inf), "k=Infinity: must be an integer >= 1"),
        (nested(seed=2.0**32), "seed=4294967296.0: must be an integer >= 0 and <= 4294967295"),
        (nested(k=None), "k=none: must be an integer >= 1"),
        (nested(rounds=[1]), "rounds=[1]: must be an integer >= 1"),
        (nested(seed=2**32), "seed=4294967296: must be an integer >= 0 and <= 4294967295"),
        (nested(arm=""), 'arm="": must be a label of 1 to 64 printable characters without slashes'),
        (nested(placement="local"), "placement=local: must be one of colocated, disaggregated"),
        (
            nested(transport="nixel"),
            "transport=nixel: must be one of auto, in_process, object_store, shm, by_machine, "
            "nixl, gloo, nccl, cuda_ipc, or module:name or file.py:name; did you mean nixl?",
        ),
        (nested(placement=1), "placement=1: must be one of colocated, disaggregated"),
        (nested(optim__lr=math.nan), "optim.lr=NaN: must be a number >= 0"),
        (nested(optim__lr=math.inf), "optim.lr=Infinity: must be a number >= 0"),
        (nested(optim__lr=False), "optim.lr=false: must be a number >= 0"),
        (nested(optim__lr="1e-4"), 'optim.lr="1e-4": must be a number >= 0'),
        *(
            (
                nested(rollout__stop=stop),
                f"rollout.stop={said}: must be none or a string that is not empty, or a JSON list "
                "of such strings",
            )
            for stop, said in (
                ([""], '[""]'),
                ("\ufffd", '"\ufffd"'),
                (7, "7"),
                (["a", 7], '["a", 7]'),
            )
        ),
        (nested(optim__betas=[0.9]), "optim.betas=[0.9]: must be two numbers >= 0 and < 1"),
        (nested(optim__betas=0.9), "optim.betas=0.9: must be two numbers >= 0 and < 1"),
        (nested(optim__betas=[0.9, 1]), "optim.betas=[0.9, 1]: must be two numbers >= 0 and < 1"),
        (nested(rollout__temperature=0), "rollout.temperature=0: must be a number > 0"),
        (nested(rollout__temperature=-1.5), "rollout.temperature=-1.5: must be a number > 0"),
        (nested(eval__temperature=-1), "eval.temperature=-1: must be a number >= 0"),
        (nested(eval__top_p=1.5), "eval.top_p=1.5: must be a number > 0 and <= 1"),
        *(
            (
                nested(model__chat_template=value),
                f"model.chat_template={shown(value)}: must be one of off, on, or the path of a "
                f"jinja file (./NAME if it has no extension); did you mean {meant}?",
            )
            for value, meant in ((True, "on"), ("true", "on"), ("False", "off"))
        ),
        (nested(eval__prompts=0), "eval.prompts=0: must be an integer >= 1"),
        (nested(eval__samples=0), "eval.samples=0: must be an integer >= 1"),
        (nested(loss__clip=1), "loss.clip=1: must be none or a number > 0 and < 1"),
        (nested(loss__clip_high=0), "loss.clip_high=0: must be none or a number > 0"),
        ({"rounds": 10**400}, f"rounds={shown(10**400)}: must be an integer >= 1"),
        (nested(checkpoint__keep=0), "checkpoint.keep=0: must be none or an integer >= 1"),
        (
            nested(buffer__fresh_fraction=0),
            "buffer.fresh_fraction=0: must be a number > 0 and <= 1",
        ),
        (
            nested(task__max_error_rate=1.5),
            "task.max_error_rate=1.5: must be a number >= 0 and <= 1",
        ),
        (nested(task__strict=1), "task.strict=1: must be true or false"),
        (nested(task__strict="true"), 'task.strict="true": must be true or false'),
        (nested(model__path=""), 'model.path="": must be none or a non-empty path'),
        (nested(model__path=3), "model.path=3: must be none or a non-empty path"),
        (
            nested(task__reward="score"),
            "task.reward=score: must be none or module:function, file.py:function, "
            "model:DIRECTORY, judge:FILE, or a JSON list of these forms",
        ),
        (
            nested(resources__learner_gpus=1.5),
            "resources.learner_gpus=1.5: must be a number from 0 to 1, or a whole number above 1",
        ),
        (
            nested(resources__worker_cpus=0),
            "resources.worker_cpus=0: must be a number >= 0.01",
        ),
        (
            nested(callbacks__kl_band=[2, 1]),
            "callbacks.kl_band=[2, 1]: must be none or two numbers, 0 <= low < high",
        ),
        (
            {"eval": 3},
            f"eval=3: must be a mapping with keys from {keys_of('eval')}",
        ),
        (
            {"checkpoint": None},
            "checkpoint=none: must be a mapping with keys from every, keep",
        ),
        (3, "config=3: must be a mapping"),
    ],
)
def test_wrong_value_is_refused_by_name(data, text):
    assert error(data) == text


@pytest.mark.slow
def test_no_key_accepts_nonsense():
    nonsense = (object(), {}, [], b"x", 1j, -1, "\0", {3: {}})
    for key, value in itertools.product(CHECKS, nonsense):
        if (key, value) in (("rollout.stop", []), ("task.options", {})):
            continue  # valid: [] overrides the task's default, and {} is the default
        data: dict = {}
        set_dotted(data, key, value)
        assert error(data).startswith(f"{key}=")


@pytest.mark.parametrize("key", ["task.reward_weights", "task.mix", "task.reward"])
def test_json_that_is_nested_too_deeply_is_refused_in_a_line(key):
    data: dict = {}
    set_dotted(data, key, '{"a":' * 100_000)
    assert error(data).startswith(f"{key}=")


def test_none_is_valid_only_where_it_has_a_meaning():
    for key in (key for key, check in CHECKS.items() if not check.optional):
        data: dict = {}
        set_dotted(data, key, None)
        assert error(data).startswith(f"{key}=none: must be ")


def test_integers_become_floats_where_a_float_is_meant():
    lr = GRPOConfig.from_dict(nested(optim__lr=1)).optim.lr
    assert (lr, type(lr)) == (1.0, float)


def test_floats_without_a_fraction_become_integers_where_an_integer_is_meant():
    config = GRPOConfig.from_dict(nested(k=2.0, checkpoint__keep=3.0, rollout__group_size=8.0))
    assert (config.k, config.checkpoint.keep, config.rollout.group_size) == (2, 3, 8)
    assert all(type(n) is int for n in (config.k, config.checkpoint.keep))


@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_a_capacity_alone_is_valid(capacity):
    """Other defaults depend on the capacity, so a search may vary only the capacity."""
    config = GRPOConfig.from_dict(nested(buffer_capacity=capacity))
    assert config.buffer_sampling == ("recency" if capacity == 1 else "mixed")
    assert config.effective("buffer.sample_batches") == (1 if capacity == 1 else 2)
    assert GRPOConfig.from_dict(config.to_dict()) == config
    assert GRPOConfig.from_dict(nested(buffer_capacity=capacity, buffer_sampling="auto")) == config


def test_numbers_of_other_libraries_are_numbers():
    import numpy as np

    config = GRPOConfig.from_dict(nested(k=np.int64(2), optim__lr=np.float32(0.5)))
    assert (type(config.k), type(config.optim.lr)) == (int, float)
    for two in (np.float32(2), np.float64(2), np.uint8(2)):
        assert GRPOConfig.from_dict(nested(k=two)) == GRPOConfig.from_dict(nested(k=2))
    exact = np.int64(2**53 + 1)  # no float has this value
    assert GRPOConfig.from_dict(nested(rounds=exact)).rounds == 2**53 + 1
    assert "must be an integer" in error(nested(k=np.float64(2.5)))
    assert "must be an integer" in error(nested(k=np.bool_(True)))


def test_booleans_of_numpy_are_booleans():
    import numpy as np

    for value in (True, False):
        config = GRPOConfig.from_dict(nested(task__strict=np.bool_(value), task__reward="a.py:f"))
        assert config.task.strict is value
    for other in (np.int64(1), 1, 0.0, "true", None, [], np.array([True, False])):
        assert "must be true or false" in error(nested(task__strict=other))


@pytest.mark.parametrize(
    ("settings", "key", "mapping"),
    [
        ({}, "task.reward_weights", {"answer": 1, "format": 0.5}),
        ({"task": {"name": "reasoning_gym", "dataset": "sum"}}, "task.options", {"min_terms": 2}),
        (
            {"model": {"path": "org/chat", "chat_template": "on"}},
            "model.template_args",
            {"enable_thinking": False},
        ),
    ],
)
def test_a_json_object_may_be_a_mapping(settings, key, mapping):
    section, name = key.split(".")
    with_object = {**settings, section: {**settings.get(section, {}), name: mapping}}
    with_text = {**settings, section: {**settings.get(section, {}), name: json.dumps(mapping)}}
    config = GRPOConfig.from_dict(expanded(with_object))
    assert config == GRPOConfig.from_dict(with_text)
    assert GRPOConfig.from_dict(config.to_dict()) == config
    nonsense = {**settings, section: {**settings.get(section, {}), name: {1: 2}}}
    assert error(nonsense).startswith(f"{key}=")


def test_a_path_object_is_a_path(tmp_path):
    for path in (Path("words.txt"), "words.txt"):
        given = {"task": {"keywords_file": path}, "model": {"path": Path("model")}}
        config = GRPOConfig.from_dict(expanded(given, str(tmp_path)))
        assert config.task.keywords_file == str(tmp_path / "words.txt")
        assert config.model.path == str(tmp_path / "model")
    given = {"task": {"keywords_file": Path("words.txt")}}
    assert GRPOConfig.from_dict(given).task.keywords_file == "words.txt"


@pytest.mark.parametrize("label", ["../up", "a/b", "a\\b", ".hidden", " a", "a\nb", "a" * 65])
def test_an_arm_can_hide_no_path(label):
    assert error({"arm": label}).startswith("arm=")


@pytest.mark.parametrize("function", ["a.b:c", "my_rewards:score", "/x y/r.py:score", "r.py:f"])
def test_reward_functions_are_named_by_module_or_file(function):
    assert GRPOConfig.from_dict(nested(task__reward=function)).task.reward == function


@pytest.mark.parametrize("function", ["a:", ":f", "a.b", "a..b:c", "a b:c", "r.py:", "r.py:1f"])
def test_other_names_of_reward_functions_are_refused(function):
    assert error(nested(task__reward=function)).startswith("task.reward=")


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("model:a b/c", "model:a b/c"),
        ("model:score", "model:score"),  # the directory `score`, not a function of a module `model`
        (["model:/rm"], "model:/rm"),
        (["model:/rm", "r.py:f"], '["model:/rm", "r.py:f"]'),
        (' ["a:b","model:/é"]', '["a:b", "model:/é"]'),
    ],
)
def test_a_reward_may_be_a_model_or_a_list(given, stored):
    settings = GRPOConfig.from_dict(nested(task__reward=given))
    assert settings.task.reward == stored
    assert GRPOConfig.from_dict(settings.to_dict()) == settings


@pytest.mark.parametrize(
    "given",
    ["model:", "model: ", "model:a\0", "[]", '["a"]', '["a:b"', '["a:b", 1]', [], ["a:b", 1]],
)
def test_an_incomplete_reward_or_list_is_refused(given):
    assert error(nested(task__reward=given)).startswith("task.reward=")


@pytest.mark.parametrize(
    ("given", "absolute"),
    [
        ("model:rm", "model:/base/rm"),
        ("r.py:f", "/base/r.py:f"),
        ("a.b:c", "a.b:c"),
        ('["a:b", "model:../rm", "r.py:f"]', '["a:b", "model:/rm", "/base/r.py:f"]'),
        ("model:", "model:"),  # rejected later, when the setting is checked
    ],
)
def test_paths_of_rewards_become_absolute(given, absolute):
    assert make_absolute(nested(task__reward=given), "/base") == nested(task__reward=absolute)
    mix = {"keyword": {"weight": 1, "reward": given}}
    settled = make_absolute(nested(task__mix=mix), "/base")["task"]["mix"]
    assert json.loads(settled)["keyword"]["reward"] == absolute


def test_numbers_too_large_to_hold_are_refused():
    assert error(nested(optim__lr=10**400)).startswith("optim.lr=1000")
    assert error(nested(optim__lr=10**5000)) == "optim.lr=<int>: must be a number >= 0"


def test_a_long_value_is_cut():
    assert len(error(nested(k=list(range(1000))))) < 140


# ---- Contradictions --------------------------------------------------------------------------

APART = {"placement": "disaggregated"}
MAXRL_DIVIDES = "loss.advantage=maxrl divides by the mean reward, so no reward may be negative"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            nested(lag=1),
            "lag=1: needs placement=disaggregated, got colocated; or set lag_mode=exact",
        ),
        (
            nested(lag=2, lag_mode="exact", buffer_capacity=4),
            "lag_mode=exact: needs buffer_capacity=1, got 4: replay trains on groups that are more "
            "than lag rounds behind",
        ),
        (
            APART | nested(lag=2, lag_mode="exact", weight_update="in_flight"),
            "weight_update=in_flight: has no effect with lag_mode=exact; needs lag_mode=bounded",
        ),
        (
            nested(eval__final_prompts=127),
            "eval.final_prompts=127: must be >= eval.prompts=128",
        ),
        (
            nested(eval__temperature=0),
            "eval.samples=2: must be 1 with eval.temperature=0, which makes all responses to a "
            "prompt equal",
        ),
        (
            nested(weight_update="in_flight"),
            "weight_update=in_flight: has no effect with placement=colocated and lag=0; needs "
            "placement=disaggregated and lag >= 1",
        ),
        (
            APART | nested(weight_update="interrupt_recompute"),
            "weight_update=interrupt_recompute: has no effect with lag=0; needs lag >= 1",
        ),
        (
            nested(resources__num_generators=2),
            "resources.num_generators=2: has no effect with placement=colocated; needs "
            "placement=disaggregated",
        ),
        (
            nested(transport="object_store"),
            "transport=object_store: placement=colocated moves weights inside one actor; "
            "valid: auto, in_process",
        ),
        (
            APART | nested(transport="in_process"),
            "transport=in_process: needs placement=colocated, got disaggregated",
        ),
        (
            nested(transport="my_transport.py:FILES"),
            "transport=my_transport.py:FILES: placement=colocated moves weights inside one actor; "
            "valid: auto, in_process",
        ),
        (
            nested(engine="trt"),
            "engine=trt: must be one of auto, torch, hf, vllm, control, or module:Class or "
            "file.py:Class",
        ),
        (
            nested(engine="vllm"),
            "engine=vllm: does not work with placement=colocated: on CPUs, vLLM fixes the number "
            "of threads of its process, so the learner of a colocated worker would have to train "
            "with that number of threads",
        ),
        (
            APART | nested(engine="vllm", transport="gloo"),
            "transport=gloo: does not work with engine=vllm: vLLM has its own collective group in "
            "its process; use auto",
        ),
        (
            nested(engine="hf", model__path="m", model__sampler_dtype="bfloat16"),
            "model.sampler_dtype=bfloat16: must be float32 with engine=hf; bfloat16 needs "
            "engine=torch or vllm",
        ),
        (
            nested(engine="my:Engine", eval__top_p=0.9),
            "eval.top_p=0.9: must be 1 with engine=my:Engine; lower values need engine=torch, "
            "hf or vllm",
        ),
        (
            APART | nested(engine="vllm", eval__temperature=0.001),
            "eval.temperature=0.001: must be >= 0.01 with engine=vllm, which rounds lower "
            "temperatures up",
        ),
        (
            APART
            | nested(resources__num_learners=2, resources__learner_gpus=1, resources__elastic=True),
            "resources.elastic=true: must be false with resources.learner_gpus=1: learners on "
            "GPUs use NCCL, and continuing after the loss of a learner has not been tested with "
            "NCCL",
        ),
        (
            APART | nested(transport="nccl", resources__learner_gpus=1),
            "transport=nccl: needs resources.generator_gpus > 0 and resources.learner_gpus > 0, "
            "got 0 and 1",
        ),
        (
            APART
            | nested(transport="cuda_ipc", resources__generator_gpus=1, resources__learner_gpus=1),
            "transport=cuda_ipc: all actors must share one GPU, but they request 2 GPUs",
        ),
        (
            APART
            | nested(transport="nccl", resources__generator_gpus=0.5, resources__learner_gpus=1),
            "transport=nccl: every actor needs its own GPU, got resources.generator_gpus=0.5 and "
            "resources.learner_gpus=1",
        ),
        (
            APART | nested(transport="gloo", resources__generator_gpus=1),
            "transport=gloo: moves only weights in main memory; on GPUs, use transport=nccl or "
            "auto",
        ),
        (
            APART | nested(transport="cuda_ipc"),
            "transport=cuda_ipc: needs resources.generator_gpus > 0 and "
            "resources.learner_gpus > 0, got 0 and 0",
        ),
        *(
            (
                nested(rollout__group_size=1, loss__advantage=advantage),
                f"rollout.group_size=1: must be >= 2 with loss.advantage={advantage}, which "
                "compares the responses of a group",
            )
            for advantage in ("group_std", "group_mean", "rloo")
        ),
        (
            nested(rollout__group_size=1, rollout__prompts=1, loss__advantage="batch"),
            "rollout.prompts=1: must be >= 2 with loss.advantage=batch and rollout.group_size=1",
        ),
        (
            nested(loss__type="no_baseline"),
            "loss.type=no_baseline: needs loss.advantage=none, got group_std",
        ),
        (
            nested(loss__advantage="none"),
            "loss.advantage=none: needs loss.type=no_baseline or a loss of your own, got grpo_clip",
        ),
        (
            nested(loss__type="ppo"),
            "loss.type=ppo: needs loss.advantage=gae, vine or group_to_go, got group_std; with "
            "group_std, use loss.type=grpo_clip, which computes the same loss",
        ),
        *(
            (
                nested(loss__type=loss, loss__advantage="gae"),
                f"loss.type={loss}: treats a response as a whole, but loss.advantage=gae treats "
                "each token separately; valid: dapo, cispo, sapo, and other losses with one ratio "
                "per token",
            )
            for loss in ("gspo", "gmpo", "topr")
        ),
        *(
            (
                nested(loss__type=loss, loss__advantage=advantage, loss__teacher="/a/policy"),
                f"loss.type={loss}: treats a response as a whole, but loss.teacher treats each "
                "token separately; valid: dapo, cispo, sapo, and other losses with one ratio per "
                "token",
            )
            for loss in ("gspo", "gmpo", "topr")
            for advantage in ("zero", "group_std")
        ),
        (
            nested(loss__teacher="/a/policy", rollout__zero_advantage="resample"),
            "rollout.zero_advantage=resample: must be keep with loss.teacher, which teaches "
            "the policy even in groups of equal rewards",
        ),
        *(
            (nested(loss__advantage="maxrl", **given), f"{line}: {MAXRL_DIVIDES}")
            for given, line in (
                (
                    {"loss__kl_coef": 0.1, "loss__kl_in": "reward"},
                    "loss.kl_in=reward: must be loss",
                ),
                (
                    {"rollout__overlong": "penalty"},
                    "rollout.overlong=penalty: must be score or filter",
                ),
                (
                    {"task__length_penalty": 0.1, "task__length_target": 9},
                    "task.length_penalty=0.1: must be 0",
                ),
                (
                    {"task__reward_weights": '{"answer": 1}'},
                    r'task.reward_weights="{\"answer\": 1}": must be none',
                ),
            )
        ),
        (
            nested(task__length_penalty=0.1, task__length_target=61),
            "task.length_target=61: must be <= rollout.max_new_tokens=60, the maximum length of a "
            "response",
        ),
        (
            nested(
                task__name="mix",
                task__mix={"math": 1, "keyword": 1},
                loss__advantage="gae",
            ),
            "loss.whiten=true: must be false with task.mix, because whitening would compare "
            "rewards of different tasks",
        ),
        (
            APART | nested(lag=1, weight_update="in_flight", loss__advantage="vine"),
            "weight_update=in_flight: must be between_batches with loss.advantage=vine, which "
            "estimates the values of a single policy",
        ),
        (
            nested(loss__advantage="vine", loss__kl_coef=0.1, loss__kl_in="reward"),
            "loss.kl_in=reward: must be loss: loss.advantage=vine estimates the value of a "
            "state from the task's reward alone",
        ),
        (
            nested(loss__advantage="vine", rollout__overlong="penalty"),
            "rollout.overlong=penalty: must be score or filter: loss.advantage=vine estimates "
            "the value of a state from the task's reward alone",
        ),
        (
            nested(loss__advantage="vine", task__length_penalty=0.1, task__length_target=9),
            "task.length_penalty=0.1: must be 0: loss.advantage=vine estimates the value of a "
            "state from the task's reward alone",
        ),
        (
            nested(rollout__min_new_tokens=61),
            "rollout.min_new_tokens=61: must be <= rollout.max_new_tokens=60",
        ),
        (
            nested(rollout__unit_prompts=17),
            "rollout.unit_prompts=17: must be <= rollout.prompts=16",
        ),
        (
            APART
            | nested(lag=1, resources__num_generators=2, pools__enabled=True)
            | {"rollout": {"stragglers": "requeue"}},
            "rollout.stragglers=requeue: must be wait or drop with pools.enabled=true, where pass "
            "rates decide which prompt is sampled again",
        ),
        (
            APART
            | nested(lag=1, resources__num_generators=2)
            | {"rollout": {"stragglers": "drop", "unit_prompts": 16}},
            "rollout.stragglers=drop: must be wait if a round has fewer chunks of prompts (1) than "
            "there are generators (2); lower rollout.unit_prompts",
        ),
        (
            nested(rollout__slots=64),
            "rollout.slots=64: must be < 64, the number of responses in the largest call to a "
            "generator: otherwise no response would wait; set rollout.slots to none to decode all "
            "responses together",
        ),
        (
            nested(rollout__slots=8, engine="hf"),
            "rollout.slots=8: must be none with engine=hf; other values need engine=torch",
        ),
        (
            nested(rollout__slots=8, env__name="guess"),
            "rollout.slots=8: has no effect with env.name=guess; needs env.name=off",
        ),
        (
            APART | nested(rollout__unit_prompts=8, resources__num_generators=3),
            "resources.num_generators=3: at most 2 generators can have work at any time, one "
            "chunk of prompts each; set resources.num_generators to 2, or set rollout.unit_prompts "
            "to none, which divides the prompts of each round evenly",
        ),
        (
            APART | nested(lag=1, rollout__prompts=2, resources__num_generators=5),
            "resources.num_generators=5: at most 4 generators can have work at any time, one "
            "chunk of prompts each; set resources.num_generators to 4, or raise rollout.prompts",
        ),
        (
            nested(optim__epochs=2, k=2),
            "optim.epochs=2: has no effect with k_mode=same_batch; needs k_mode=minibatches",
        ),
        (
            nested(optim__epochs=2, k=3, k_mode="minibatches"),
            "k=3: must be a multiple of optim.epochs=2 with k_mode=minibatches",
        ),
        (
            nested(optim__epochs=2, k=10, k_mode="minibatches", rollout__prompts=4),
            "k=10: must be <= optim.epochs × rollout.prompts (8 here), because each minibatch "
            "needs a group",
        ),
        (
            nested(optim__microbatch_tokens=59),
            "optim.microbatch_tokens=59: must be >= rollout.max_new_tokens=60: a single response "
            "may be that long",
        ),
        (
            nested(buffer__sample_batches=2),
            "buffer.sample_batches=2: has no effect with buffer_capacity=1; needs buffer_capacity "
            ">= 2",
        ),
        (
            nested(buffer__sample_batches=3, buffer_capacity=2),
            "buffer.sample_batches=3: must be <= buffer_capacity=2",
        ),
        (
            nested(buffer_capacity=3, buffer_sampling="recency"),
            "buffer_capacity=3: must be <= buffer.sample_batches=2 with buffer_sampling=recency, "
            "which never draws older groups; or set buffer_sampling to fifo, uniform or mixed",
        ),
        (
            nested(buffer_capacity=4, buffer_sampling="fifo", buffer__sample_batches=1),
            "buffer.sample_batches=1: must be >= 2 with buffer_sampling=fifo, which never reuses "
            "a group while unused groups remain",
        ),
        (
            nested(buffer_capacity=4, buffer__sample_batches=1, buffer__fresh_fraction=0.99),
            "buffer.fresh_fraction=0.99: never reuses a group with buffer.sample_batches=1; "
            "lower buffer.fresh_fraction",
        ),
        (
            nested(buffer_capacity=4, buffer_sampling="uniform", buffer__max_age=0),
            "buffer.max_age=0: must be > lag=0: otherwise a group that is first used at that lag "
            "is never reused",
        ),
        (
            APART | nested(lag=2, buffer_capacity=4, buffer_sampling="uniform", buffer__max_age=2),
            "buffer.max_age=2: must be > lag=2: otherwise a group that is first used at that lag "
            "is never reused",
        ),
        (
            nested(callbacks__kl_stop=3, loss__kl_monitor=False),
            "callbacks.kl_stop=3.0: has no effect with loss.kl_monitor=false; needs "
            "loss.kl_monitor=true, which measures the KL",
        ),
        (
            nested(callbacks__kl_band=[0, 9], loss__kl_monitor=False, loss__kl_coef=0.1),
            "callbacks.kl_band=[0.0, 9.0]: has no effect with loss.kl_monitor=false; needs "
            "loss.kl_monitor=true, which measures the KL",
        ),
        (
            nested(resources__reward_workers=8),
            "resources.reward_workers=8: has no effect with task.reward=none and task.name=keyword "
            "and task.equality=auto and task.mix=none; needs task.reward, a task of your own, "
            "task.name=reasoning_gym or code, or task.equality=math_verify",
        ),
        (
            nested(resources__reward_cpus=1),
            "resources.reward_cpus=1.0: has no effect with env.name=off and task.reward=none and "
            "task.name=keyword and task.equality=auto and task.mix=none; needs an env.name "
            "other than off, task.reward, a task of your own, task.name=reasoning_gym or code, or "
            "task.equality=math_verify",
        ),
        (
            nested(env__name="my:Env", engine="my:Engine"),
            "engine=my:Engine: cannot add the answers of an environment to a response; "
            "env.name=my:Env needs engine=torch, hf or vllm",
        ),
        (
            nested(env__name="guess", loss__advantage="vine"),
            "loss.advantage=vine: must not be vine with env.name=guess: completions would have to "
            "start in the middle of an episode",
        ),
        (
            nested(task__name="guess", env__name="off"),
            "env.name=off: must be guess with task.name=guess, whose prompts need that environment",
        ),
        (
            nested(env__name="guess", env__step_deadline_s=301),
            "resources.deadline_s=600.0: must be >= 602, twice env.step_deadline_s=301",
        ),
        (
            nested(task__reward="my:reward", task__reward_deadline_s=301),
            "resources.deadline_s=600.0: must be >= 602, twice task.reward_deadline_s=301",
        ),
        (
            APART | nested(lag=2, buffer__max_age=2),
            "buffer.max_age=2: has no effect with buffer_capacity=1; needs buffer_capacity >= 2",
        ),
        (
            APART | nested(lag=2, buffer_capacity=4, buffer_sampling="uniform", buffer__max_age=1),
            "buffer.max_age=1: must be >= lag=2",
        ),
        (
            nested(task__keywords_file="w", task__train_file="t"),
            "task.keywords_file=w: has no effect with task.train_file=t; needs "
            "task.train_file=none",
        ),
    ],
)
def test_contradiction_is_refused_by_name(data, text):
    assert error(data) == text


def test_k1_is_no_estimator_of_the_loss_and_what_the_error_advises_is_valid():
    loss = {"kl_coef": 0.1, "kl_in": "reward"}
    assert error({"loss": {"kl_coef": 0.1, "kl_estimator": "k1"}}) == (
        "loss.kl_estimator=k1: must be one of k3, k2; k1 has an expected gradient of 0 inside the "
        "loss, so it would not keep the policy near the reference; to subtract k1 from the reward, "
        "set loss.kl_in=reward and leave out loss.kl_estimator"
    )
    assert GRPOConfig.from_dict({"loss": loss}).kl_in_reward


@pytest.mark.parametrize(
    "data",
    [
        APART | nested(lag=3),
        APART | nested(lag=1, weight_update="in_flight"),
        APART | nested(lag=2, buffer_capacity=2, buffer__max_age=3),
        APART | nested(transport="object_store", resources__num_generators=2),
        APART | nested(transport="shm", transport_dtype="bfloat16"),
        APART | nested(transport="nixl"),
        APART | nested(transport="gloo", resources__num_generators=2),
        APART | nested(transport="nccl", resources__generator_gpus=1, resources__learner_gpus=1),
        APART
        | nested(transport="cuda_ipc", resources__generator_gpus=0.5, resources__learner_gpus=0.5),
        nested(transport="in_process"),
        APART | nested(transport="my_transport.py:FILES"),
        nested(engine="my_engine.py:GreedyEvaluation"),
        APART | nested(engine="vllm", transport="shm", eval__temperature=0, eval__samples=1),
        APART | nested(engine="vllm", model__sampler_dtype="bfloat16"),
        nested(engine="vllm", resources__worker_gpus=1),
        *(
            APART
            | nested(
                engine="vllm",
                transport=transport,
                resources__generator_gpus=gpus,
                resources__learner_gpus=gpus,
            )
            for transport, gpus in (("auto", 1), ("auto", 2), ("nccl", 1), ("cuda_ipc", 0.5))
        ),
        nested(loss__type="no_baseline", loss__advantage="none", rollout__group_size=1),
        *(
            nested(loss__type=loss, loss__advantage=advantage, rollout__group_size=1)
            for loss in ("ppo", "grpo_clip", "sapo", "reinforce_with_baseline", "m2po")
            for advantage in ("gae", "vine")
        ),
        nested(loss__advantage="gae", loss__kl_coef=0.1, loss__kl_in="reward"),
        nested(loss__advantage="gae", rollout__overlong="penalty"),
        nested(loss__advantage="vine", rollout__overlong="filter", loss__kl_coef=0.1),
        APART | nested(lag=1, weight_update="in_flight", loss__advantage="gae"),
        APART | nested(lag=1, loss__advantage="vine"),
        nested(loss__advantage="batch", rollout__group_size=1),
        nested(k=8, optim__epochs=2, k_mode="minibatches", rollout__prompts=4),
        nested(k=8, k_mode="fresh_batches"),
        nested(rollout__min_new_tokens=60),
        nested(eval__temperature=0, eval__samples=1),
        nested(rollout__unit_prompts=16),
        nested(optim__microbatch_tokens=60),
        APART | nested(rollout__unit_prompts=8, resources__num_generators=2),
        APART
        | nested(lag=1, resources__num_generators=2, pools__enabled=True)
        | {"rollout": {"stragglers": "drop", "unit_prompts": 8}},
        APART | nested(lag=2, rollout__unit_prompts=16, resources__num_generators=3),
        APART
        | nested(k=4, k_mode="fresh_batches", rollout__unit_prompts=16)
        | nested(resources__num_generators=4),
        APART | nested(resources__num_generators=16),
        nested(callbacks__kl_stop=3, callbacks__kl_band=[0, 9]),
        nested(resources__worker_gpus=0.5),
        nested(task__train_file="t", task__eval_file="e"),
        nested(task__reward="my:reward", task__reward_deadline_s=300),
        nested(buffer_capacity=2, buffer__sample_batches=2),
        nested(buffer_capacity=2, buffer_sampling="recency"),
        nested(buffer_capacity=3, buffer_sampling="recency", buffer__sample_batches=3),
        nested(buffer_capacity=4, buffer_sampling="fifo"),
        nested(buffer_capacity=4, buffer__fresh_fraction=0.99),
        nested(buffer_capacity=4, buffer_sampling="mixed", buffer__fresh_fraction=0.5),
        nested(buffer_capacity=4, buffer_sampling="uniform", buffer__max_age=1),
        nested(task__reward="my:reward", resources__reward_workers=8, resources__reward_cpus=1),
    ],
)
def test_neighbour_of_a_contradiction_is_accepted(data):
    GRPOConfig.from_dict(data)


# ---- Guarantees of an engine -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "given", "settled", "read"),
    [
        ("auto", None, None, None),
        ("torch", None, None, None),
        ("hf", None, None, None),
        ("torch", 3.0, 3.0, 3.0),
        ("vllm", None, 2.0, 2.0),
        ("vllm", 3.0, 3.0, 3.0),
        ("vllm", 0.0, 0.0, None),
        ("my_engine.py:Mine", None, 2.0, 2.0),
    ],
)
def test_an_engine_without_a_promise_is_corrected_unless_that_is_turned_off(
    engine, given, settled, read
):
    config = GRPOConfig.from_dict(APART | nested(engine=engine, loss__importance_cap=given))
    assert config.loss.importance_cap == settled
    assert config.importance_cap == read
    assert GRPOConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("loss", TO_THE_SAMPLER)
def test_a_loss_whose_ratio_is_to_the_sampler_keeps_it_with_every_engine(loss):
    apart = APART | nested(engine="vllm", loss__type=loss)
    assert GRPOConfig.from_dict(apart).importance_cap is None
    narrow = APART | nested(loss__type=loss, model__sampler_dtype="bfloat16")
    assert GRPOConfig.from_dict(narrow).importance_cap is None
    given = APART | nested(engine="vllm", loss__type=loss, loss__importance_cap=3)
    assert GRPOConfig.from_dict(given).importance_cap == 3


@pytest.mark.parametrize(
    "data",
    [
        nested(task__name="prose"),
        nested(loss__type="vpg"),
        nested(loss__advantage="td"),
        nested(critic__body="tower"),
    ],
)
def test_a_choice_that_is_not_built_is_no_choice(data):
    assert ": must be one of " in error(data)


@pytest.mark.parametrize("data", [nested(loss__type="rloo"), nested(loss__advantage="gdpo")])
def test_the_name_of_an_algorithm_is_answered_by_where_they_are(data):
    assert error(data).endswith(
        "; whole algorithms are presets, such as --preset rloo (docs/algorithms.md#presets)"
    )


def test_fresh_share_of_a_draw_is_the_number_that_was_meant():
    assert fresh_wanted(0.28, 25) == 7
    assert fresh_wanted(0.5, 5) == 3
    assert fresh_wanted(1.0, 32) == 32


# ---- Derived values --------------------------------------------------------------------------


def test_prompts_of_a_round_grow_with_k_only_for_fresh_batches():
    for k_mode, prompts in (("same_batch", 16), ("minibatches", 16), ("fresh_batches", 64)):
        assert (
            schedule.prompts_per_round(GRPOConfig.from_dict({"k": 4, "k_mode": k_mode})) == prompts
        )


def test_sampling_and_training_take_turns_at_lag_0_and_at_an_exact_lag():
    synchronous, bounded, exact = (
        GRPOConfig.from_dict({"rounds": 6, **data})
        for data in ({}, APART | {"lag": 4}, {"lag": 4, "lag_mode": "exact"})
    )
    assert [c.in_turns for c in (synchronous, bounded, exact)] == [True, False, True]
    # With a bounded lag of 4, generators can work on chunks of five rounds at the same time. With
    # an exact lag, they work only on chunks of the round that is being filled.
    assert [schedule.chunks_at_once(c) for c in (bounded, exact)] == [5, 1]
    assert [schedule.last_collected(exact, round_) for round_ in range(6)] == [4, 5, 5, 5, 5, 5]
    assert [schedule.last_collected(bounded, round_) for round_ in range(6)] == [*range(6)]


def test_max_age_defaults_to_the_lag_without_a_buffer():
    assert schedule.max_age(GRPOConfig()) == 0
    assert schedule.max_age(GRPOConfig.from_dict(APART | {"lag": 3})) == 3
    assert (
        schedule.max_age(
            GRPOConfig.from_dict(
                APART
                | nested(lag=1, buffer_capacity=2, buffer__sample_batches=2, buffer__max_age=5)
            )
        )
        == 5
    )


@pytest.mark.parametrize(
    ("loss", "clip_high"),
    [
        ({}, 0.2),
        ({"clip": 0.1}, 0.1),
        ({"type": "dapo"}, 0.28),
        ({"type": "dapo", "clip_high": 0.3}, 0.3),
        ({"clip_high": 0.5}, 0.5),
        ({"type": "cispo"}, 0.2),
        ({"type": "cispo", "clip_high": 4.0}, 4.0),
        ({"type": "gspo"}, 4e-4),
        ({"type": "gspo", "clip_high": 1e-3}, 1e-3),
        ({"type": "gspo", "clip": 0.01}, 0.01),
    ],
)
def test_clip_high_is_the_clip_unless_given_or_dapo(loss, clip_high):
    config = GRPOConfig.from_dict({"loss": loss})
    assert config.clip_high == clip_high
    assert config.clip_low == loss.get("clip", 3e-4 if config.loss.type == "gspo" else 0.2)
    assert LossSettings(**loss).clip_high == loss.get("clip_high")


def test_a_users_loss_reads_the_clip_range_and_goes_with_any_advantage():
    for advantage in {*CHECKS["loss.advantage"].choices, "mine.py:f"} - {"zero", "group_to_go"}:
        config = GRPOConfig.from_dict(nested(loss__type="mine.py:f", loss__advantage=advantage))
        assert (config.clip_low, config.clip_high) == (0.2, 0.2)
    clipped = nested(loss__type="mine.py:f", loss__clip=0.1, loss__clip_high=0.3)
    assert GRPOConfig.from_dict(clipped).clip_high == 0.3


def test_files_of_a_trial_show_the_clip_range_that_it_had():
    assert GRPOConfig().to_dict()["loss"]["clip"] == 0.2
    gspo = GRPOConfig.from_dict(nested(loss__type="gspo"))
    assert (gspo.to_dict()["loss"]["clip"], gspo.to_dict()["loss"]["clip_high"]) == (3e-4, 4e-4)
    assert GRPOConfig.from_dict(gspo.to_dict()) == gspo


def test_one_generator_samples_a_batch_as_one_chunk_unless_given():
    assert schedule.chunks(GRPOConfig()) == [slice(0, 16)]
    assert schedule.chunks(GRPOConfig.from_dict(nested(k=4, k_mode="fresh_batches"))) == [
        slice(0, 16)
    ]
    given_chunks = schedule.chunks(GRPOConfig.from_dict(nested(rollout__unit_prompts=6)))
    assert given_chunks == [slice(0, 6), slice(6, 12), slice(12, 16)]


@pytest.mark.parametrize(
    ("prompts", "batches", "generators", "sizes"),
    [
        (16, 1, 2, [8, 8]),
        (16, 1, 3, [5, 5, 6]),
        (16, 1, 7, [2, 2, 2, 3, 2, 2, 3]),  # chunks of ceil(16 / 7) would leave one generator idle
        (16, 4, 2, [16]),  # each generator gets two batches
        (16, 3, 2, [8, 8]),  # each generator gets three chunks
        (16, 2, 4, [8, 8]),
        (1, 4, 4, [1]),
    ],
)
def test_generators_share_a_round_evenly_by_default(prompts, batches, generators, sizes):
    config = GRPOConfig.from_dict(
        APART
        | nested(rollout__prompts=prompts, resources__num_generators=generators)
        | nested(k=batches, k_mode="fresh_batches")
    )
    assert [chunk.stop - chunk.start for chunk in schedule.chunks(config)] == sizes


@pytest.mark.slow
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 12), st.none() | st.integers(1, 40))
def test_units_cover_a_batch_and_every_generator_has_one(prompts, batches, generators, given_unit):
    data = APART | nested(
        k=batches,
        k_mode="fresh_batches",
        rollout__prompts=prompts,
        rollout__unit_prompts=given_unit,
        resources__num_generators=generators,
    )
    config = config_or_line(data)
    if isinstance(config, str):
        assert generators > batches * prompts or given_unit is not None
        return
    covered = [i for unit in schedule.chunks(config) for i in range(prompts)[unit]]
    assert covered == list(range(prompts))
    assert batches * len(schedule.chunks(config)) >= generators
    assert schedule.unit_prompts(config) == (
        min(given_unit, prompts)
        if given_unit
        else math.ceil(prompts / len(schedule.chunks(config)))
    )


@pytest.mark.slow
@given(st.integers(1, 90))
def test_default_generators_always_fit_beside_the_learner_on_two_cores(generators):
    config = GRPOConfig.from_dict(
        APART | nested(resources__num_generators=generators, rollout__prompts=90)
    )
    # Ray rounds resources to ten-thousandths.
    units = [
        round(cpus * 1e4) for cpus in (0.1, 0.95, *[resources.generator_cpus(config)] * generators)
    ]
    assert sum(units) <= 2 * 10_000
    assert resources.generator_cpus(config) > 0


def test_given_generator_cpus_are_taken_as_they_are():
    config = GRPOConfig.from_dict(nested(resources__generator_cpus=3))
    assert resources.generator_cpus(config) == 3.0


@pytest.mark.parametrize(
    ("sampling", "training", "reserved"),
    [(None, 0.95, 0.95), (None, 1.9, 1.9), (1.9, 0.95, 1.9), (0.95, 1.9, 1.9), (None, 0.5, 0.5)],
)
def test_a_colocated_worker_reserves_what_the_busier_of_its_roles_uses(
    sampling, training, reserved
):
    cpus = {"generator_cpus": sampling, "worker_cpus": training}
    config = GRPOConfig.from_dict({"resources": cpus})

    assert resources.bundles(config) == [{"CPU": 0.1}, {"CPU": reserved}]
    assert resources.devices(config) == reserved


def test_by_default_a_colocated_worker_is_one_core_with_one_thread():
    config = GRPOConfig()

    assert resources.devices(config) == 0.95
    assert threads(config.resources.worker_cpus) == threads(resources.generator_cpus(config)) == 1


@pytest.mark.parametrize(
    ("cpus", "count"), [(0.1, 1), (0.475, 1), (0.95, 1), (1.0, 1), (1.9, 2), (2, 2), (7.5, 7)]
)
def test_threads_are_the_whole_cores_reserved(cpus, count):
    assert threads(cpus) == count


# ---- --set -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("optim.lr=1e-3", "optim.lr", 1e-3),
        ("optim.lr=1e-4", "optim.lr", 1e-4),
        ("optim.lr=.5", "optim.lr", 0.5),
        ("optim.lr=1", "optim.lr", 1),
        (" optim.lr = 2 ", "optim.lr", 2),
        ("k=4", "k", 4),
        ("k=four", "k", "four"),
        ("k=", "k", ""),
        ("k=none", "k", None),
        ("checkpoint.keep=none", "checkpoint.keep", None),
        ("checkpoint.keep=null", "checkpoint.keep", None),
        ("model.path=None", "model.path", None),
        ("model.path=a=b.d", "model.path", "a=b.d"),
        ("model.path=12", "model.path", "12"),
        ("optim.betas=[0.8, 0.9]", "optim.betas", [0.8, 0.9]),
        ("task.strict=true", "task.strict", True),
        ("task.strict=False", "task.strict", False),
        ("arm=7", "arm", "7"),
        ("arm=none", "arm", "none"),
        ('arm="quoted"', "arm", "quoted"),
        ("loss.advantage=none", "loss.advantage", "none"),
        ("task.reward=my/r.py:f", "task.reward", "my/r.py:f"),
    ],
)
def test_assignment_is_read_by_the_kind_of_its_key(text, key, value):
    got = parse_assignment(text)
    assert got == (key, value)
    assert type(got[1]) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim.lrr=1", "optim.lrr: unknown key; did you mean optim.lr?"),
        ("optimm.lrr=1", "optimm.lrr: unknown key; did you mean optim.lr?"),
        ("optim.lr", "optim.lr: must be KEY=VALUE, for example optim.lr=1e-4"),
        ("=1", '"=1": must be KEY=VALUE, for example optim.lr=1e-4'),
        (
            "checkpoint={}",
            'checkpoint="{}": is a section; set one of checkpoint.every, checkpoint.keep',
        ),
    ],
)
def test_assignment_without_a_key_of_ours_is_refused(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_assignment(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["arm=sync", "k=4", "arm=async_k1"],
            "arm=async_k1: --set arm=sync is given too; --set arm=sync,async_k1 runs both arms",
        ),
        (["k=1", "k = 4"], "k=4: --set k=1 is given too; remove one of the two"),
    ],
)
def test_a_key_is_given_only_once_on_a_command_line(texts, message):
    with pytest.raises(ConfigError) as caught:
        parse_assignments(texts)
    assert str(caught.value) == message
    assert parse_assignments(["arm=sync,async_k1", "k=4"]) == {"arm": "sync,async_k1", "k": 4}


def test_every_default_can_be_set_from_the_command_line():
    for key, check in CHECKS.items():
        value = converted(key, check.default, check)
        value = list(value) if isinstance(value, tuple) else value
        text = value if isinstance(value, str) else shown(value)
        assert parse_assignment(f"{key}={text}") == (key, value)


@pytest.mark.slow
@given(st.sampled_from([*CHECKS]), st.text(max_size=12))
def test_any_assignment_gives_a_config_or_one_line(key, text):
    data: dict = {}
    set_dotted(data, *parse_assignment(f"{key}={text}"))
    got = config_or_line(data)
    assert isinstance(got, GRPOConfig) or len(got.splitlines()) == 1


def test_not_a_number_is_refused_however_it_is_spelled():
    for text in ("nan", "NaN", "inf", "-Infinity", "1e999"):
        data: dict = {}
        set_dotted(data, *parse_assignment(f"optim.lr={text}"))
        assert error(data).startswith("optim.lr=")


# ---- Built-in names and user code -------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithLoss(Settings):
    SECTION = "loss"
    type: str = choice_or_reference(("clip", "plain"), "The loss.", what="function")


@pytest.mark.parametrize("value", ["clip", "plain", "my.losses:mine", "/a/mine.py:loss"])
def test_a_built_in_name_or_a_reference_is_taken(value):
    assert WithLoss(type=value).type == value


def test_another_word_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError) as caught:
        WithLoss(type="clipp")
    assert str(caught.value) == (
        "loss.type=clipp: must be one of clip, plain, or module:function or file.py:function; "
        "did you mean clip?"
    )


# ---- The math, reasoning_gym and code tasks ----------------------------------------------------


def test_a_task_has_its_own_settings_and_no_other_tasks():
    common = {field.name for field in dataclasses.fields(CommonTaskSettings)}
    assert {"name", "reward", "strict"} < common
    math_keys = {"train_file", "eval_file", "template", "answer_in", "equality"}
    gym_keys = {"dataset", "size", "options", "template", "answer_in"}
    math_task = GRPOConfig.from_dict(nested(task__name="math"))
    assert math_task.to_dict()["task"].keys() == common | math_keys
    gym = GRPOConfig.from_dict(nested(task__name="reasoning_gym", task__dataset="chain_sum"))
    assert gym.to_dict()["task"].keys() == common | gym_keys
    code = GRPOConfig.from_dict(nested(task__name="code", task__train_file="/p"))
    code_keys = {"train_file", "eval_file", "code_in", "partial_credit"}
    assert code.to_dict()["task"].keys() == common | code_keys
    for config in (math_task, gym, code):
        assert GRPOConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("given", "equality"),
    [
        ({}, "exact"),
        ({"train_file": "/t"}, "math_verify"),
        ({"eval_file": "/e"}, "math_verify"),
        ({"eval_file": "/e", "equality": "exact"}, "exact"),
        ({"equality": "math_verify"}, "math_verify"),
        ({"reward": "my:reward"}, "auto"),
    ],
)
def test_how_answers_are_compared_is_settled_and_shown(given, equality):
    config = GRPOConfig.from_dict({"task": {"name": "math", **given}})
    assert config.task.equality == config.to_dict()["task"]["equality"] == equality
    assert config.task.is_scored_apart == (equality != "exact")


def test_what_is_verified_apart_has_a_deadline_within_that_of_its_generator():
    own = {"name": "math", "equality": "math_verify", "reward_deadline_s": 301}
    assert error({"task": own}) == (
        "resources.deadline_s=600.0: must be >= 602, twice task.reward_deadline_s=301"
    )
    assert error(nested(task__name="math", task__reward_deadline_s=301)) == (
        "task.reward_deadline_s=301.0: has no effect with task.reward=none and task.name=math and "
        "task.equality=exact and task.mix=none; needs task.reward, a task of your own, "
        "task.name=reasoning_gym or code, or task.equality=math_verify"
    )


@pytest.mark.parametrize(
    ("template", "stored"),
    [("r1_zero", "r1_zero"), ("my.txt", "/base/my.txt"), ("./mine", "/base/mine")],
)
def test_a_template_is_a_word_or_a_path(template, stored):
    data = make_absolute(nested(task__name="math", task__template=template), "/base")
    assert GRPOConfig.from_dict(data).task.template == stored


def test_a_slip_in_the_name_of_a_template_is_no_path():
    data = make_absolute(nested(task__name="math", task__template="r1_zer"), "/base")
    assert error(data) == (
        "task.template=r1_zer: must be one of short, r1_zero, boxed, question_only, or the path of "
        "a file (./NAME if it has no extension); did you mean r1_zero?"
    )


# ---- A user's task ----------------------------------------------------------------------------

SUMS = {"task": {"name": "/my/sums.py:Sums", "largest": 9, "signs": ["+", "-"], "strict": True}}


def test_settings_of_a_custom_task_are_kept_as_they_are_given():
    config = GRPOConfig.from_dict(SUMS)
    assert config.task.own == (("largest", 9), ("signs", ("+", "-")))
    assert config.task.strict
    assert config.to_dict()["task"] == {
        **{field.name: field.default for field in dataclasses.fields(CommonTaskSettings)},
        "name": "/my/sums.py:Sums",
        "strict": True,
        "largest": 9,
        "signs": ["+", "-"],
    }
    assert GRPOConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config.task) == hash(GRPOConfig.from_dict(SUMS).task)


def test_a_custom_task_may_have_a_setting_that_the_keyword_task_has():
    config = GRPOConfig.from_dict(nested(task__name="my:Task", task__train_file="mine.txt"))
    assert config.task.own == (("train_file", "mine.txt"),)
    assert config.task.train_file is None


def test_the_keyword_task_has_no_settings_but_its_own():
    assert error(nested(task__largest=9)).startswith("task.largest: unknown key; ")


@pytest.mark.parametrize("value", [object(), {"a": 1}, math.nan, 1j, [object()], b"x"])
def test_a_setting_of_a_custom_task_is_plain_data(value):
    line = error({"task": {"name": "my:Task", "setting": value}})
    assert line.startswith("task.setting=")
    assert line.endswith(": must be a string, a number, true, false, none or a list")


def test_numbers_of_other_libraries_are_numbers_for_a_custom_task_too():
    import numpy as np

    own = {"name": "my:Task", "a": np.int64(2), "b": np.float32(0.5)}
    config = GRPOConfig.from_dict({"task": own})
    assert [type(value) for _, value in config.task.own] == [int, float]
    json.dumps(config.to_dict())


# ---- Plain dicts -----------------------------------------------------------------------------


def test_set_dotted_makes_sections_and_replaces_values():
    data: dict = {"optim": {"lr": {"grid_search": [1, 2]}, "epochs": 1}}
    set_dotted(data, "optim.lr", 3)
    set_dotted(data, "eval.every", 4)
    set_dotted(data, "k", 2)
    assert data == {"optim": {"lr": 3, "epochs": 1}, "eval": {"every": 4}, "k": 2}


@pytest.mark.parametrize("section", [{"grid_search": [{"lr": 1}]}, 3])
def test_a_key_inside_a_section_that_is_searched_whole_is_refused(section):
    with pytest.raises(ConfigError, match=r"^optim\.lr=3: optim is searched as a whole, so"):
        set_dotted({"optim": section}, "optim.lr", 3)


def test_texts_below_set_give_settings_their_keys():
    texts = {"actors": "placement=disaggregated, lag=1", "steps": "optim.betas=[0.5,0.9],k=2"}
    data = {"set": texts, "optim": {"lr": 0.5}}

    assert expand_set(data) == {
        "placement": "disaggregated",
        "lag": 1,
        "optim": {"lr": 0.5, "betas": [0.5, 0.9]},
        "k": 2,
    }
    assert data == {"set": texts, "optim": {"lr": 0.5}}  # unchanged
    assert GRPOConfig.from_dict(data) == GRPOConfig.from_dict(expand_set(data))


def test_texts_below_set_may_name_settings_of_a_users_task():
    texts = {"a": "task.level=3,task.words=few.txt,task.equality=4", "b": "task.name=my.py:Own"}
    own = {"name": "my.py:Own", "level": 3, "words": "few.txt", "equality": 4}
    assert expand_set({"set": texts}) == {"task": own}
    assert GRPOConfig.from_dict({"set": texts}) == GRPOConfig.from_dict({"task": own})
    assert error({"set": {"a": "task.level=3"}}).startswith("task.level: unknown key; ")
    assert error({"set": {"a": "task.name=my.py:Own,optim.level=3"}}).startswith("optim.level: unk")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"set": 3}, "set=3: must be a mapping of strings, such as "),
        ({"set": {"x": 3}}, "set.x=3: must be a string, such as "),
        ({"set": {"\r": None}}, 'set."\\r"=none: must be a string, such as '),
        ({"set": {"x": ""}}, '"": must be KEY=VALUE, for example optim.lr=1e-4 (in set.x)'),
        ({"set": {"x": "lagg=1"}}, "lagg: unknown key; did you mean lag? (in set.x)"),
        ({"set": {"x": "k=2"}, "k": 4}, "k=2 (in set.x): k is given twice"),
        ({"set": {"x": "k=2", "y": "k=2"}}, "k=2 (in set.y): k is given twice"),
        ({"set": {"x": "optim.lr=1"}, "optim": {"lr": 2}}, "optim.lr=1 (in set.x): optim.lr is "),
        ({"set": {"x": "lag=1"}}, "lag=1: needs placement=disaggregated, got colocated"),
    ],
)
def test_wrong_text_below_set_is_refused(data, text):
    assert error(data).startswith(text)


def test_flatten_undoes_nesting():
    flat = flatten(DEFAULTS)
    assert (flat["k"], flat["optim.betas"], flat["task.reward"]) == (1, [0.9, 0.95], None)
    of_other_tasks = {"template", "answer_in", "equality", "dataset", "size", "options", "mix"}
    of_other_tasks |= {"code_in", "partial_credit"}
    assert CHECKS.keys() - flat.keys() == {f"task.{name}" for name in of_other_tasks}
    rebuilt: dict = {}
    for key, value in flat.items():
        set_dotted(rebuilt, key, value)
    assert rebuilt == DEFAULTS


def test_paths_become_absolute_against_the_callers_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    data = nested(
        k=2,
        model__path="policy",
        model__preset="small",
        task__keywords_file="../words.txt",
        task__train_file="/data/train.jsonl",
        task__eval_file="~/eval.jsonl",
        task__reward="rewards/mine.py:score",
    )
    before = json.dumps(data)
    assert make_absolute(data, tmp_path) == nested(
        k=2,
        model__path=str(tmp_path / "policy"),
        model__preset="small",
        task__keywords_file=str(tmp_path.parent / "words.txt"),
        task__train_file="/data/train.jsonl",
        task__eval_file="/home/someone/eval.jsonl",
        task__reward=f"{tmp_path}/rewards/mine.py:score",
    )
    assert json.dumps(data) == before


def test_a_model_is_a_directory_or_else_a_name_on_the_hub(tmp_path):
    (tmp_path / "org" / "here").mkdir(parents=True)
    for named, meant in (
        ("org/here", str(tmp_path / "org" / "here")),
        ("Qwen/Qwen2.5-Math-1.5B", "Qwen/Qwen2.5-Math-1.5B"),
        ("./org/elsewhere", str(tmp_path / "org" / "elsewhere")),
        ("elsewhere", str(tmp_path / "elsewhere")),
    ):
        assert make_absolute(nested(model__path=named), tmp_path) == nested(model__path=meant)


def test_what_is_no_path_stays_as_it_is():
    data = {"model": {"path": None}, "task": {"reward": "my.module:score", "train_file": ""}}
    assert make_absolute(data, "/base") == data
    assert make_absolute({"model": 3, "k": 1}, "/base") == {"model": 3, "k": 1}


@pytest.mark.parametrize("key", ["loss.type", "loss.advantage"])
def test_a_users_function_is_named_by_the_file_or_the_module_it_is_in(key):
    built_in = CHECKS[key].default
    for value, absolute in (
        ("mine.py:f", "/base/mine.py:f"),
        ("my.module:f", "my.module:f"),
        (built_in, built_in),
    ):
        data: dict = {}
        set_dotted(data, key, value)
        assert GRPOConfig.from_dict(make_absolute(data, "/base"))[key] == absolute


def test_path_keys_of_the_config_are_all_made_absolute():
    paths = {key for key, check in CHECKS.items() if check.type.startswith("path")}
    data: dict = {}
    for key in paths:
        set_dotted(data, key, "here")
    assert set(flatten(make_absolute(data, "/base")).values()) == {str(Path("/base/here"))}


# ---- The reference of all keys ---------------------------------------------------------------


def test_every_key_says_in_whole_sentences_what_it_means():
    meanings = {key: check.meaning for key, check in CHECKS.items()}
    odd = {k: m for k, m in meanings.items() if not m.endswith(".") or ";" in m or "\n" in m}
    assert odd == {}


def test_the_reference_is_what_the_schema_says():
    reference = Path(__file__).parents[3] / "docs" / "config.md"
    assert reference.read_text(encoding="utf-8") == page(), f"out of date; run {COMMAND}"


def test_the_reference_has_a_row_for_every_key():
    rows = [line.split(" | ") for line in page().splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"| `{key}`" for key in CHECKS]
    assert {len(row) for row in rows} == {6}
    assert dict(zip(CHECKS, rows, strict=True))["buffer.fresh_fraction"] == [
        "| `buffer.fresh_fraction`",
        "number",
        "`0.5`",
        "a number > 0 and <= 1",
        "Share of each draw that consists of fresh groups, which have not been used in training "
        "before.",
        "buffer_capacity >= 2, and buffer_sampling=mixed |",
    ]


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("rollout.stop=</answer>", ("</answer>",)),
        ('rollout.stop=["</answer>", "\\n\\n"]', ("</answer>", "\n\n")),
        ('rollout.stop="7"', ("7",)),
        ("rollout.stop=[]", ()),
        ("rollout.stop=none", None),
    ],
)
def test_stop_strings_are_one_text_or_a_list(text, stops):
    data: dict = {}
    set_dotted(data, *parse_assignment(text))
    config = GRPOConfig.from_dict(data)
    assert config.rollout.stop == stops
    assert GRPOConfig.from_dict(config.to_dict()) == config
