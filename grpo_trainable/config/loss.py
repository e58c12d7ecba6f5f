"""The `loss` section: the objective that the gradient steps minimise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from grpo_trainable.config.conditions import (
    GAE,
    OF_TEXT,
    Condition,
    Config,
    Conflict,
    given,
    is_true,
    none_given,
    one_of,
    one_of_or_own,
    positive,
    zero,
)
from grpo_trainable.config.defaults import by_task, when_read, where_none
from grpo_trainable.config.engine_catalog import engine_record
from grpo_trainable.config.foreign_names import trl, verl
from grpo_trainable.config.values import (
    ALL,
    Settings,
    choice,
    choice_or_reference,
    count_or_all,
    flag,
    number,
    pair,
    path_or_hub_id,
)
from grpo_trainable.plugins import is_reference

CLIP = 0.2
DAPO_CLIP_HIGH = 0.28  # arXiv 2503.14476
# (low, high) for each loss, from its paper (docs/algorithms.md).
CLIPS = {
    "gspo": (3e-4, 4e-4),
    "gmpo": (0.4, 0.4),
    "dppo_tv": (0.15, 0.15),
    "dppo_kl": (0.05, 0.05),
}
# Default cap if the sampler's log-probs may differ from the learner's (Yao et al. 2025).
IMPORTANCE_CAP = 2.0
# Losses whose ratio measures how far the policy is from the sampler.
TO_THE_SAMPLER = ("m2po", "dppo_tv", "dppo_kl", "topr")

_CLIPPED = ("grpo_clip", "dapo", "ppo", "gspo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov")
_CLIPPED_ABOVE = ("cispo",)  # losses that read clip_high but not clip
# Losses that clip no ratio, so their `loss/clip_fraction` is always 0.
NEVER_CLIPS = ("no_baseline", "reinforce_with_baseline", "sapo", "kl_cov")
_DIVIDING = ("group_std", "batch", "group_mean_batch_std", "maxrl")
_WHITENED = ("gae", "vine", "group_to_go")
_KL = positive("loss.kl_coef")
_WEIGHTED = positive("loss.importance_cap")
_DIVIDED = Condition(
    keys=("loss.advantage", "loss.whiten", "task.normalize_parts"),
    needs=f"loss.advantage={', '.join(_DIVIDING)} or a function of your own; "
    f"{', '.join(_WHITENED)} with loss.whiten=true; or task.normalize_parts=true",
    holds=lambda advantage, whiten, normalized: (
        advantage in _DIVIDING
        or is_reference(advantage)
        or (advantage in _WHITENED and whiten)
        or normalized
    ),
)

PUBLISHED = "whole algorithms are presets, such as --preset rloo (docs/algorithms.md#presets)"


def _default_clip(loss: str) -> float:
    return CLIPS[loss][0] if loss in CLIPS else CLIP


def _default_clip_high(loss: str, clip: float | None) -> float | None:
    return CLIPS[loss][1] if loss in CLIPS and clip is None else None


def _usual_clip_high(loss: str, clip: float) -> float:
    return DAPO_CLIP_HIGH if loss == "dapo" else clip


def samples_as_it_learns(engine: str, sampler_dtype: str) -> bool:
    """Return True if the engine promises log-probs equal to the learner's, up to rounding."""
    # `auto` chooses an engine that makes this promise.
    promised = engine == "auto" or engine_record(engine).log_prob_error is not None
    return promised and sampler_dtype == "float32"


def _default_importance_cap(engine: str, sampler_dtype: str, loss: str) -> float | None:
    corrected = samples_as_it_learns(engine, sampler_dtype) or loss in TO_THE_SAMPLER
    return None if corrected else IMPORTANCE_CAP


