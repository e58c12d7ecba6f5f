"""KL from the policy to three others, measured on what a round trains on; none of it is trained."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from grpo_trainable.algo import sequence_kl
from grpo_trainable.learner.log_probs import ScoredBatch
from grpo_trainable.protocol.messages import Drift


class KLMonitor:
    """Measures the KL of one round, before each of its gradient steps and after the last.

    The others are the frozen first policy ("reference"), the policy before the round ("previous")
    and the one that sampled ("behaviour").
    """

    def __init__(self, batches: Sequence[ScoredBatch]) -> None:
        """`batches`: those of the round, which may be completed until a step has gone through
        them."""
        self._batches = batches

    def before_step(self, b: int, rows: Tensor, policy: Tensor) -> dict[str, Drift]:
        """KL on the rows of batch `b` that a gradient step trains on; `policy` holds the log-probs
        that the step computed for them, (rows, S)."""
        return _drift([policy], [self._batches[b].rows(rows)])

    def after_round(self, policy: Sequence[Tensor]) -> dict[str, Drift]:
        """KL on all batches; `policy` holds the log-probs after the last step, (B, S) for each."""
        return _drift(policy, self._batches)

    def sampler_mismatch(self) -> float | None:
        """KL from the sampler to the learner, k3, on tokens that the weights before the round have
        sampled, so that nothing but their computation differs; None where there are none.

        In nats: sums over a response, means over the responses with such tokens.
        """
        fresh = [batch.fresh for batch in self._batches]
        if not any(bool(mask.any()) for mask in fresh):
            return None
        sampler = [batch.batch.behaviour_log_probs for batch in self._batches]
        return _mean_kl(sampler, [batch.start for batch in self._batches], fresh, "k3")


def _drift(policy: Sequence[Tensor], batches: Sequence[ScoredBatch]) -> dict[str, Drift]:
    """KL to each of the others; `policy` holds its log-probs, (B, S) for each batch."""
    masks = [batch.batch.response_mask for batch in batches]
    others = {
        "reference": [batch.reference for batch in batches],
        "previous": [batch.start for batch in batches],
        "behaviour": [batch.batch.behaviour_log_probs for batch in batches],
    }
    return {
        name: Drift(
            k1=_mean_kl(policy, log_probs, masks, "k1"), k3=_mean_kl(policy, log_probs, masks, "k3")
        )
        for name, log_probs in others.items()
    }


def _mean_kl(
    policy: Sequence[Tensor],
    others: Sequence[Tensor | None],
    masks: Sequence[Tensor],
    estimator: str,
) -> float:
    """Nats of a response; every batch counts by its responses."""
    total, responses = 0.0, 0
    for ours, theirs, mask in zip(policy, others, masks, strict=True):
        assert theirs is not None, "a monitored batch has been scored under every policy"
        count = int(mask.any(dim=1).sum())
        total += count * float(sequence_kl(ours.double(), theirs.double(), mask, estimator))
        responses += count
    return total / max(responses, 1)
