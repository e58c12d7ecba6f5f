"""β, the weight of the KL to the reference, which may be steered from round to round."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_trainable.algo import sequence_kl, steered_coefficient
from grpo_trainable.config import LossSettings
from grpo_trainable.learner.log_probs import ScoredBatch


class KLCoefficient:
    """β as it is in this round. With `loss.kl_target` it is a state, and kept in checkpoints."""

    def __init__(self, settings: LossSettings) -> None:
        self._settings = settings
        self.value = settings.kl_coef

    @property
    def is_steered(self) -> bool:
        return self._settings.kl_target is not None

    @property
    def in_loss(self) -> float:
        """The weight of the KL in the loss."""
        return self.value if self._settings.kl_in == "loss" else 0.0

    @property
    def in_reward(self) -> float:
        """The weight of the KL in the reward."""
        return self.value if self._settings.kl_in == "reward" else 0.0

    def after_round(self, batches: Sequence[ScoredBatch]) -> None:
        """Steers β by the KL of the policy that sampled what the round trained on."""
        target = self._settings.kl_target
        if target is not None:
            kl = _sampled_kl(batches)
            self.value = steered_coefficient(self.value, kl, target, self._settings.kl_gain)

    def counters(self) -> dict[str, float]:
        return {"kl_coef": self.value} if self.is_steered else {}

    def load_counters(self, counters: dict[str, float]) -> None:
        """Goes on from a state; where that did not steer β, it begins with the setting."""
        if self.is_steered:
            self.value = counters.get("kl_coef", self.value)


def _sampled_kl(batches: Sequence[ScoredBatch]) -> float:
    """Nats of a response, from the policy that sampled it to the reference."""
    total, responses = 0.0, 0
    for scored in batches:
        assert scored.reference is not None, "the KL needs the reference's log-probs"
        mask, behaviour = scored.batch.response_mask, scored.batch.behaviour_log_probs
        count = int(mask.any(dim=1).sum())
        kl = sequence_kl(behaviour.double(), scored.reference.double(), mask, "k1")
        total, responses = total + count * float(kl), responses + count
    return total / max(responses, 1)