@dataclass(frozen=True, kw_only=True)
class LossSettings(Settings):
    """Objective that the gradient steps minimise."""

    SECTION: ClassVar[str] = "loss"

    type: str = choice_or_reference(
        (
            *("grpo_clip", "no_baseline", "reinforce_with_baseline", "dapo", "ppo", "cispo"),
            *("gspo", "gmpo", "sapo", "topr", "dppo_tv", "dppo_kl"),
            *("m2po", "clip_cov", "kl_cov"),
        ),
        "Policy loss of each token, or your own function that computes it.",
        what="function",
        advice=PUBLISHED,
        also_called=(
            trl(
                "loss_type",
                "grpo, bnpo and dapo are loss.type=grpo_clip; grpo averages by sequence_mean, dapo "
                "and bnpo by token_mean, dr_grpo by constant. loss.type=dapo also raises clip_high "
                "to 0.28. --preset NAME sets all settings of a paper",
                also=("loss.aggregation",),
            ),
            trl(
                "importance_sampling_level",
                "sequence is gspo; loss.importance_level is only for the weights that correct for "
                "stale rollouts",
            ),
            verl("actor.policy_loss.loss_mode"),
        ),
    )
    advantage: str = choice_or_reference(
        (
            *("group_std", "none", "group_mean", "rloo", "batch"),
            *("group_mean_batch_std", "maxrl", "zero", "gae", "vine", "group_to_go"),
        ),
        "Rule that turns rewards into advantages, or your own function. `none` uses the reward "
        "itself. `zero` ignores rewards, so only loss.teacher has an effect. `gae` and "
        "`vine` compute an advantage for each token: `gae` uses a critic, and `vine` uses "
        "completions that are sampled from points in the response. `group_to_go` computes an "
        "advantage for each step of an episode, from the rewards that the episodes of the group "
        "earn from that step on.",
        what="function",
        advice=PUBLISHED,
        default_by=by_task(control="group_to_go"),
        also_called=(
            trl(
                "scale_rewards",
                "group corresponds to group_std, none to group_mean, and mean to maxrl; batch, "
                "which divides r minus the group's mean by the standard deviation of all rewards, "
                "needs your own advantage function",
            ),
            verl(
                "algorithm.adv_estimator",
                "grpo is group_std, reinforce_plus_plus is batch, reinforce_plus_plus_baseline is "
                "group_mean_batch_std; rloo and gae have the same names here",
            ),
            verl("algorithm.norm_adv_by_std_in_grpo", "true is group_std, false is group_mean"),
        ),
    )
    advantage_eps: float = number(
        1e-8,
        "Number added to the divisor in the advantage. The divisor is the standard deviation of "
        "the rewards, or, with maxrl, their mean. Your own advantage function receives this number "
        "too.",
        above=0,
        read_if=_DIVIDED,
    )
    gamma: float = number(
        1.0,
        "γ, the discount factor. In the advantage of a token, a reward that is earned n tokens "
        "later is multiplied by γ^n.",
        minimum=0,
        maximum=1,
        read_if=one_of("loss.advantage", "gae", "group_to_go"),
        also_called=(verl("algorithm.gamma"),),
    )
    gae_lambda: float = number(
        1.0,
        "λ of generalised advantage estimation. 1 trusts only the rewards, and 0 trusts only the "
        "critic's value of the next state.",
        minimum=0,
        maximum=1,
        read_if=GAE,
        also_called=(verl("algorithm.lam"),),
    )
    whiten: bool = flag(
        True,
        "Normalise the advantages of all tokens of a rollout batch to mean 0 and standard "
        "deviation 1.",
        read_if=one_of("loss.advantage", *_WHITENED),
    )
    aggregation: str = choice(
        ("sequence_mean", "token_mean", "constant"),
        "Method of averaging the token losses of a batch. `sequence_mean` averages over each "
        "response, then over the responses. `token_mean` averages over all tokens. `constant` "
        "divides the sum over each response by rollout.max_new_tokens, then averages over the "
        "responses.",
        default_by=by_task(control="token_mean"),
        also_called=(verl("actor.loss_agg_mode", "token_mean, sequence_mean or constant"),),
    )
    clip: float | None = number(
        None,
        "ε, the clip range below 1. The ratio stays above 1 − ε, or above e^−ε with gmpo. With "
        "dppo_tv, ε limits how far the probability of a token may fall. With dppo_kl, ε limits the "
        "KL that a fall of the probability causes. `none` means 0.0003 for gspo, 0.4 for gmpo, "
        "0.15 for dppo_tv, 0.05 for dppo_kl and 0.2 for all other losses.",
        above=0,
        below=1,
        read_if=one_of_or_own(
            "loss.type",
            *_CLIPPED,
            remark=f" ({', '.join(_CLIPPED_ABOVE)}: use loss.clip_high)",
        ),
        harmless=(0.2,),
        default_by=where_none(("loss.type",), _default_clip),
        also_called=(trl("epsilon"), verl("actor.clip_ratio"), verl("actor.clip_ratio_low")),
    )
    clip_high: float | None = number(
        None,
        "ε_high, the clip range above 1. The ratio stays below 1 + ε_high, or below e^ε_high with "
        "gmpo. With dppo_tv, ε_high limits how far the probability of a token may rise. With "
        "dppo_kl, ε_high limits the KL that a rise of the probability causes. `none` means 0.28 "
        "for dapo, 0.0004 for gspo if clip is also none, and otherwise the value of clip.",
        above=0,
        read_if=one_of_or_own("loss.type", *_CLIPPED, *_CLIPPED_ABOVE),
        default_by=(
            where_none(("loss.type", "loss.clip"), _default_clip_high),
            when_read(("loss.type", "loss.clip"), _usual_clip_high),
        ),
        also_called=(trl("epsilon_high"), verl("actor.clip_ratio_high")),
    )
    dual_clip: float | None = number(
        None,
        "Upper limit on the ratio of a token with a negative advantage. The limit keeps a single "
        "token from outweighing all others. `none` sets no limit.",
        above=1,
        read_if=one_of("loss.type", "grpo_clip", "dapo", "ppo"),
        also_called=(trl("delta"), verl("actor.clip_ratio_c")),
    )
    tau_positive: float = number(
        1.0,
        "τ, the steepness of sapo's gate for tokens with a positive advantage.",
        above=0,
        read_if=one_of("loss.type", "sapo"),
        also_called=(trl("sapo_temperature_pos"),),
    )
    tau_negative: float = number(
        1.05,
        "τ, the steepness of sapo's gate for tokens whose advantage is not positive. If this τ is "
        "above tau_positive, the gate closes earlier for these tokens.",
        above=0,
        read_if=one_of("loss.type", "sapo"),
        also_called=(trl("sapo_temperature_neg"),),
    )
    second_moment: float = number(
        0.04,
        "Largest allowed mean of (log ratio)² over tokens. The tokens with the largest (log "
        "ratio)² are left out until the mean is within this limit.",
        minimum=0,
        read_if=one_of("loss.type", "m2po"),
    )
    cov_fraction: float = number(
        2e-4,
        "Share of a gradient step's tokens that clip_cov or kl_cov selects. The selected tokens "
        "have a large covariance of log-prob and advantage. At least one token is selected, "
        "however small the share is.",
        above=0,
        maximum=1,
        read_if=one_of("loss.type", "clip_cov", "kl_cov"),
    )
    cov_band: tuple[float, float] = pair(
        (1.0, 5.0),
        "Range of covariances from which clip_cov draws its tokens.",
        expected="two numbers, low < high",
        valid=lambda low, high: low < high,
        read_if=one_of("loss.type", "clip_cov"),
    )
    cov_kl_coef: float = number(
        1.0,
        "Weight of the KL penalty on the tokens that kl_cov selects.",
        minimum=0,
        read_if=one_of("loss.type", "kl_cov"),
    )
    teacher: str | None = path_or_hub_id(
        None,
        "Teacher, which must have the policy's tokenizer: the directory of a policy or of a "
        "Hugging Face model, or the name of a model on the hub. The teacher's log-prob of each "
        "token, minus the sampler's, is added to the advantage of the token.",
        read_if=OF_TEXT,
    )
    teacher_coef: float = number(
        1.0,
        "Weight of the teacher's term in the advantage.",
        above=0,
        read_if=given("loss.teacher"),
    )
    kl_coef: float = number(
        0.0,
        "β, the weight of the KL to the reference.",
        minimum=0,
        also_called=(
            trl("beta"),
            verl(
                "actor.use_kl_loss",
                "0 turns the KL off; loss.kl_in puts it into the loss or the reward",
            ),
            verl("actor.kl_loss_coef"),
            verl("algorithm.kl_ctrl.kl_coef"),
        ),
    )
    kl_in: str = choice(
        ("loss", "reward"),
        "Use of the KL to the reference: add it to the loss as a term (loss), or subtract it from "
        "the reward of each response before rewards become advantages (reward).",
        read_if=_KL,
        also_called=(verl("algorithm.use_kl_in_reward", "set loss.kl_coef too", value="reward"),),
    )
    kl_target: float | None = number(
        None,
        "Target for the KL to the reference, in nats per response. After each round, β changes to "
        "bring the KL closer to the target. `none` leaves β as it is.",
        above=0,
        read_if=_KL,
        also_called=(verl("algorithm.kl_ctrl.target_kl", "in nats per response"),),
    )
    kl_gain: float = number(
        0.1,
        "Gain of the controller that steers the KL to loss.kl_target. In each round, β changes by "
        "at most β × kl_gain / 5.",
        above=0,
        maximum=1,
        read_if=given("loss.kl_target"),
    )
    kl_estimator: str = choice(
        ("k3", "k2"),
        "Estimator of the KL in the loss. k1 is not valid, because its expected gradient in the "
        "loss is 0.",
        advice="k1 has an expected gradient of 0 inside the loss, so it would not keep the policy "
        "near the reference; to subtract k1 from the reward, set loss.kl_in=reward and leave out "
        "loss.kl_estimator",
        read_if=(_KL, one_of("loss.kl_in", "loss")),
        also_called=(
            verl("actor.kl_loss_type", "mse is k2, low_var_kl is k3; for kl use loss.kl_in=reward"),
        ),
    )
    kl_monitor: bool = flag(
        True,
        "Record the kl/… metrics, such as the KL to the reference after each round. Recording "
        "them costs forward passes. kl/teacher_nats does not depend on this setting.",
    )
    kl_monitor_responses: int | str = count_or_all(
        16,
        "Number of responses of each round, drawn at random, on which the KL and the reference NLL "
        "are measured. The metrics include standard errors. `all` measures every response. If "
        "loss.kl_coef or callbacks.kl_stop is set, every response is measured, because these "
        "settings use the KL. The number is rounded up to a multiple of "
        "resources.num_learners.",
        minimum=2,
        read_if=(is_true("loss.kl_monitor"), zero("loss.kl_coef"), none_given("callbacks.kl_stop")),
        harmless=(ALL,),
    )
    importance_cap: float | None = number(
        None,
        "C, the largest importance weight. 0 turns importance weights off. `none` means 0 for the "
        "losses m2po, dppo_tv, dppo_kl and topr. For other losses, `none` means 2 if the sampler's "
        "log-probs may differ from the learner's (with model.sampler_dtype=bfloat16, or with an "
        "engine other than auto, torch, hf and control), and 0 if they may not.",
        minimum=0,
        default_by=where_none(
            ("engine", "model.sampler_dtype", "loss.type"), _default_importance_cap
        ),
        also_called=(
            trl("vllm_importance_sampling_correction", "0 turns it off"),
            trl("vllm_importance_sampling_cap"),
        ),
    )
    importance_level: str = choice(
        ("token", "sequence"),
        "Unit of the importance weights: each token (token), or each response, whose weight is "
        "the product of the weights of its tokens (sequence).",
        read_if=_WEIGHTED,
    )
    importance_rule: str = choice(
        ("truncate", "mask"),
        "Treatment of a weight above the cap: cut it to the cap (truncate), or set it to 0 (mask).",
        read_if=_WEIGHTED,
    )
    importance_floor: float | None = number(
        None,
        "Smallest importance weight that counts. A smaller weight becomes 0. `none` sets no "
        "minimum.",
        above=0,
        read_if=(_WEIGHTED, one_of("loss.importance_rule", "mask")),
    )


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield conflicts between settings of importance weights."""
    cap, floor = config.loss.importance_cap, config.loss.importance_floor

    yield (
        cap is not None and floor is not None and floor >= cap,
        "loss.importance_floor",
        f"must be below loss.importance_cap={cap}",
    )
