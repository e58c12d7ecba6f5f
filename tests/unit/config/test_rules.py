"""Settings without effect are rejected, and the error says when they have an effect."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_trainable.config import CHECKS, ConfigError, GRPOConfig, TaskSettings, set_dotted

APART = {"placement": "disaggregated"}
REPLAY = {"buffer_capacity": 2, "buffer.sample_batches": 2}
REWARD = {"task.reward": "my:reward"}
PLAYED = {"env.name": "my:Env"}
PYTHON = {"env.name": "python"}
MATH = {"task.name": "math"}
GYM = {"task.name": "reasoning_gym", "task.dataset": "chain_sum"}
CLIPPED = "grpo_clip, dapo, ppo, gspo, gmpo, dppo_tv, dppo_kl, clip_cov"
CONTROL = {"task.name": "control"}
CODE = {"task.name": "code", "task.train_file": "/p"}
SCORED_APART = (
    "task.reward, a task of your own, task.name=reasoning_gym or code, or task.equality=math_verify"
)

HARMLESS = {key: check.harmless for key, check in CHECKS.items() if check.harmless}

# For each key: a value other than the default, settings under which the key has no effect, the
# setting that the error blames, the requirement that the error states, and settings under which the
# key has an effect.
CASES: dict[str, tuple[Any, dict[str, Any], str, str, dict[str, Any]]] = {
    "weight_update": ("in_flight", APART, "lag=0", "lag >= 1", {**APART, "lag": 1}),
    "buffer_sampling": (
        "fifo",
        {},
        "buffer_capacity=1",
        "buffer_capacity >= 2",
        REPLAY,
    ),
    "buffer.sample_batches": (2, {}, "buffer_capacity=1", "buffer_capacity >= 2", REPLAY),
    "buffer.max_age": (1, {}, "buffer_capacity=1", "buffer_capacity >= 2", REPLAY),
    "buffer.fresh_fraction": (
        0.25,
        {**REPLAY, "buffer_sampling": "recency"},
        "buffer_sampling=recency",
        "buffer_sampling=mixed",
        REPLAY,
    ),
    "transport_dtype": (
        "bfloat16",
        {"model.path": "/p", "model.dtype": "bfloat16"},
        "model.dtype=bfloat16",
        "model.dtype=float32",
        {},
    ),
    "model.env": ("Pendulum-v1", {}, "task.name=keyword", "task.name=control", CONTROL),
    **{
        key: (
            value,
            CONTROL,
            "task.name=control",
            "a task with text (any except control)",
            read,
        )
        for key, value, read in (
            ("model.path", "/p", {}),
            ("model.chat_template", "on", {}),
            ("model.gradient_checkpointing", True, {}),
            ("model.packing", False, {}),
            ("model.sampler_dtype", "bfloat16", {"loss.importance_cap": 2.0}),
            ("rollout.stop", (".",), {}),
            ("loss.teacher", "/t", {}),
            ("env.name", "my:Env", {}),
        )
    },
    "model.preset": ("small", {"model.path": "/p"}, "model.path=/p", "model.path=none", {}),
    "model.system": (
        "Be brief.",
        {},
        "model.chat_template=off",
        "model.chat_template=on or a file",
        {"model.chat_template": "on"},
    ),
    "model.template_args": (
        '{"enable_thinking": false}',
        {},
        "model.chat_template=off",
        "model.chat_template=on or a file",
        {"model.chat_template": "on"},
    ),
    **{
        f"model.{name}": (
            value,
            {},
            "model.path=none",
            "a Hugging Face model as model.path",
            {"model.path": "/p"},
        )
        for name, value in (("dtype", "bfloat16"), ("lora_rank", 8))
    },
    "eval.top_p": (
        0.9,
        {"eval.temperature": 0.0, "eval.samples": 1},
        "eval.temperature=0.0",
        "eval.temperature > 0",
        {},
    ),
    "model.adapter": (
        "/a",
        {},
        "model.path=none",
        "a Hugging Face model as model.path",
        {
            "model.path": "/p",
            "model.lora_rank": 8,
            "model.lora_alpha": 16.0,
            "model.lora_targets": "q_proj",
        },
    ),
    "model.head_fp32": (
        False,
        {"model.path": "/p"},
        "model.dtype=float32",
        "model.dtype=bfloat16",
        {"model.path": "/p", "model.dtype": "bfloat16"},
    ),
    **{
        f"model.{name}": (
            value,
            {"model.path": "/p"},
            "model.lora_rank=none",
            "a value for model.lora_rank",
            {"model.path": "/p", "model.lora_rank": 8},
        )
        for name, value in (("lora_alpha", 16.0), ("lora_targets", "q_proj,v_proj"))
    },
    "task.keywords_file": (
        "/w",
        {"task.train_file": "/t"},
        "task.train_file=/t",
        "task.train_file=none",
        {"task.eval_file": "/e"},
    ),
    "task.keywords_per_prompt": (
        2,
        {"task.train_file": "/t"},
        "task.train_file=/t",
        "task.train_file=none",
        {"task.eval_file": "/e"},
    ),
    **{
        f"task.{name}": (
            "/t",
            GYM,
            "task.name=reasoning_gym",
            "task.name=keyword, math or code",
            MATH,
        )
        for name in ("train_file", "eval_file")
    },
    **{
        f"task.{name}": (value, {}, "task.name=keyword", "task.name=math or reasoning_gym", task)
        for name, value, task in (
            ("template", "/t.txt", GYM),
            ("answer_in", "boxed", GYM),
        )
    },
    "task.equality": (
        "exact",
        {**MATH, **REWARD},
        "task.reward=my:reward",
        "task.reward=none",
        MATH,
    ),
    **{
        f"task.{name}": (value, MATH, "task.name=math", "task.name=reasoning_gym", GYM)
        for name, value in (("dataset", "spell_backward"), ("size", 9), ("options", '{"a": 1}'))
    },
    "task.code_in": ("block", MATH, "task.name=math", "task.name=code", CODE),
    "task.partial_credit": (
        True,
        {**CODE, **REWARD},
        "task.reward=my:reward",
        "task.reward=none",
        CODE,
    ),
    "task.match": (
        "substring",
        REWARD,
        "task.reward=my:reward",
        "task.reward=none",
        {"task.train_file": "/t"},
    ),
    **{
        key: (
            value,
            {},
            "task.reward=none and task.name=keyword and task.equality=auto and task.mix=none",
            SCORED_APART,
            REWARD,
        )
        for key, value in (
            ("task.reward_deadline_s", 5.0),
            ("resources.reward_workers", 2),
        )
    },
    **{
        key: (
            value,
            {},
            "env.name=off and task.reward=none and task.name=keyword and task.equality=auto and "
            "task.mix=none",
            f"an env.name other than off, {also}{SCORED_APART}",
            read,
        )
        for key, value, also, read in (
            ("task.max_error_rate", 0.5, "task.name=control, ", CONTROL),
            ("resources.reward_cpus", 1.0, "", REWARD),
        )
    },
    "task.reward": ("my:reward", PLAYED, "env.name=my:Env", "env.name=off", {}),
    "rollout.slots": (2, PLAYED, "env.name=my:Env", "env.name=off", {}),
    "rollout.min_new_tokens": (2, PLAYED, "env.name=my:Env", "env.name=off", {}),
    **{
        f"env.{name}": (value, {}, "env.name=off", "an env.name other than off", PLAYED)
        for name, value in (
            ("max_turns", 3),
            ("discount", 0.9),
            ("step_deadline_s", 5.0),
            ("episode_deadline_s", 20.0),
            ("patience_s", 0.0),
        )
    },
    "env.role": (
        "tool",
        PLAYED,
        "model.chat_template=off",
        "model.chat_template=on or a file",
        {**PLAYED, "model.chat_template": "on"},
    ),
    "env.allow_unsafe": (True, PLAYED, "env.name=my:Env", "env.name=python", PYTHON),
    "task.mix": (
        '{"keyword": {"name": "keyword", "weight": 1}}',
        {"task.name": "keyword"},
        "task.name=keyword",
        "task.name=mix",
        {},
    ),
    "task.strict": (
        True,
        {},
        "task.train_file=none and task.eval_file=none and env.name=off and task.reward=none and "
        "task.name=keyword and task.equality=auto and task.mix=none",
        "task.train_file, task.eval_file, an env.name other than off, task.name=control, "
        f"{SCORED_APART}",
        {"task.eval_file": "/e"},
    ),
    "task.normalize_parts": (
        True,
        {},
        "task.reward_weights=none",
        "a value for task.reward_weights",
        {"task.reward_weights": '{"answer": 1}'},
    ),
    "task.length_target": (
        20,
        {},
        "task.length_penalty=0.0",
        "task.length_penalty > 0",
        {"task.length_penalty": 0.01},
    ),
    **{
        f"rollout.{name}": (
            value,
            {"rollout.zero_advantage": "filter"},
            "rollout.zero_advantage=filter",
            "rollout.zero_advantage=resample",
            {"rollout.zero_advantage": "resample"},
        )
        for name, value in (("oversample", 2.5), ("redraws", 3))
    },
    **{
        f"pools.{name}": (
            value,
            {},
            "pools.enabled=false",
            "pools.enabled=true",
            {"pools.enabled": True},
        )
        for name, value in (
            ("easy", 0.5),
            ("mid", 0.5),
            ("hard", 0.5),
            ("easy_above", 0.9),
            ("hard_below", 0.1),
            ("memory", 0.25),
        )
    },
    "rollout.stragglers": (
        "drop",
        {**APART, "lag": 1},
        "resources.num_generators=1",
        "resources.num_generators >= 2",
        {**APART, "lag": 1, "resources.num_generators": 2},
    ),
    "rollout.overlong_buffer": (
        8,
        {"rollout.overlong": "filter"},
        "rollout.overlong=filter",
        "rollout.overlong=penalty or interrupt",
        {"rollout.overlong": "penalty"},
    ),
    "rollout.overlong_penalty": (
        0.5,
        {"rollout.overlong": "filter"},
        "rollout.overlong=filter",
        "rollout.overlong=penalty",
        {"rollout.overlong": "penalty"},
    ),
    **{
        f"rollout.{name}": (
            value,
            {"rollout.overlong": "penalty"},
            "rollout.overlong=penalty",
            "rollout.overlong=interrupt",
            {"rollout.overlong": "interrupt"},
        )
        for name, value in (("interruption", "Enough."), ("thinking_end", "</thoughts>"))
    },
    "loss.advantage_eps": (
        1e-6,
        {"loss.advantage": "rloo"},
        "loss.advantage=rloo and loss.whiten=true and task.normalize_parts=false",
        "loss.advantage=group_std, batch, group_mean_batch_std, maxrl or a function of your own; "
        "gae, vine, group_to_go with loss.whiten=true; or task.normalize_parts=true",
        {"loss.advantage": "maxrl"},
    ),
    **{
        key: (
            value,
            {},
            "loss.advantage=group_std",
            f"loss.advantage={needs}",
            {"loss.advantage": advantage},
        )
        for key, value, needs, advantage in (
            ("loss.gamma", 0.9, "gae or group_to_go", "gae"),
            ("loss.gae_lambda", 0.5, "gae", "gae"),
            ("loss.whiten", False, "gae, vine or group_to_go", "vine"),
            ("critic.body", "shared", "gae", "gae"),
            ("critic.lr", 1e-3, "gae", "gae"),
            ("critic.clip", 0.5, "gae", "gae"),
            ("vine.samples", 2, "vine", "vine"),
            ("vine.states", "sentences", "vine", "vine"),
            ("vine.chunk_tokens", 8, "vine", "vine"),
        )
    },
    "critic.coef": (
        0.1,
        {"loss.advantage": "gae"},
        "critic.body=own",
        "critic.body=shared",
        {"loss.advantage": "gae", "critic.body": "shared"},
    ),
    "loss.clip": (
        0.3,
        {"loss.type": "cispo"},
        "loss.type=cispo",
        f"loss.type={CLIPPED} or a function of your own (cispo: use loss.clip_high)",
        {"loss.type": "my.py:loss"},
    ),
    "loss.clip_high": (
        0.3,
        {"loss.type": "reinforce_with_baseline"},
        "loss.type=reinforce_with_baseline",
        f"loss.type={CLIPPED}, cispo or a function of your own",
        {"loss.type": "cispo"},
    ),
    "loss.dual_clip": (
        3.0,
        {"loss.type": "gspo"},
        "loss.type=gspo",
        "loss.type=grpo_clip, dapo or ppo",
        {"loss.type": "dapo"},
    ),
    **{
        f"loss.{name}": (
            value,
            {},
            "loss.type=grpo_clip",
            f"loss.type={needs}",
            {"loss.type": kind},
        )
        for name, value, needs, kind in (
            ("tau_positive", 2.0, "sapo", "sapo"),
            ("tau_negative", 2.0, "sapo", "sapo"),
            ("second_moment", 0.1, "m2po", "m2po"),
            ("cov_fraction", 0.1, "clip_cov or kl_cov", "kl_cov"),
            ("cov_band", (0.0, 1.0), "clip_cov", "clip_cov"),
            ("cov_kl_coef", 0.5, "kl_cov", "kl_cov"),
        )
    },
    **{
        f"loss.importance_{name}": (
            value,
            {},
            "loss.importance_cap=none",
            "loss.importance_cap > 0",
            {"loss.importance_cap": 2.0},
        )
        for name, value in (("level", "sequence"), ("rule", "mask"))
    },
    "loss.importance_floor": (
        0.5,
        {"loss.importance_cap": 2.0},
        "loss.importance_rule=truncate",
        "loss.importance_rule=mask",
        {"loss.importance_cap": 2.0, "loss.importance_rule": "mask"},
    ),
    **{
        f"loss.{name}": (
            value,
            {},
            "loss.kl_coef=0.0",
            "loss.kl_coef > 0",
            {"loss.kl_coef": 0.1},
        )
        for name, value in (("kl_in", "reward"), ("kl_target", 6.0))
    },
    "loss.teacher_coef": (
        0.5,
        {},
        "loss.teacher=none",
        "a value for loss.teacher",
        {"loss.teacher": "my_policy"},
    ),
    "loss.kl_gain": (
        0.5,
        {"loss.kl_coef": 0.1},
        "loss.kl_target=none",
        "a value for loss.kl_target",
        {"loss.kl_coef": 0.1, "loss.kl_target": 6.0},
    ),
    "loss.kl_estimator": (
        "k2",
        {"loss.kl_coef": 0.1, "loss.kl_in": "reward"},
        "loss.kl_in=reward",
        "loss.kl_in=loss",
        {"loss.kl_coef": 0.1},
    ),
    "optim.microbatch": (
        4,
        {"optim.microbatch_tokens": 512},
        "optim.microbatch_tokens=512",
        "optim.microbatch_tokens=none",
        {},
    ),
    "optim.epochs": (
        2,
        {"k": 2},
        "k_mode=same_batch",
        "k_mode=minibatches",
        {"k": 2, "k_mode": "minibatches"},
    ),
    "loss.kl_monitor_responses": (
        24,
        {"callbacks.kl_stop": 40.0},
        "callbacks.kl_stop=40.0",
        "callbacks.kl_stop=none",
        {},
    ),
    "callbacks.kl_band": (
        (0.0, 9.0),
        {"loss.kl_monitor": False},
        "loss.kl_monitor=false",
        "loss.kl_monitor=true, which measures the KL",
        {},
    ),
    "callbacks.kl_stop": (
        9.0,
        {"loss.kl_monitor": False},
        "loss.kl_monitor=false",
        "loss.kl_monitor=true, which measures the KL",
        {},
    ),
    "resources.reference": (
        "generator",
        {**APART, "loss.kl_monitor": False},
        "loss.kl_monitor=false and loss.kl_coef=0.0",
        "loss.kl_monitor=true or loss.kl_coef > 0",
        {**APART, "loss.kl_monitor": False, "loss.kl_coef": 0.1},
    ),
    **{
        f"resources.{name}": (value, {}, "placement=colocated", "placement=disaggregated", APART)
        for name, value in (
            ("num_generators", 2),
            ("spread", "spread"),
            ("generator_gpus", 0.5),
            ("num_learners", 2),
            ("learner_cpus", 2.0),
            ("learner_gpus", 0.5),
        )
    },
    "resources.learner_strategy": (
        "fsdp2",
        APART,
        "resources.num_learners=1",
        "resources.num_learners >= 2",
        {**APART, "resources.num_learners": 2},
    ),
    "resources.elastic": (
        True,
        {**APART, "resources.num_learners": 2, "resources.learner_strategy": "fsdp2"},
        "resources.learner_strategy=fsdp2",
        "resources.learner_strategy=replicated",
        {**APART, "resources.num_learners": 2},
    ),
    "resources.vllm_memory_share": (
        0.5,
        {**APART, "engine": "vllm"},
        "resources.generator_gpus=0.0 and resources.worker_gpus=0.0",
        "resources.generator_gpus > 0 or resources.worker_gpus > 0",
        {**APART, "engine": "vllm", "resources.generator_gpus": 1.0},
    ),
    **{
        f"resources.{name}": (value, APART, "placement=disaggregated", "placement=colocated", {})
        for name, value in (("worker_cpus", 2.0), ("worker_gpus", 0.5))
    },
}


def config_of(*settings: dict[str, Any]) -> GRPOConfig:
    data: dict[str, Any] = {}
    for dotted in settings:
        for key, value in dotted.items():
            set_dotted(data, key, value)
    return GRPOConfig.from_dict(data)


def test_every_key_with_a_condition_has_a_case() -> None:
    assert CASES.keys() == {key for key, check in CHECKS.items() if check.read_if}


@pytest.mark.parametrize(
    "key", [key for key in CASES if CASES[key][0] not in HARMLESS.get(key, ())]
)
def test_a_key_that_is_not_read_is_refused_and_told_what_it_needs(key: str) -> None:
    value, unread, blamed, needs, _ = CASES[key]
    with pytest.raises(ConfigError) as caught:
        config_of(unread, {key: value})
    line = str(caught.value)
    assert line.startswith(f"{key}=")
    assert line.endswith(f": has no effect with {blamed}; needs {needs}")
    assert "\n" not in line


@pytest.mark.parametrize("key", CASES)
def test_where_it_is_read_it_is_accepted(key: str) -> None:
    value, _, _, _, read = CASES[key]
    config = config_of(read, {key: value})
    assert config[key] == value
    assert config.reads(key)


@pytest.mark.parametrize("key", CASES)
def test_a_default_is_never_refused(key: str) -> None:
    _, unread, _, _, _ = CASES[key]
    config = config_of(unread, {key: CHECKS[key].default})
    # A trial's files contain every key with its resolved value.
    assert GRPOConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("key", HARMLESS)
def test_files_of_earlier_experiments_can_be_read(key: str) -> None:
    _, unread, _, _, _ = CASES[key]
    for value in HARMLESS[key]:
        assert config_of(unread, {key: value})[key] == value


def test_several_conditions_are_named_together() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of({"buffer.fresh_fraction": 0.25})
    assert str(caught.value) == (
        "buffer.fresh_fraction=0.25: has no effect with buffer_capacity=1 and "
        "buffer_sampling=recency; needs buffer_capacity >= 2 and buffer_sampling=mixed"
    )


@pytest.mark.parametrize("key", ["task.train_file", "task.eval_file"])
def test_prompt_files_are_not_read_by_a_users_task(key: str) -> None:
    name = key.removeprefix("task.")
    with pytest.raises(
        ConfigError, match=r"has no effect with task\.name=my:Task; needs task\.name=key"
    ):
        GRPOConfig(task=TaskSettings(name="my:Task", **{name: "/t"}))


@pytest.mark.parametrize("key", ["task.reward_deadline_s", "task.strict", "resources.reward_cpus"])
def test_a_task_of_the_users_is_scored_by_a_reward_of_the_users(key: str) -> None:
    value = CASES[key][0]
    assert config_of({"task.name": "my:Task", key: value})[key] == value
