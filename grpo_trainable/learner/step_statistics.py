"""What a gradient step saw, summed over its microbatches."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.algo import bounded_tokens, masked_sum, token_ratio
from grpo_trainable.learner.optimizer import StepTaken
from grpo_trainable.learner.ranks import Ranks
from grpo_trainable.protocol.messages import GradientStep
from grpo_trainable.telemetry.metrics import RATIO_EDGES


class StepStatistics:
    """Sums of one gradient step, which become its `GradientStep`."""

    def __init__(self) -> None:
        self.loss = 0.0
        self._entropy = 0.0
        self._tokens = self._clipped = self._bounded = self._weights_bounded = 0
        self._ratio_max: list[Tensor] = []
        self._ratio_counts = np.zeros(len(RATIO_EDGES) - 1, dtype=np.int64)

    @torch.no_grad()
    def add(
        self,
        loss: Tensor,
        clipped: Tensor,
        entropy: Tensor,
        log_probs: Tensor,
        old_log_probs: Tensor,
        mask: Tensor,
        weights_bounded: Tensor | None,
    ) -> None:
        """Adds a microbatch: `loss` is its share of the step's, all others are (B, S).

        `weights_bounded`: the tokens whose importance weight was bounded; None without weights.
        """
        self.loss += float(loss)
        self._entropy += float(masked_sum(entropy, mask))
        self._tokens += int(mask.sum())
        self._clipped += int((clipped & mask).sum())
        self._bounded += int(bounded_tokens(log_probs, old_log_probs, mask).sum())
        if weights_bounded is not None:
            self._weights_bounded += int(weights_bounded.sum())
        ratio = token_ratio(log_probs, old_log_probs, mask)
        self._ratio_max.append(ratio.max())
        self._ratio_counts += _count_ratios(ratio[mask])

    def sum_over(self, ranks: Ranks) -> None:
        """Makes these the sums over all ranks."""
        largest = torch.zeros(ranks.size, dtype=torch.float64)  # one a rank; a sum keeps NaN
        if self._ratio_max:
            largest[ranks.rank] = torch.stack(self._ratio_max).max()
        own = [self.loss, self._entropy, self._tokens, self._clipped, self._bounded]
        own += [self._weights_bounded, *self._ratio_counts.tolist()]
        summed = ranks.sum_(torch.cat([torch.tensor(own, dtype=torch.float64), largest]))
        self.loss, self._entropy, *counted = summed[: len(own)].tolist()
        counts = list(map(int, counted))
        self._tokens, self._clipped, self._bounded, self._weights_bounded = counts[:4]
        self._ratio_counts = np.array(counts[4:])
        self._ratio_max = [summed[len(own) :].max()]

    def step(self, taken: StepTaken) -> GradientStep:
        """The whole step, its KL still unmeasured."""
        tokens = max(self._tokens, 1)
        return GradientStep(
            loss=self.loss,
            grad_norm=taken.grad_norm,
            entropy_nats=self._entropy / tokens,
            clip_fraction=self._clipped / tokens,
            weights_bounded_fraction=self._weights_bounded / tokens,
            ratio_max=float(torch.stack(self._ratio_max).max()),  # NaN if one is
            bounded_tokens=self._bounded,
            ratio_counts=tuple(self._ratio_counts.tolist()),
            lr=taken.lr,
            skipped=taken.skipped,
            kl={},
        )


def _count_ratios(ratio: Tensor) -> np.ndarray:
    """Finite ratios between the `RATIO_EDGES`; those beyond count in the outermost bins."""
    finite = ratio[ratio.isfinite()].cpu().numpy()
    return np.histogram(finite.clip(RATIO_EDGES[0], RATIO_EDGES[-1]), RATIO_EDGES)[0]
