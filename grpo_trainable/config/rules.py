"""Which combination of settings reads a key: a table.

`READ_WITH` has a row for each key that only some combinations read; `ALWAYS_READ` holds all others.
Where a key is not read it may only have its default: `GRPOConfig` refuses any other value, which
would look as if it had an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_trainable.config.mix import Entry, mix_of
from grpo_trainable.config.schema import CHECKS, CONTROL, TASK_SETTINGS, scored_apart
from grpo_trainable.config.values import checks_of
from grpo_trainable.plugins import is_reference


class Settings(Protocol):
    def __getitem__(self, key: str, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What must hold of other settings for a key to be read."""

    keys: tuple[str, ...]  # the settings it is about
    needs: str  # the condition in words, as errors and the reference give it
    holds: Callable[..., bool]  # takes the values of `keys`, in their order

    def met_by(self, settings: Settings) -> bool:
        return self.holds(*(settings[key] for key in self.keys))


def _is(key: str, *values: str, remark: str = "") -> Condition:
    *others, last = values
    listed = f"{', '.join(others)} or {last}" if others else last
    return Condition(keys=(key,), needs=f"{key}={listed}{remark}", holds=lambda v: v in values)


def _is_or_users(key: str, *values: str, remark: str = "") -> Condition:
    return Condition(
        keys=(key,),
        needs=f"{key}={', '.join(values)} or a function of your own{remark}",
        holds=lambda v: v in values or is_reference(v),
    )


def _at_least(key: str, minimum: int) -> Condition:
    return Condition(keys=(key,), needs=f"{key} >= {minimum}", holds=lambda v: v >= minimum)


def _none_given(*keys: str) -> Condition:
    return Condition(
        keys=keys,
        needs=" and ".join(f"{key}=none" for key in keys),
        holds=lambda *values: all(value is None for value in values),
    )


def _given(key: str, what: str = "") -> Condition:
    needs = f"a {key} of {what}" if what else f"a {key}"
    return Condition(keys=(key,), needs=needs, holds=lambda value: value is not None)


_COLOCATED = _is("placement", "colocated")
_DISAGGREGATED = _is("placement", "disaggregated")
_REPLAY = _at_least("buffer_capacity", 2)
_NO_PROMPT_FILES = _none_given("task.train_file", "task.eval_file")
_SCORED_APART = Condition(
    keys=("task.reward", "task.name", "task.equality", "task.mix"),
    needs="task.reward, a task of your own, task.name=reasoning_gym or task.equality=math_verify",
    holds=scored_apart,
)
_NOT_PLAYED = _is("env.name", "off")
_OF_TEXT = Condition(
    keys=("task.name",),
    needs="a task other than control, which has no text",
    holds=lambda name: name != CONTROL,
)
_PLAYED = Condition(
    keys=("env.name",), needs="an env.name other than off", holds=lambda name: name != "off"
)
# An environment of text has processes of its own, as what is scored apart has.
_APART = Condition(
    keys=("env.name", *_SCORED_APART.keys),
    needs=f"env.name, {_SCORED_APART.needs}",
    holds=lambda name, *scoring: name != "off" or scored_apart(*scoring),
)
# All of these may fail, and so may an environment of control.
_MAY_FAIL = Condition(
    keys=_APART.keys,
    needs=f"env.name, task.name={CONTROL}, {_SCORED_APART.needs}",
    holds=lambda *settings: settings[2] == CONTROL or _APART.holds(*settings),
)
_MODEL_OF_YOURS = _given("model.path", "a Hugging Face model")
_CLIPPED = ("grpo_clip", "dapo", "ppo", "gspo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov")
_GAE = _is("loss.advantage", "gae")
_VINE = _is("loss.advantage", "vine")
_DIVIDING = ("group_std", "batch", "group_mean_batch_std", "maxrl")
_WHITENED = ("gae", "vine", "group_to_go")
_LORA = _given("model.lora_rank")
_CHAT = Condition(
    keys=("model.chat_template",),
    needs="model.chat_template=on or a file",
    holds=lambda template: template != "off",
)
_RESAMPLED = _is("rollout.zero_advantage", "resample")
_POOLS = Condition(keys=("pools.enabled",), needs="pools.enabled=true", holds=bool)
_KL = Condition(keys=("loss.kl_coef",), needs="loss.kl_coef > 0", holds=lambda v: v > 0)
_IMPORTANCE = Condition(keys=("loss.importance_cap",), needs="loss.importance_cap > 0", holds=bool)
_KL_MONITOR = Condition(
    keys=("loss.kl_monitor",),
    needs="loss.kl_monitor=true, which measures the KL",
    holds=bool,
)

_DIVIDED = Condition(
    keys=("loss.advantage", "loss.whiten", "task.normalize_parts"),
    needs=f"loss.advantage={', '.join(_DIVIDING)} or a function of your own, "
    f"{', '.join(_WHITENED)} with loss.whiten=true, or task.normalize_parts=true",
    holds=lambda advantage, whiten, normalized: (
        advantage in _DIVIDING
        or is_reference(advantage)
        or (advantage in _WHITENED and whiten)
        or normalized
    ),
)


