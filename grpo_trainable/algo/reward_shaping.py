"""Changes to the reward of a response before rewards become advantages.

Shapes: G responses of up to R tokens. No function changes a reward tensor.
"""

from __future__ import annotations

from torch import Tensor

from grpo_trainable.algo.advantages import group_std
from grpo_trainable.algo.kl import k1


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return Σ_t (log π − log π_ref) of each response in nats, (G,). The sum may be negative.

    All arguments are (G, R). π is the policy that sampled the responses, so the mean of this sum
    over responses estimates the KL to the reference. RLHF uses the reward r − β·(this sum) (Ziegler
    et al. 2019, arXiv 1909.08593). The penalty applies to the response as a whole, as in RLOO
    (arXiv 2402.14740). In REINFORCE++ (arXiv 2501.03262), a token is penalised only for itself and
    the tokens after it.
    """
    return k1(log_probs, ref_log_probs, mask).sum(dim=-1)


def overlong_penalty(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """Return penalties: 0 up to `longest` − `buffer` tokens, rising linearly to 1 at `longest`.

    `lengths` (G,) is in tokens and the result (G,) is float32. This is the soft overlong punishment
    of DAPO (arXiv 2503.14476, equation 13: `longest` 20,480 and `buffer` 4,096).
    """
    return ((lengths - (longest - buffer)) / buffer).clamp(0, 1)


def length_deviation(lengths: Tensor, target: int) -> Tensor:
    """Return |n − target| for each response of n tokens; `lengths` and the result are (G,).

    The caller subtracts α times the result from the reward (L1-Exact, arXiv 2503.04697:
    α = 0.0003). In the paper, each prompt states its own target length.
    """
    return (lengths - target).abs()


def weighted_parts(parts: Tensor, weights: Tensor, *, normalize: bool, eps: float) -> Tensor:
    """Return Σ_k w_k·r_k for each response, (G,), from `parts` (G, K) and `weights` (K,).

    With `normalize`, each part is first replaced by (r_k − mean) / (sample std + `eps`), computed
    within the group. The influence of a part then depends on its weight and not on its variance. A
    part with equal values contributes exactly 0. Combined with the advantage `batch`, this is GDPO
    (arXiv 2601.05242, equations 4 to 7).
    """
    if normalize:
        parts = group_std(parts.T, eps=eps).T
    return parts @ weights
