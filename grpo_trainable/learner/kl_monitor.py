"""KL from the policy to three other policies, measured on the round's batches.

These values are not part of any loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from grpo_trainable.algo import sequence_kl
from grpo_trainable.learner.log_probs import BatchWithLogProbs
from grpo_trainable.protocol.messages import Drift


def drift(policy: Sequence[Tensor], batches: Sequence[BatchWithLogProbs]) -> dict[str, Drift]:
    """Return the KL from the policy to three other policies, by name.

    The other policies are the frozen first policy ("reference"), the policy before the round
    ("previous") and the policy that sampled the tokens ("behaviour").

    Args:
        policy: Log-probs of the policy, (B, S) for each batch.
        batches: The batches, with log-probs of the other policies.
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
    """Return the KL (k3) from sampler to learner on tokens for which both used the same weights.

    These tokens were sampled with the weights from before the round, so only the computation
    differs. The KL is in nats, summed over a response and averaged over the responses with such
    tokens. Return None if there are no such tokens.
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
    """Return the mean KL per response in nats. A batch's weight is its number of responses."""
    total, responses = 0.0, 0
    for ours, theirs, mask in zip(policy, others, masks, strict=True):
        assert theirs is not None, "a monitored batch must have log-probs under every policy"
        count = int(mask.any(dim=1).sum())
        total += count * float(sequence_kl(ours.double(), theirs.double(), mask, estimator))
        responses += count
    return total / max(responses, 1)
