"""KL from the policy to three others, measured on what a round trains on; none of it is trained."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from grpo_trainable.algo import sequence_kl
from grpo_trainable.learner.log_probs import BatchWithLogProbs
from grpo_trainable.protocol.messages import Drift


def drift(policy: Sequence[Tensor], batches: Sequence[BatchWithLogProbs]) -> dict[str, Drift]:
    """KL from the policy to the frozen first policy ("reference"), to the policy before the round
    ("previous") and to the one that sampled ("behaviour").

    `policy` holds its log-probs, (B, S) for each batch.
    """
    masks = [batch.train_batch.response_mask for batch in batches]
    others = {
        "reference": [batch.reference for batch in batches],
        "previous": [batch.start for batch in batches],
        "behaviour": [batch.train_batch.behaviour_log_probs for batch in batches],
    }
    return {
        name: Drift(
            k1=_mean_kl(policy, log_probs, masks, "k1"), k3=_mean_kl(policy, log_probs, masks, "k3")
        )
        for name, log_probs in others.items()
    }


def sampler_mismatch(batches: Sequence[BatchWithLogProbs]) -> float | None:
    """KL from the sampler to the learner, k3, on tokens that the weights before the round have
    sampled, so that nothing but their computation differs; None where there are none.

    In nats: sums over a response, means over the responses with such tokens.
    """
    own = [batch.own_tokens for batch in batches]
    if not any(bool(mask.any()) for mask in own):
        return None
    sampler = [batch.train_batch.behaviour_log_probs for batch in batches]
    return _mean_kl(sampler, [batch.start for batch in batches], own, "k3")


def _mean_kl(
    policy: Sequence[Tensor],
    others: Sequence[Tensor | None],
    masks: Sequence[Tensor],
    estimator: str,
) -> float:
    """Nats of a response; every batch counts by its responses."""
    total, responses = 0.0, 0
    for ours, theirs, mask in zip(policy, others, masks, strict=True):
        assert theirs is not None, "a monitored batch has log-probs under every policy"
        count = int(mask.any(dim=1).sum())
        total += count * float(sequence_kl(ours.double(), theirs.double(), mask, estimator))
        responses += count
    return total / max(responses, 1)
