"""What becomes of the reward of a response before rewards become advantages.

Shapes: G responses of up to R tokens. The rewards themselves are never changed.
"""

from __future__ import annotations

from torch import Tensor

from grpo_trainable.algo.advantages import group_std
from grpo_trainable.algo.kl import k1


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Σ_t log π − log π_ref of each response in nats, (G,), of either sign; all tensors are (G, R).

    π is the policy that sampled, so its mean is the KL to the reference, and r − β times it the
    reward of RLHF (Ziegler et al. 2019, arXiv 1909.08593). It counts for the response
    as a whole, as in RLOO (arXiv 2402.14740); REINFORCE++ (arXiv 2501.03262) lets each token answer
    for what follows it alone.
    """
    return k1(log_probs, ref_log_probs, mask).sum(dim=-1)


def overlong_penalty(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """0 for a response of up to `longest` − `buffer` tokens, then growing with each token to 1 for
    one of `longest`; `lengths` (G,) in tokens, the result (G,) float32.

    The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13: 20,480 and 4,096).
    """
    return ((lengths - (longest - buffer)) / buffer).clamp(0, 1)


def length_deviation(lengths: Tensor, target: int) -> Tensor:
    """|n − target| of a response with n tokens; `lengths` and the result (G,).

    α times it is taken off the reward (L1-Exact, arXiv 2503.04697: α 0.0003). There the
    prompt names the target, another one in each.
    """
    return (lengths - target).abs()


def weighted_parts(parts: Tensor, weights: Tensor, *, normalize: bool, eps: float) -> Tensor:
    """Σ_k w_k·r_k of each response of a group, (G,); `parts` (G, K), `weights` (K,).

    With `normalize` each part is (r_k − mean) / (sample std + `eps`) of the group before it is
    weighted, so that a part counts by its weight and not by how much it varies; equal values give
    exactly 0. With the advantage `batch` over it that is GDPO (arXiv 2601.05242, equations 4
    to 7).
    """
    if normalize:
        parts = group_std(parts.T, eps=eps).T
    return parts @ weights