def _task_settings() -> dict[str, tuple[Condition, ...]]:
    """The rows of the settings that only some tasks have."""
    also = {
        "task.keywords_file": (_NO_PROMPT_FILES,),
        "task.keywords_per_prompt": (_NO_PROMPT_FILES,),
        "task.match": (_none_given("task.reward"),),
        "task.equality": (_none_given("task.reward"),),
    }
    tasks: dict[str, list[str]] = {}
    for task, settings in TASK_SETTINGS.items():
        for key in checks_of(settings, "task."):
            tasks.setdefault(key, []).append(task)
    return {key: (_is("task.name", *names), *also.get(key, ())) for key, names in tasks.items()}


def _mixed(scoring: tuple[Any, ...]) -> Iterable[Entry]:
    """The entries of the mix that is the last of these values."""
    return mix_of(scoring[-1]).values()


_TEXT_ALONE = (
    *("model.path", "model.chat_template", "model.gradient_checkpointing", "model.packing"),
    *("model.sampler_dtype", "rollout.stop", "loss.teacher", "env.name"),
)

# Key -> the conditions that must all hold for it to be read.
READ_WITH: dict[str, tuple[Condition, ...]] = {
    # Nothing is under way at lag 0 when new weights come.
    "weight_update": (_DISAGGREGATED, _at_least("lag", 1)),
    "buffer_sampling": (_REPLAY,),
    "buffer.sample_batches": (_REPLAY,),
    "buffer.max_age": (_REPLAY,),
    "buffer.fresh_fraction": (_REPLAY, _is("buffer_sampling", "mixed")),
    "transport_dtype": (_is("model.dtype", "float32"),),
    "model.preset": (_none_given("model.path"), _OF_TEXT),
    "model.env": (_is("task.name", CONTROL),),
    **dict.fromkeys(_TEXT_ALONE, (_OF_TEXT,)),
    "model.system": (_CHAT,),
    "model.dtype": (_MODEL_OF_YOURS,),
    "model.head_fp32": (_is("model.dtype", "bfloat16"),),
    "model.lora_rank": (_MODEL_OF_YOURS,),
    "model.lora_alpha": (_LORA,),
    "model.lora_targets": (_LORA,),
    **_task_settings(),
    "task.reward": (_NOT_PLAYED, _OF_TEXT),
    # A reward that is computed in the generator neither hangs nor fails.
    "task.reward_deadline_s": (_SCORED_APART, _NOT_PLAYED),
    "task.max_error_rate": (_MAY_FAIL,),
    "task.strict": (
        Condition(
            keys=("task.train_file", "task.eval_file", *_MAY_FAIL.keys),
            needs=f"task.train_file, task.eval_file, {_MAY_FAIL.needs}",
            holds=lambda train_file, eval_file, *failing: (
                train_file is not None
                or eval_file is not None
                or _MAY_FAIL.holds(*failing)
                or any(entry.keys() & {"train_file", "eval_file"} for entry in _mixed(failing))
            ),
        ),
    ),
    "task.normalize_parts": (_given("task.reward_weights"),),
    "task.length_target": (
        Condition(
            keys=("task.length_penalty",), needs="task.length_penalty > 0", holds=lambda v: v > 0
        ),
    ),
    "rollout.slots": (_NOT_PLAYED, _OF_TEXT),
    "rollout.min_new_tokens": (_NOT_PLAYED, _OF_TEXT),
    **{
        f"env.{name}": (_PLAYED,)
        for name in ("max_turns", "discount", "step_deadline_s", "episode_deadline_s", "patience_s")
    },
    "env.allow_unsafe": (_is("env.name", "python"),),
    "rollout.oversample": (_RESAMPLED,),
    "rollout.redraws": (_RESAMPLED,),
    "rollout.overlong_buffer": (_is("rollout.overlong", "penalty", "interrupt"),),
    "rollout.overlong_penalty": (_is("rollout.overlong", "penalty"),),
    "rollout.interruption": (_is("rollout.overlong", "interrupt"),),
    "rollout.thinking_end": (_is("rollout.overlong", "interrupt"),),
    "loss.advantage_eps": (_DIVIDED,),
    **{
        f"pools.{name}": (_POOLS,)
        for name in ("easy", "mid", "hard", "easy_above", "hard_below", "memory")
    },
    "loss.gamma": (_is("loss.advantage", "gae", "group_to_go"),),
    "loss.gae_lambda": (_GAE,),
    "loss.whiten": (_is("loss.advantage", *_WHITENED),),
    "critic.body": (_GAE,),
    "critic.lr": (_GAE,),
    "critic.coef": (_GAE, _is("critic.body", "shared")),
    "critic.clip": (_GAE,),
    "vine.samples": (_VINE,),
    "vine.states": (_VINE,),
    "vine.chunk_tokens": (_VINE,),
    "loss.clip": (_is_or_users("loss.type", *_CLIPPED, remark=" (cispo clips by loss.clip_high)"),),
    "loss.clip_high": (_is_or_users("loss.type", *_CLIPPED, "cispo"),),
    "loss.dual_clip": (_is("loss.type", "grpo_clip", "dapo", "ppo"),),
    "loss.tau_positive": (_is("loss.type", "sapo"),),
    "loss.tau_negative": (_is("loss.type", "sapo"),),
    "loss.second_moment": (_is("loss.type", "m2po"),),
    "loss.cov_fraction": (_is("loss.type", "clip_cov", "kl_cov"),),
    "loss.cov_band": (_is("loss.type", "clip_cov"),),
    "loss.cov_kl_coef": (_is("loss.type", "kl_cov"),),
    "loss.teacher_coef": (_given("loss.teacher"),),
    "loss.importance_level": (_IMPORTANCE,),
    "loss.importance_rule": (_IMPORTANCE,),
    "loss.importance_floor": (_IMPORTANCE, _is("loss.importance_rule", "mask")),
    "loss.kl_in": (_KL,),
    "loss.kl_target": (_KL,),
    "loss.kl_gain": (_given("loss.kl_target"),),
    # The KL in the reward is k1, whose expectation alone has the right gradient there.
    "loss.kl_estimator": (_KL, _is("loss.kl_in", "loss")),
    "optim.microbatch": (_none_given("optim.microbatch_tokens"),),
    "optim.epochs": (_is("k_mode", "minibatches"),),
    "callbacks.kl_band": (_KL_MONITOR,),
    "callbacks.kl_stop": (_KL_MONITOR,),
    "resources.num_generators": (_DISAGGREGATED,),
    "resources.spread": (_DISAGGREGATED,),
    "resources.reference": (
        _DISAGGREGATED,
        Condition(
            keys=("loss.kl_monitor", "loss.kl_coef"),
            needs="loss.kl_monitor=true or loss.kl_coef > 0",
            holds=lambda monitored, coefficient: monitored or coefficient > 0,
        ),
    ),
    "resources.generator_gpus": (_DISAGGREGATED,),
    "resources.num_learners": (_DISAGGREGATED,),
    "resources.learner_strategy": (_DISAGGREGATED, _at_least("resources.num_learners", 2)),
    "resources.elastic": (
        _DISAGGREGATED,
        _at_least("resources.num_learners", 2),
        _is("resources.learner_strategy", "replicated"),
    ),
    "resources.learner_cpus": (_DISAGGREGATED,),
    "resources.learner_gpus": (_DISAGGREGATED,),
    "resources.worker_cpus": (_COLOCATED,),
    "resources.reward_workers": (_SCORED_APART, _NOT_PLAYED),
    "resources.reward_cpus": (_APART,),
    "resources.worker_gpus": (_COLOCATED,),
}

