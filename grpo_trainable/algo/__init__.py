"""GRPO as pure functions of tensors. Nothing in this package reads a config."""

from grpo_trainable.algo.advantages import ADVANTAGES, Advantage, compute_group_normalized_rewards
from grpo_trainable.algo.aggregation import AGGREGATIONS, aggregate, loss_denominator
from grpo_trainable.algo.kl import (
    KL_ESTIMATORS,
    k1,
    k2,
    k3,
    response_kl,
    sequence_kl,
    steered_coefficient,
)
from grpo_trainable.algo.losses import (
    LOSSES,
    TokenLoss,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
)
from grpo_trainable.algo.masking import (
    masked_mean,
    masked_normalize,
    masked_row_mean,
    masked_sum,
    zero_off_mask,
)
from grpo_trainable.algo.objective import compute_objective
from grpo_trainable.algo.ratios import (
    IMPORTANCE_LEVELS,
    IMPORTANCE_RULES,
    LOG_RATIO_MAX,
    bounded_log_ratio,
    bounded_tokens,
    effective_sample_fraction,
    importance_weight,
    response_ratio,
    sequence_ratio,
    token_ratio,
    weights_bounded,
)
from grpo_trainable.algo.reward_shaping import (
    kl_penalty,
    length_deviation,
    overlong_penalty,
    weighted_parts,
)
from grpo_trainable.algo.selection import SELECTIONS, Selection
from grpo_trainable.algo.token_advantages import (
    at_the_end,
    discounted_returns,
    gae,
    group_to_go,
    teacher_advantages,
    vine,
    whitened_tokens,
)
from grpo_trainable.algo.train_step import grpo_microbatch_train_step
from grpo_trainable.algo.value_loss import explained_variance, value_loss

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "IMPORTANCE_LEVELS",
    "IMPORTANCE_RULES",
    "KL_ESTIMATORS",
    "LOG_RATIO_MAX",
    "LOSSES",
    "SELECTIONS",
    "Advantage",
    "Selection",
    "TokenLoss",
    "aggregate",
    "at_the_end",
    "bounded_log_ratio",
    "bounded_tokens",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_objective",
    "compute_policy_gradient_loss",
    "discounted_returns",
    "effective_sample_fraction",
    "explained_variance",
    "gae",
    "group_to_go",
    "grpo_microbatch_train_step",
    "importance_weight",
    "k1",
    "k2",
    "k3",
    "kl_penalty",
    "length_deviation",
    "loss_denominator",
    "masked_mean",
    "masked_normalize",
    "masked_row_mean",
    "masked_sum",
    "overlong_penalty",
    "response_kl",
    "response_ratio",
    "sequence_kl",
    "sequence_ratio",
    "steered_coefficient",
    "teacher_advantages",
    "token_ratio",
    "value_loss",
    "vine",
    "weighted_parts",
    "weights_bounded",
    "whitened_tokens",
    "zero_off_mask",
]
