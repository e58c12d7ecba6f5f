"""Learning from a teacher on what the policy itself sampled: the reverse KL, token by token."""

from __future__ import annotations

from torch import Tensor

from grpo_trainable.algo.kl import k1


def teacher_advantages(
    behaviour_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor
) -> Tensor:
    """log π_T − log b of each token, (B, S), in nats; 0 off the mask, where both may hold anything.

    π_T is the teacher and b the policy that sampled. As the advantages of a policy gradient they
    lower KL(π ‖ π_T) of the next token in the contexts that were sampled; each token answers for
    itself alone, a discount of 0. On-policy distillation, Lu and Thinking Machines
    Lab 2025, https://thinkingmachines.ai/blog/on-policy-distillation/; the reverse KL on the
    student's own samples is also the case λ = 1 of GKD (arXiv 2306.13649).
    """
    return k1(teacher_log_probs, behaviour_log_probs, mask)