# Other values that a key may have where it is not read: what its default resolves to, and defaults
# of earlier versions, which the files of their experiments spell out.
HARMLESS: dict[str, Any] = {
    "loss.clip": 0.2,
    "model.head_fp32": False,
    "rollout.oversample": 1.0,
    "resources.worker_cpus": 1.9,
}

ALWAYS_READ = frozenset(
    (
        *("arm", "placement", "rounds", "k", "k_mode", "lag", "seed"),
        *("buffer_capacity", "engine", "transport"),
        *("task.name", "task.reward_weights", "task.length_penalty"),
        *("rollout.prompts", "rollout.unit_prompts", "rollout.group_size"),
        "rollout.max_new_tokens",
        *("rollout.temperature", "rollout.zero_advantage", "rollout.overlong"),
        "pools.enabled",
        *("loss.type", "loss.advantage", "loss.aggregation"),
        *("loss.kl_coef", "loss.kl_monitor", "loss.importance_cap"),
        *("optim.lr", "optim.betas", "optim.weight_decay", "optim.grad_clip"),
        *("optim.microbatch_tokens", "optim.schedule", "optim.max_skipped_steps"),
        *("eval.every", "eval.prompts", "eval.samples", "eval.temperature"),
        *("checkpoint.every", "checkpoint.keep"),
        *("callbacks.verbose", "callbacks.leave_out_disturbed"),
        # A colocated worker samples with the threads that generator_cpus buy.
        *("resources.generator_cpus", "resources.deadline_s"),
    )
)


def unmet(key: str, settings: Settings) -> list[Condition]:
    """What keeps `key` from being read; empty where it is read."""
    return [c for c in READ_WITH.get(key, ()) if not c.met_by(settings)]


def is_unremarkable(key: str, value: Any) -> bool:
    """Whether a key has its default, or another value that it may have where it is not read."""
    harmless = key in HARMLESS and value == HARMLESS[key]
    return harmless or (key in CHECKS and value == CHECKS[key].default)


def of_other_placement(key: str, placement: str) -> bool:
    """Whether `key` is a resource that only the other placement reserves."""
    own = next((c for c in (_COLOCATED, _DISAGGREGATED) if c in READ_WITH.get(key, ())), None)
    return key.startswith("resources.") and own is not None and not own.holds(placement)
