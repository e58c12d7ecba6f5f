"""KL from the policy to three others, and the reference's NLL, measured on a round's responses.

These values are not part of any loss, and they need additional passes without gradients. To keep
these passes cheap, the values are estimated from a sample: the *watched* responses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.algo import response_kl
from grpo_trainable.learner.log_probs import BatchWithLogProbs
from grpo_trainable.protocol.messages import Drift
from grpo_trainable.protocol.rollout import TrainBatch, stack_rows

MONITOR = 4  # last number of the seed with which the watched responses are drawn

# ---- The sample ----------------------------------------------------------------------------------


def draw(sizes: Sequence[int], responses: int, rng: np.random.Generator) -> np.ndarray:
    """Draw responses without replacement, and return their mask, bool (N,).

    This is a systematic sample: the groups and the responses of each group are put in random order,
    and evenly spaced responses are drawn. Each response is equally likely to be drawn. The
    groups are strata: if they have equal sizes, their numbers of drawn responses differ by at most
    one. In that case, a group has two drawn responses only if every group has at least one.

    Args:
        sizes: Number of responses in each group; the numbers add up to N.
        responses: Number of responses to draw, at most N.
        rng: Random number generator.
    """
    firsts = np.cumsum([0, *sizes])
    order = [firsts[g] + rng.permutation(sizes[g]) for g in rng.permutation(len(sizes))]
    mask = np.zeros(firsts[-1], dtype=bool)
    # Only integers are used, because rounding would change the odds. If N / `responses` is not an
    # integer, the distances between drawn places alternate between two integers.
    places = (rng.integers(len(mask)) + np.arange(responses) * len(mask)) // responses
    mask[np.concatenate(order)[places]] = True
    return mask


def watched_rows(
    batches: Sequence[TrainBatch],
    sizes: Sequence[int],
    responses: int | None,
    *,
    seed: int,
    round_: int,
) -> list[Tensor | None]:
    """For each batch, return a mask (B,) of the watched rows, or None if all rows are watched.

    Args:
        batches: The round's batches.
        sizes: Number of rows in each group, for the groups of all batches in order.
        responses: Number of rows to watch in all batches together. None: all rows.
        seed: Seed of the trial.
        round_: Number of rounds before this one.
    """
    if responses is None or responses >= sum(sizes):
        return [None] * len(batches)
    rng = np.random.default_rng((seed, round_, 0, 0, MONITOR))
    masks = torch.from_numpy(draw(sizes, responses, rng)).split([b.num_rows for b in batches])
    return [own.to(b.response_mask.device) for own, b in zip(masks, batches, strict=True)]


def on_watched_rows(
    log_probs: Callable[[TrainBatch], Tensor],
    batches: Sequence[TrainBatch],
    watched: Sequence[Tensor | None],
) -> list[Tensor]:
    """Return log-probs (B, S) for each batch, 0 in rows that are not watched.

    The watched rows of all batches share one pass.

    Args:
        log_probs: Computes log-probs (B, S) of a batch.
        batches: The round's batches.
        watched: The result of `watched_rows`.
    """
    if any(mask is None for mask in watched):
        return [log_probs(batch) for batch in batches]
    rows = [mask.nonzero().flatten() for mask in watched if mask is not None]
    parts = [batch.select(own) for batch, own in zip(batches, rows, strict=True)]
    of_parts = log_probs(stack_rows(parts)).split([len(own) for own in rows])
    found = []
    for batch, own, part, values in zip(batches, rows, parts, of_parts, strict=True):
        width = part.response_mask.shape[1]
        filled = torch.zeros_like(batch.behaviour_log_probs)
        filled[own, :width] = values[:, :width]
        found.append(filled)
    return found


class Estimate(NamedTuple):
    """A figure for all responses of a round, estimated from a sample: the watched responses."""

    value: float
    # Standard error of `value` as an estimate for all responses. 0 if all responses are watched.
    se: float


def estimate(watched: Tensor, responses: int, divisor: float, known: float = 0.0) -> Estimate:
    """Estimate (`known` + the sum of a quantity over all responses) / `divisor`, without bias.

    Each response is equally likely to be watched. So the sum over all N responses is estimated as N
    times the mean y̅ of the n watched responses. The standard error is
    N √((1 − n/N) s²/n) / `divisor`, where s² is the sample variance. This formula is the one for
    simple random sampling, and ignores the strata (Cochran 1977, Sampling Techniques, equation
    2.20). One watched response per group is not enough to estimate the variance within groups. The
    standard error is too large if responses to one prompt are more alike than responses to
    different prompts.

    Args:
        watched: The quantity of each watched response, (n,).
        responses: N, the number of all responses.
        divisor: A number that is known without the sample, such as the number of all tokens.
        known: A part of the sum that is known without the sample.
    """
    n = len(watched)
    value = (known + responses * float(watched.mean())) / divisor
    if n == responses:
        return Estimate(value, 0.0)
    deviation = float(watched.std()) if n > 1 else math.nan
    return Estimate(value, responses / divisor * math.sqrt((1 - n / responses) / n) * deviation)


# ---- The figures ---------------------------------------------------------------------------------


def drift(policy: Sequence[Tensor], batches: Sequence[BatchWithLogProbs]) -> dict[str, Drift]:
    """Return, by name, the KL from the policy to each of three other policies.

    The other policies are the frozen reference policy ("reference"), the policy before the round
    ("previous") and the policy that sampled the tokens ("behaviour").

    Args:
        policy: Log-probs of the policy, (B, S) for each batch, valid in the watched rows.
        batches: The batches, with log-probs of the other policies.
    """
    watched = [batch.watched for batch in batches]
    return {
        name: _drift(policy, log_probs, batches, watched)
        for name, log_probs in _others(batches).items()
    }


def drift_before_step(seen: Tensor, batch: BatchWithLogProbs) -> dict[str, Drift]:
    """Return the KL from the policy before a gradient step to the three policies of `drift`.

    The step itself computes the log-probs of the policy. The log-probs of "behaviour" are already
    known, so the KL to "behaviour" is measured on all rows. The KL to the other two policies is
    measured only on the watched rows (the sample). If the step has no watched rows, the KL to these
    two policies is missing.

    Args:
        seen: Log-probs of the policy, (B, S).
        batch: The rows of the step.
    """
    others = _others([batch])
    every = {"behaviour": _drift([seen], others.pop("behaviour"), [batch], [None])}
    if batch.watched is not None and not batch.watched.any():
        return every
    return {n: _drift([seen], o, [batch], [batch.watched]) for n, o in others.items()} | every


def reference_nll(batches: Sequence[BatchWithLogProbs]) -> Estimate | None:
    """Return the reference's mean NLL per response token in nats, or None without a reference.

    This is a difference estimator. The sampler's log-probs are known for all responses. So only the
    difference between sampler and reference is estimated, and it varies far less than the NLL.
    """
    known, tokens, differences, rows = 0.0, 0, [], 0
    for batch in batches:
        if batch.reference is None:
            return None
        behaviour = batch.train_batch.behaviour_log_probs.double().sum(dim=1)
        reference = batch.reference.double().sum(dim=1)
        differences.append(_rows(behaviour - reference, batch.watched))
        known -= float(behaviour.sum())
        tokens += int(batch.train_batch.response_mask.sum())
        rows += len(behaviour)
    return estimate(torch.cat(differences), rows, tokens, known)


def sampler_mismatch(batches: Sequence[BatchWithLogProbs]) -> float | None:
    """Return the KL (k3) from sampler to learner on tokens for which both used the same weights.

    These tokens were sampled with the weights from before the round, so only the computation
    differs. The KL is in nats, summed over a response and averaged over the responses that
    contain such tokens. Return None if there are no such tokens.
    """
    own = [batch.own_tokens for batch in batches]
    if not any(bool(mask.any()) for mask in own):
        return None
    sampler = [batch.train_batch.behaviour_log_probs for batch in batches]
    starts = [batch.start for batch in batches]
    return _kl(sampler, starts, own, [None] * len(batches), "k3").value


def _others(batches: Sequence[BatchWithLogProbs]) -> dict[str, list[Tensor | None]]:
    return {
        "reference": [batch.reference for batch in batches],
        "previous": [batch.start for batch in batches],
        "behaviour": [batch.train_batch.behaviour_log_probs for batch in batches],
    }


def _drift(
    policy: Sequence[Tensor],
    others: Sequence[Tensor | None],
    batches: Sequence[BatchWithLogProbs],
    watched: Sequence[Tensor | None],
) -> Drift:
    masks = [batch.train_batch.response_mask for batch in batches]
    k1, k3 = (_kl(policy, others, masks, watched, estimator) for estimator in ("k1", "k3"))
    return Drift(k1=k1.value, k3=k3.value, k1_se=k1.se, k3_se=k3.se)


def _kl(
    policy: Sequence[Tensor],
    others: Sequence[Tensor | None],
    masks: Sequence[Tensor],
    watched: Sequence[Tensor | None],
    estimator: str,
) -> Estimate:
    """Estimate, from the watched rows, the mean KL of all non-empty responses, in nats."""
    rows, nonempty = [], 0
    for ours, theirs, mask, own in zip(policy, others, masks, watched, strict=True):
        assert theirs is not None, "a monitored batch must have log-probs under every policy"
        rows.append(_rows(response_kl(ours.double(), theirs.double(), mask, estimator), own))
        nonempty += int(mask.any(dim=1).sum())
    return estimate(torch.cat(rows), sum(map(len, masks)), max(nonempty, 1))


def _rows(values: Tensor, watched: Tensor | None) -> Tensor:
    return values if watched is None else values[watched]
