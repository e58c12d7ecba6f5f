"""The objective of a gradient step, against the papers' formulas written out token by token."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_trainable.algo import (
    AGGREGATIONS,
    IMPORTANCE_LEVELS,
    KL_ESTIMATORS,
    LOSSES,
    compute_objective,
    loss_denominator,
)

pytestmark = pytest.mark.numerics

CLIP_LOW, CLIP_HIGH, CAP, BETA, MAX_TOKENS = 0.2, 0.28, 1.1, 0.3, 7


@dataclass(frozen=True)
class Batch:
    """Log-probs of four policies, advantages and a mask, all (B, S). Only the mask is not float64.

    The mask has holes and an empty row.
    """

    policy: Tensor
    old: Tensor
    behaviour: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.policy, self.old, self.behaviour, self.reference, self.advantages, self.mask
        )  # fmt: skip


def batch_of(rows: int = 5, length: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(0)

    def moved(log_probs: Tensor) -> Tensor:
        step = torch.randn(rows, length, generator=generator, dtype=torch.float64)
        return log_probs + 0.3 * step

    behaviour = moved(torch.full((rows, length), -2.0, dtype=torch.float64))
    old = moved(behaviour)
    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[0] = False
    advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    return Batch(
        policy=moved(old),
        old=old,
        behaviour=behaviour,
        reference=moved(behaviour),
        advantages=advantages.expand(rows, length),
        mask=mask,
    )


BATCH = batch_of()


@dataclass(frozen=True)
class Settings:
    loss: str
    aggregation: str
    kl_estimator: str | None
    capped: bool


# test_loss_family.py covers the other losses.
KINDS = ("no_baseline", "reinforce_with_baseline", "grpo_clip", "dapo", "cispo", "gspo")

EVERY = [
    Settings(*values)
    for values in itertools.product(
        KINDS, AGGREGATIONS, [None, *KL_ESTIMATORS], [False, True]
    )
]  # fmt: skip


def of_kind(kind: str) -> list[Settings]:
    return [settings for settings in EVERY if settings.loss == kind]


# ---- The formulas in plain arithmetic ----------------------------------------------------------


def loss_and_slope(kind: str, log_prob: float, ratio: float, a: float) -> tuple[float, float, bool]:
    """Return ℓ of a token, its slope, and whether the token is clipped.

    The slope is dℓ / d log ratio, or dℓ / d log π for a loss without a ratio.
    """
    if kind in ("no_baseline", "reinforce_with_baseline"):
        return -a * log_prob, -a, False
    if kind == "cispo":
        weight = min(ratio, 1 + CLIP_HIGH)
        return -weight * a * log_prob, -weight * a, ratio > 1 + CLIP_HIGH
    inside = min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH)
    if inside * a < ratio * a:
        return -inside * a, 0.0, True
    return -ratio * a, -ratio * a, False


def kl_and_slope(estimator: str, d: float) -> tuple[float, float]:
    """Return a token's KL estimate and its derivative, with respect to d = log π_θ − log π_ref."""
    if estimator == "k1":
        return d, 1.0
    if estimator == "k2":
        return d**2 / 2, d
    return math.exp(-d) - 1 + d, 1 - math.exp(-d)


def by_hand(batch: Batch, settings: Settings) -> tuple[float, list[list[float]], list[list[bool]]]:
    """Return J, its gradient with respect to the log-probs, and a mask of the clipped tokens."""
    rows, length = batch.mask.shape
    old = batch.old if settings.capped else batch.behaviour
    total = 0.0
    gradient = [[0.0] * length for _ in range(rows)]
    was_clipped = [[False] * length for _ in range(rows)]
    for b in range(rows):
        tokens = [t for t in range(length) if batch.mask[b, t]]
        share = {
            "sequence_mean": 1 / (max(len(tokens), 1) * rows),
            "token_mean": 1 / int(batch.mask.sum()),
            "constant": 1 / (rows * MAX_TOKENS),
        }[settings.aggregation]
        log_ratios = {t: float(batch.policy[b, t] - old[b, t]) for t in tokens}
        for t in tokens:
            log_ratio = log_ratios[t]
            if settings.loss == "gspo":
                log_ratio = sum(log_ratios.values()) / len(tokens)
            loss, slope, was_clipped[b][t] = loss_and_slope(
                settings.loss,
                float(batch.policy[b, t]),
                math.exp(log_ratio),
                float(batch.advantages[b, t]),
            )
            stale = math.exp(float(batch.old[b, t] - batch.behaviour[b, t]))
            weight = min(stale, CAP) if settings.capped else 1.0
            total += share * weight * loss
            if settings.loss == "gspo":
                # The sequence ratio depends on each of its tokens.
                for other in tokens:
                    gradient[b][other] += share * weight * slope / len(tokens)
            else:
                gradient[b][t] += share * weight * slope
            if settings.kl_estimator is not None:
                d = float(batch.policy[b, t] - batch.reference[b, t])
                kl, kl_slope = kl_and_slope(settings.kl_estimator, d)
                total += share * BETA * kl
                gradient[b][t] += share * BETA * kl_slope
    return total, gradient, was_clipped


# ---- The objective -----------------------------------------------------------------------------


def configured(settings: Settings) -> Any:
    mask = BATCH.mask
    return partial(
        compute_objective,
        loss=LOSSES[settings.loss],
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        importance_cap=CAP if settings.capped else None,
        kl_coef=0.0 if settings.kl_estimator is None else BETA,
        kl_estimator=settings.kl_estimator or "k3",
        aggregation=settings.aggregation,
        denominator=loss_denominator(settings.aggregation, mask, MAX_TOKENS),
    )


def arguments(batch: Batch, settings: Settings) -> tuple[Tensor, ...]:
    policy, old, behaviour, *rest = batch.tensors()
    return policy, old if settings.capped else behaviour, behaviour, *rest


@pytest.mark.parametrize("kind", KINDS)
def test_objective_gradient_and_clipped_tokens_are_those_of_the_formulas(kind):
    for settings in of_kind(kind):
        policy, *others = arguments(BATCH, settings)
        policy = policy.clone().requires_grad_()
        value, clipped = configured(settings)(policy, *others)
        value.backward()
        expected, gradient, was_clipped = by_hand(BATCH, settings)
        assert value.item() == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(
            policy.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-12, atol=1e-14
        )
        assert clipped.tolist() == was_clipped


@pytest.mark.slow
def test_the_batch_of_these_tests_tells_the_formulas_apart():
    values = [by_hand(BATCH, settings)[0] for settings in EVERY]
    # REINFORCE has two names, and DAPO and GRPO share a formula. All other values must differ.
    assert len({round(value, 9) for value in values}) == len(EVERY) * 4 // 6
    clips = by_hand(BATCH, Settings("grpo_clip", "token_mean", None, False))[2]
    assert 0 < sum(map(sum, clips)) < BATCH.mask.sum()


@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_the_microbatches_add_up_to_the_objective_of_the_step(kind):
    for settings in of_kind(kind):
        tensors = arguments(BATCH, settings)
        whole, clipped = configured(settings)(*tensors)
        parts = zip(*(tensor.split([1, 3, 1]) for tensor in tensors), strict=True)
        shares, clips = zip(*(configured(settings)(*part) for part in parts), strict=True)
        assert sum(shares).item() == pytest.approx(whole.item(), rel=1e-12)
        assert torch.equal(torch.cat(clips), clipped)


@pytest.mark.parametrize("garbage", [7.0, math.inf, -math.inf, math.nan])
def test_nothing_off_the_mask_reaches_the_objective_or_its_gradient(garbage):
    def run(settings, fill):
        *tensors, mask = (t.clone() for t in arguments(BATCH, settings))
        policy, *others = (tensor.masked_fill(~mask, fill) for tensor in tensors)
        policy.requires_grad_()
        value, clipped = configured(settings)(policy, *others, mask)
        value.backward()
        return value.detach(), policy.grad, clipped

    for settings in EVERY[::5]:
        for clean, dirty in zip(run(settings, -1.0), run(settings, garbage), strict=True):
            assert torch.equal(clean, dirty)


def test_a_kl_without_the_reference_is_refused():
    settings = Settings("grpo_clip", "token_mean", "k3", False)
    policy, old, behaviour, _, *rest = arguments(BATCH, settings)
    with pytest.raises(AssertionError, match="reference"):
        configured(settings)(policy, old, behaviour, None, *rest)


# ---- Dual clip, levels and rules of importance weights, by autograd ----------------------------

DUAL_CLIP, FLOOR = 1.15, 0.9


def written_out(policy: Tensor, level: str, rule: str, floor: float | None) -> Tensor:
    """Return the token mean of w·ℓ, where ℓ is the clipped loss, at most c·|A| for A < 0."""
    a, mask = BATCH.advantages, BATCH.mask.double()
    log_weight = (BATCH.old - BATCH.behaviour) * mask
    if level == "sequence":
        log_weight = log_weight.sum(dim=1, keepdim=True).expand(mask.shape)
    weight = log_weight.exp()
    if rule == "truncate":
        weight = weight.clamp(max=CAP)
    else:
        weight = weight * ((weight <= CAP) & (weight >= (floor or 0.0)))
    ratio = (policy - BATCH.old).exp()
    loss = torch.maximum(-ratio * a, -ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * a)
    loss = torch.where(a < 0, torch.minimum(loss, -DUAL_CLIP * a), loss)
    return (weight * loss * mask).sum() / mask.sum()


@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
@pytest.mark.parametrize(
    ("rule", "floor"), [("truncate", None), ("mask", None), ("mask", FLOOR)]
)  # fmt: skip
def test_dual_clip_under_every_importance_weight_is_the_formula_written_out(level, rule, floor):
    results = []
    for as_formula in (True, False):
        policy = BATCH.policy.clone().requires_grad_()
        if as_formula:
            value = written_out(policy, level, rule, floor)
        else:
            value, _ = compute_objective(
                policy, *BATCH.tensors()[1:],
                loss=partial(LOSSES["grpo_clip"], dual_clip=DUAL_CLIP),
                clip_low=CLIP_LOW, clip_high=CLIP_HIGH, importance_cap=CAP, importance_rule=rule,
                importance_level=level, importance_floor=floor, kl_coef=0.0, kl_estimator="k3",
                aggregation="token_mean",
                denominator=loss_denominator("token_mean", BATCH.mask, MAX_TOKENS),
            )  # fmt: skip
        value.backward()
        results.append((value.detach(), policy.grad))
    (expected, slope), (got, gradient) = results
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-12)
    ratio = (BATCH.policy - BATCH.old).exp()
    # the dual clip affects at least one token
    assert ((ratio > DUAL_CLIP) & (BATCH.advantages < 0) & BATCH.mask).any()
