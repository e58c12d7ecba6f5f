"""The losses other than GRPO's, against values computed by hand and written-out formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bound_losses import LOSSES, bound
from policies import write_quick_policy
from torch import Tensor

from grpo_trainable.algo import (
    ADVANTAGES,
    AGGREGATIONS,
    IMPORTANCE_LEVELS,
    IMPORTANCE_RULES,
    SELECTIONS,
    at_the_end,
    compute_objective,
    gae,
    importance_weight,
    loss_denominator,
    vine,
    weights_bounded,
    whitened_tokens,
)
from grpo_trainable.config import ConfigError, GRPOConfig, LossSettings
from grpo_trainable.config.loss import NEVER_CLIPS
from grpo_trainable.learner.learner import Learner
from grpo_trainable.learner.user_functions import configured_selection
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.transports.in_process import InProcess

OF_RESPONSES = ("gspo", "gmpo", "topr")  # losses with one ratio or weight per response
CLIPS = {"gmpo": (0.4, 0.4), "dppo_tv": (0.15, 0.15), "dppo_kl": (0.05, 0.05)}


def clip_of(name: str) -> dict[str, float]:
    low, high = CLIPS.get(name, (0.2, 0.28))
    return {"clip_low": low, "clip_high": high}


def selected_by(name: str, *tensors: Tensor, seed: int = 0, **settings: Any) -> Tensor:
    select = configured_selection(LossSettings(type=name, **settings))
    assert select is not None
    return select(*tensors, np.random.default_rng(seed), **clip_of(name))


def run(loss: Any, *tensors: Any, **named: Any) -> tuple[list, list, list]:
    """Return the loss, the gradient of its sum, and the clipped tokens.

    `tensors` are nested lists; the last one is the mask.
    """
    log_probs, *others, mask = (torch.tensor(t, dtype=torch.float64) for t in tensors)
    log_probs.requires_grad_()
    token_loss, clipped = loss(log_probs, *others, mask.bool(), **named)
    token_loss.sum().backward()
    assert log_probs.grad is not None
    return token_loss.tolist(), log_probs.grad.tolist(), clipped.tolist()


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def is_read(key: str, name: str) -> bool:
    try:
        GRPOConfig.from_dict({"loss": {"type": name, key: 0.123}})
    except ConfigError as error:  # ppo is always rejected here: it needs a critic
        return f"loss.{key}=0.123: has no effect" not in str(error)
    return True


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_reads_the_clip_settings_that_change_it_and_no_others(name: str):
    generator = torch.Generator().manual_seed(0)
    new, old = (-torch.rand(8, 5, generator=generator).mul(3) for _ in range(2))
    advantages = torch.randn(8, 5, generator=generator)
    tensors = [tensor.tolist() for tensor in (new, old, advantages, torch.ones(8, 5))]
    results = [
        run(bound(name), *tensors, clip_low=low, clip_high=high)
        for low, high in ((0.3, 0.3), (0.001, 0.3), (0.3, 0.001))
    ]
    assert is_read("clip", name) == (results[1] != results[0])
    assert is_read("clip_high", name) == (results[2] != results[0])


# ---- Values computed by hand -------------------------------------------------------------------


def test_sapo_of_known_ratios():
    # σ(0) = 0.5, σ(1) = 0.7310586 and σ(−0.525) = 0.3716838.
    # A = 3, τ = 1:  ρ = 1: −4 · 0.5 · 3 = −6; slope −4 · 0.25 · 1 · 3 = −3
    #                ρ = 2: −4 · 0.7310586 · 3 = −8.7727030; −4 · 0.1966119 · 2 · 3 = −4.7186863
    # A = −3, τ = 1.05:  ρ = 1: 4/1.05 · 0.5 · 3 = 5.7142857; 4 · 0.25 · 1 · 3 = 3
    #                    ρ = 0.5: 4/1.05 · 0.3716838 · 3 = 4.2478153; 4 · 0.2335350 · 0.5 · 3
    #                      = 1.4012097
    new = [logs(0.2, 0.4), logs(0.2, 0.1)]
    old = [logs(0.2, 0.2)] * 2
    loss, slope, clipped = run(
        bound("sapo"), new, old, [[3, 3], [-3, -3]], [[1, 1]] * 2, **clip_of("sapo")
    )
    assert loss == [
        pytest.approx([-6, -8.7727030], abs=1e-6),
        pytest.approx([5.7142857, 4.2478153], abs=1e-6),
    ]
    assert slope == [
        pytest.approx([-3, -4.7186863], abs=1e-6),
        pytest.approx([3, 1.4012097], abs=1e-6),
    ]
    assert clipped == [[False] * 2] * 2


def test_gmpo_clips_each_log_ratio_and_takes_the_geometric_mean():
    # The log ratios are −0.6931472 and 0.6931472. A = 3 clips the second to 0.4: the mean is
    # −0.1465736, s = 0.8636621, −3s = −2.5909862. A = −3 clips the first to −0.4: the mean is
    # 0.1465736, s = 1.1578601, 3s = 3.4735803. Both tokens have that loss. The slope is 2 · ½ times
    # that loss for an unclipped token, and 0 for a clipped token.
    new, old = [logs(0.1, 0.4)] * 2, [logs(0.2, 0.2)] * 2
    loss, slope, clipped = run(
        bound("gmpo"), new, old, [[3, 3], [-3, -3]], [[1, 1]] * 2, **clip_of("gmpo")
    )
    assert loss == [pytest.approx([-2.5909862] * 2), pytest.approx([3.4735803] * 2)]
    assert slope == [pytest.approx([-2.5909862, 0]), pytest.approx([0, 3.4735803])]
    assert clipped == [[False, True], [True, False]]


def test_topr_weighs_bad_responses_alone_by_the_ratio_of_the_response_up_to_1():
    # The sequence ratios are 2 · 0.25 = 0.5, 0.5 again, and 2 · 1 = 2.
    new = [logs(0.4, 0.05), logs(0.4, 0.05), logs(0.4, 0.2)]
    old = [logs(0.2, 0.2)] * 3
    loss, slope, clipped = run(
        bound("topr"), new, old, [[3, 3], [-3, -3], [-3, -3]], [[1, 1]] * 3, **clip_of("topr")
    )
    assert slope == [[-3, -3], pytest.approx([1.5, 1.5]), [3, 3]]
    # −w · A · log π: log 0.4 = −0.9162907, log 0.05 = −2.9957323, log 0.2 = −1.6094379.
    assert loss[0] == pytest.approx([2.7488722, 8.9871968])
    assert loss[1] == pytest.approx([-1.3744361, -4.4935984])
    assert loss[2] == pytest.approx([-2.7488722, -4.8283137])
    assert clipped == [[False] * 2, [False] * 2, [True] * 2]


MOVED = [logs(0.6, 0.3, 0.1), logs(0.5, 0.1, 0.05)]
UNMOVED = [logs(0.5, 0.1, 0.05), logs(0.6, 0.3, 0.1)]


def test_dppo_tv_stops_a_token_whose_probability_moved_by_more_than_its_range():
    # In the first row, probabilities rise by 0.1, 0.2 and 0.05 (ratios 1.2, 3 and 2). In the second
    # row, they fall by the same amounts.
    loss, slope, clipped = run(
        bound("dppo_tv"), MOVED, UNMOVED, [[3] * 3, [-3] * 3], [[1] * 3] * 2, **clip_of("dppo_tv")
    )
    # ρ|A|: 1.2 · 3 = 3.6, 2 · 3 = 6; 3 · 0.5/0.6 = 2.5, 3 · 0.05/0.1 = 1.5.
    assert loss == [pytest.approx([-3.6, 0, -6]), pytest.approx([2.5, 0, 1.5])]
    assert slope == loss
    assert clipped == [[False, True, False]] * 2
    # When A pulls back towards the old policy, every token keeps its loss: 3 · 3 = 9.
    pulled, _, clipped = run(
        bound("dppo_tv"), MOVED, UNMOVED, [[-3] * 3, [3] * 3], [[1] * 3] * 2, **clip_of("dppo_tv")
    )
    assert pulled[0] == pytest.approx([3.6, 9, 6])
    assert clipped == [[False] * 3] * 2


def test_dppo_kl_stops_a_token_whose_binary_kl_is_above_its_range():
    # Binary KL, old to new:
    # 0.5 → 0.6:  0.5 ln(5/6) + 0.5 ln(5/4) = −0.0911608 + 0.1115718 = 0.0204110
    # 0.1 → 0.3:  0.1 ln(1/3) + 0.9 ln(9/7) = −0.1098612 + 0.2261830 = 0.1163218 > 0.05
    # 0.05 → 0.1: 0.05 ln(1/2) + 0.95 ln(0.95/0.9) = −0.0346574 + 0.0513639 = 0.0167065
    # 0.6 → 0.5: 0.6 · 0.1823216 + 0.4 · −0.2231436 = 0.0201355; 0.3 → 0.1: 0.3 · 1.0986123 +
    # 0.7 · −0.2513144 = 0.1536636 > 0.05; 0.1 → 0.05: 0.1 · 0.6931472 − 0.9 · 0.0540672 = 0.0206542
    def clipped(high: float, low: float) -> list:
        named = {"clip_high": high, "clip_low": low}
        tensors = (MOVED, UNMOVED, [[3] * 3, [-3] * 3], [[1] * 3] * 2)
        return run(bound("dppo_kl"), *tensors, **named)[2]

    assert clipped(0.05, 0.05) == [[False, True, False]] * 2
    assert clipped(0.1163, 0.1536) == [[False, True, False]] * 2
    assert clipped(0.1164, 0.1537) == [[False] * 3] * 2
    assert clipped(0.0204, 0.0201) == [[True, True, False], [True, True, True]]
    assert clipped(0.0167, 0.0207)[0] == [True, True, True]


def test_m2po_drops_the_outliers_that_push_the_second_moment_over_its_bound():
    # First row (A > 0): the log ratios 0.1, 0.2 and 0.4 are in the direction of A, and −0.5 is
    # against it. The squares of the first three are 0.01, 0.04 and 0.16, and their running means,
    # smallest first, are 0.01, 0.025 and 0.07. Second row (A < 0): 0.3 is against A.
    log_ratios = torch.tensor([[0.1, 0.2, 0.4, -0.5], [0.3, 0.0, 0.0, 0.0]])
    old, mask = torch.full((2, 4), -1.0), torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    advantages = torch.tensor([[3.0] * 4, [-3.0] * 4])
    tensors = (old + log_ratios, old, advantages, mask)
    outliers = selected_by("m2po", *tensors)
    assert outliers.tolist() == [[False, False, True, False], [False] * 4]
    assert not selected_by("m2po", *tensors, second_moment=0.0701).any()
    all_moved = selected_by("m2po", *tensors, second_moment=0.0)
    assert all_moved.tolist() == [[True, True, True, False], [False] * 4]
    loss, clipped = LOSSES["m2po"](*tensors, selected=outliers, **clip_of("m2po"))
    # ρ|A| of the tokens that are not outliers: e^0.1 · 3 = 3.3155, e^0.2 · 3 = 3.6642,
    # e^−0.5 · 3 = 1.8196, e^0.3 · 3 = 4.0496.
    assert loss[0].tolist() == pytest.approx([-3.3155, -3.6642, 0, -1.8196], abs=1e-4)
    assert loss[1].tolist() == pytest.approx([4.0496, 0, 0, 0], abs=1e-4)
    assert torch.equal(clipped, outliers)


# The means of log π and A are −2 and 1. So the products (log π + 2)(A − 1) are 2 · 2 = 4,
# 1 · 2 = 2, −1 · −2 = 2 and −2 · −2 = 4.
COV = (
    torch.tensor([[0.0, -1.0, -3.0, -4.0, 9.0]]),
    torch.tensor([[0.0, -1.0, -3.0, -4.0, 9.0]]),
    torch.tensor([[3.0, 3.0, -1.0, -1.0, 9.0]]),
    torch.tensor([[True, True, True, True, False]]),
)


def test_clip_cov_draws_its_share_of_the_tokens_within_the_band():
    def drawn(fraction: float, band: tuple[float, float], seed: int = 0) -> list:
        return selected_by("clip_cov", *COV, seed=seed, cov_fraction=fraction, cov_band=band)[0]

    assert drawn(1.0, (1, 5)).tolist() == [True] * 4 + [False]
    assert drawn(1.0, (3, 5)).tolist() == [True, False, False, True, False]
    assert drawn(1.0, (5, 9)).tolist() == [False] * 5
    assert drawn(0.5, (1, 5)).sum() == 2
    assert drawn(1e-9, (1, 5)).sum() == 1  # at least one token is drawn
    assert drawn(0.5, (1, 5)).equal(drawn(0.5, (1, 5)))
    assert len({tuple(drawn(0.5, (1, 5), seed).tolist()) for seed in range(8)}) > 1


def test_clip_cov_leaves_clipped_tokens_alone_and_stops_the_drawn_ones():
    log_probs, old, advantages, mask = COV
    old = old.clone()
    old[0, 0] -= 1  # clipped anyway: the ratio is 2.7 and A > 0
    tensors = (log_probs, old, advantages, mask)
    drawn = selected_by("clip_cov", *tensors, cov_fraction=1.0)
    assert drawn[0].tolist() == [False, True, True, True, False]
    loss, clipped = LOSSES["clip_cov"](*tensors, selected=drawn, **clip_of("clip_cov"))
    assert loss[0].tolist() == pytest.approx([-1.28 * 3, 0, 0, 0, 0])
    assert clipped[0].tolist() == [True] * 4 + [False]


def test_kl_cov_holds_back_the_tokens_of_the_largest_covariance():
    log_probs, old, advantages, mask = COV
    chosen = selected_by("kl_cov", *COV, cov_fraction=0.5)
    assert chosen[0].tolist() == [True, False, False, True, False]
    one = selected_by("kl_cov", *COV)
    assert one[0].tolist() == [True, False, False, False, False]
    old = old - torch.tensor([0.5, 0.5, 0.0, -0.5, 0.0])
    loss, _ = bound("kl_cov", cov_kl_coef=2.0)(
        log_probs, old, advantages, mask, selected=chosen, **clip_of("kl_cov")
    )
    # −ρA + 2 · |log ρ|: −e^0.5 · 3 + 1 = −3.9462, −e^0.5 · 3 = −4.9462, 1, e^−0.5 + 1 = 1.6065.
    assert loss[0].tolist() == pytest.approx([-3.9462, -4.9462, 1, 1.6065, 0], abs=1e-4)


@pytest.mark.parametrize("name", ["grpo_clip", "dapo", "ppo"])
def test_dual_clip_bounds_the_loss_of_a_bad_token(name):
    # A = −3: 3ρ is 6 at ρ = 2 and would be 12 at ρ = 4, but c = 3 limits it to 9.
    new, old = [logs(0.2, 0.4, 0.05)] * 2, [logs(0.1, 0.1, 0.1)] * 2
    tensors = (new, old, [[-3] * 3, [3] * 3], [[1] * 3] * 2)
    loss, slope, clipped = run(bound(name, dual_clip=3.0), *tensors, **clip_of(name))
    assert loss == [pytest.approx([6, 9, 2.4]), pytest.approx([-3.84, -3.84, -1.5])]
    assert slope == [pytest.approx([6, 0, 0]), pytest.approx([0, 0, -1.5])]
    assert clipped == [[False, True, True], [True, True, False]]


def test_advantages_of_known_rewards():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.0] * 4, [1.0] * 4])
    # The means are 0.5 and 0.25: (1 − 0.5)/0.5 = 1, (0 − 0.25)/0.25 = −1, (1 − 0.25)/0.25 = 3.
    expected = [[1, -1, -1, 1], [-1, -1, -1, 3], [0] * 4, [0] * 4]
    assert ADVANTAGES["maxrl"](rewards, eps=1e-8).tolist() == [
        pytest.approx(row) for row in expected
    ]
    # The deviations from the group means are ±0.5 and ±2. Their variance is
    # (2 · 0.25 + 2 · 4) / 3 = 2.8333.
    pairs = torch.tensor([[1.0, 0.0], [4.0, 0.0]])
    std = math.sqrt(8.5 / 3)
    by_hand = [[0.5 / std, -0.5 / std], [2 / std, -2 / std]]
    whitened = ADVANTAGES["group_mean_batch_std"](pairs, eps=1e-8)
    assert whitened.tolist() == [pytest.approx(row) for row in by_hand]


def test_maxrl_refuses_rewards_below_0():
    # A reward of 1 and two length penalties add up to 0, so the mean is above 0 only because of
    # rounding. If maxrl accepted this group, its advantages would be 4e7 and -2e7.
    rewards = torch.tensor([[1.0, 0.0, -5 / 12, -7 / 12]])
    with pytest.raises(ValueError, match=r"maxrl needs rewards of at least 0, got -0\.583"):
        ADVANTAGES["maxrl"](rewards, eps=1e-8)


def test_a_group_of_equal_rewards_is_exactly_0_beside_others():
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0.0, 1.0, 0.3], [0.7, 0.2, 0.9]])
    assert ADVANTAGES["group_mean_batch_std"](rewards, eps=1e-8)[0].eq(0).all()


def test_importance_weights_of_known_ratios():
    # The first row has the ratios 0.4, 2 and 6, whose product is 4.8. The second row has only 0.4.
    behaviour = torch.zeros(2, 3)
    start = torch.tensor([logs(0.4, 2.0, 6.0)] * 2)
    mask = torch.tensor([[True] * 3, [True, False, False]])

    def weights(**named: Any) -> list:
        return importance_weight(start, behaviour, mask, 5.0, **named)[:, 0].tolist() + (
            importance_weight(start, behaviour, mask, 5.0, **named)[0, 1:].tolist()
        )

    sequence: dict[str, Any] = {"level": "sequence"}
    masked: dict[str, Any] = {"rule": "mask"}
    assert weights() == pytest.approx([0.4, 0.4, 2, 5])  # truncated
    assert weights(**masked) == pytest.approx([0.4, 0.4, 2, 0])
    assert weights(**masked, floor=0.5) == pytest.approx([0, 0, 2, 0])  # IcePop
    assert weights(**sequence) == pytest.approx([4.8, 0.4, 4.8, 4.8])
    assert weights(**sequence, **masked, floor=0.5) == pytest.approx([4.8, 0, 4.8, 4.8])
    low = importance_weight(start, behaviour, mask, 4.0, **sequence, **masked)
    assert low.tolist() == [[0] * 3, pytest.approx([0.4] * 3)]

    def bounded(cap: float, **named: Any) -> list:
        return weights_bounded(start, behaviour, mask, cap, **named).int().tolist()

    assert bounded(5.0) == [[0, 0, 1], [0, 0, 0]]
    assert bounded(5.0, floor=0.5) == [[1, 0, 1], [1, 0, 0]]
    assert bounded(5.0, level="sequence") == [[0] * 3] * 2
    assert bounded(4.0, level="sequence", floor=0.5) == [[1] * 3, [1, 0, 0]]
    with pytest.raises(ValueError, match="unknown level"):
        importance_weight(start, behaviour, mask, 5.0, level="prompt")


# ---- Written-out formulas, differentiated by autograd ------------------------------------------

Formula = Callable[[list[Tensor], list[Tensor], float, list[bool]], Tensor]


def each(token: Callable[[Tensor, Tensor, float, bool], Tensor]) -> Formula:
    """Return a formula that sums the loss `token` over the tokens of a response."""
    return lambda new, old, a, picked: sum(
        (token(n, o, a, p) for n, o, p in zip(new, old, picked, strict=True)),
        start=torch.zeros((), dtype=torch.float64),
    )


def sapo_token(new: Tensor, old: Tensor, a: float, picked: bool) -> Tensor:
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + (-tau * ((new - old).exp() - 1)).exp())


def gmpo_response(new: list[Tensor], old: list[Tensor], a: float, picked: list[bool]) -> Tensor:
    held = [
        (n - o).clamp(max=0.4) if a > 0 else (n - o).clamp(min=-0.4)
        for n, o in zip(new, old, strict=True)
    ]
    return -a * len(new) * (sum(held, start=torch.zeros(())) / len(new)).exp()


def topr_response(new: list[Tensor], old: list[Tensor], a: float, picked: list[bool]) -> Tensor:
    total = sum(new, start=torch.zeros(())) - sum(old, start=torch.zeros(()))
    weight = 1.0 if a >= 0 else min(math.exp(total.item()), 1.0)
    return -weight * a * sum(new, start=torch.zeros(()))


def dppo_tv_token(new: Tensor, old: Tensor, a: float, picked: bool) -> Tensor:
    moved = math.exp(new.item()) - math.exp(old.item())
    return -a * (new - old).exp() * (abs(moved) <= 0.15 or moved * a < 0)


def dppo_kl_token(new: Tensor, old: Tensor, a: float, picked: bool) -> Tensor:
    p, q = math.exp(old.item()), math.exp(new.item())
    kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    return -a * (new - old).exp() * (kl <= 0.05 or (q - p) * a < 0)


def m2po_token(new: Tensor, old: Tensor, a: float, picked: bool) -> Tensor:
    return -a * (new - old).exp() * (not picked)


def clip_cov_token(new: Tensor, old: Tensor, a: float, picked: bool) -> Tensor:
    ratio = (new - old).exp()
    return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a) * (not picked)


def kl_cov_token(new: Tensor, old: Tensor, a: float, picked: bool) -> Tensor:
    return -a * (new - old).exp() + picked * (new - old).abs()


FORMULAS: dict[str, Formula] = {
    "sapo": each(sapo_token),
    "gmpo": gmpo_response,
    "topr": topr_response,
    "dppo_tv": each(dppo_tv_token),
    "dppo_kl": each(dppo_kl_token),
    "m2po": each(m2po_token),
    "clip_cov": each(clip_cov_token),
    "kl_cov": each(kl_cov_token),
}


def random_batch() -> tuple[Tensor, ...]:
    """Return log-probs, old log-probs, advantages and a mask with holes and an empty row."""
    generator = torch.Generator().manual_seed(7)
    shape = (5, 6)
    old = -2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    step = 0.6 * torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[0] = False
    a = torch.tensor([[1.0], [2.0], [-1.5], [-0.5], [0.7]], dtype=torch.float64)
    return torch.minimum(old + step, old * 0.1), old, a.expand(shape), mask


@pytest.mark.numerics
@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradient_are_those_of_the_formula_to_1e_10(name):
    new, old, advantages, mask = random_batch()
    settings = {"cov_fraction": 0.2, "cov_band": (0.2, 5.0)} if "cov" in name else {}
    settings = {key: settings[key] for key in settings if (key, name) != ("cov_band", "kl_cov")}
    selected = torch.zeros_like(mask)
    named: dict[str, Any] = {}
    if name in SELECTIONS:
        selected = selected_by(name, new, old, advantages, mask, **settings)
        assert 0 < selected.sum() < mask.sum()
        named = {"selected": selected}
    ours = new.clone().requires_grad_()
    token_loss, clipped = LOSSES[name](ours, old, advantages, mask, **named, **clip_of(name))
    token_loss.sum().backward()
    written = new.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for b in range(len(mask)):
        tokens = mask[b].nonzero().flatten().tolist()
        if tokens:
            total = total + FORMULAS[name](
                [written[b, t] for t in tokens],
                [old[b, t] for t in tokens],
                float(advantages[b, 0]),
                [bool(selected[b, t]) for t in tokens],
            )
    total.backward()
    assert token_loss.sum().item() == pytest.approx(total.item(), rel=1e-10)
    torch.testing.assert_close(ours.grad, written.grad, rtol=1e-10, atol=1e-10)
    # If every token were within the clip range, this test would not check the clipping.
    assert (0 < clipped.sum() < mask.sum()) == (name not in NEVER_CLIPS)


# ---- Extremes ----------------------------------------------------------------------------------

# The first row is empty. The mask selects one token of the second row and two of the third row.
EXTREME_MASK = torch.tensor([[False] * 3, [True, False, False], [True, True, False]])


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_give_finite_losses_and_gradients(name, log_ratio, garbage):
    log_probs = torch.full((3, 3), -1.0 + min(log_ratio, 0)).masked_fill(~EXTREME_MASK, garbage)
    old = torch.full((3, 3), -1.0 - max(log_ratio, 0)).masked_fill(~EXTREME_MASK, -garbage)
    for a in (3.0, -3.0, 0.0):
        advantages = torch.full((3, 3), a).masked_fill(~EXTREME_MASK, garbage)
        tensors = (log_probs, old, advantages, EXTREME_MASK)
        named = {"selected": selected_by(name, *tensors)} if name in SELECTIONS else {}
        for rule, level in itertools.product(IMPORTANCE_RULES, IMPORTANCE_LEVELS):
            new = log_probs.clone().requires_grad_()
            value, _ = compute_objective(
                new, old, old - log_ratio, None, advantages, EXTREME_MASK,
                loss=LOSSES[name], **clip_of(name), **named,
                importance_cap=5.0, importance_rule=rule, importance_level=level,
                kl_coef=0.0, kl_estimator="k3", aggregation="token_mean", denominator=3.0,
            )  # fmt: skip
            value.backward()
            assert value.isfinite()
            assert new.grad.isfinite().all()
            assert new.grad[~EXTREME_MASK].eq(0).all()


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_step_without_a_token_selects_none(name):
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    zeros = torch.zeros(2, 3)
    assert not selected_by(name, zeros, zeros, zeros, nothing).any()


@pytest.mark.parametrize("name", ["m2po", "kl_cov"])
def test_on_policy_what_is_selected_changes_no_gradient(name):
    new, _, advantages, mask = random_batch()
    selected = selected_by(name, new, new, advantages, mask)
    assert selected.any() == (name == "kl_cov")
    gradients = []
    for loss, named in ((name, {"selected": selected}), ("reinforce_with_baseline", {})):
        log_probs = new.clone().requires_grad_()
        LOSSES[loss](log_probs, new, advantages, mask, **named, **clip_of(name))[0].sum().backward()
        gradients.append(log_probs.grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


# ---- All combinations --------------------------------------------------------------------------

RULES = [
    {},
    *(
        {"importance_cap": 2.0, "importance_rule": rule, "importance_level": level}
        for rule in IMPORTANCE_RULES
        for level in IMPORTANCE_LEVELS
    ),
]


def advantages_of(config: GRPOConfig, rewards: Tensor, mask: Tensor) -> Tensor:
    """Return the configured advantages, (B, S). The values of the states are invented."""
    settings = config.loss
    if settings.advantage in ADVANTAGES:
        advantages = ADVANTAGES[settings.advantage](rewards, eps=settings.advantage_eps)
        return advantages.view(-1, 1).expand(mask.shape).double()
    values, flat = torch.full(mask.shape, 0.5, dtype=torch.float64), rewards.flatten()
    if settings.advantage == "gae":
        at_end = at_the_end(flat, mask).double()
        advantages = gae(at_end, values, mask, gamma=settings.gamma, lam=settings.gae_lambda)
    else:
        values[:, 1::2] = torch.nan
        first = mask.float().argmax(dim=1)
        values[torch.arange(len(mask)), first] = 0.25
        advantages = vine(flat.double(), values, mask)
    return whitened_tokens([advantages], [mask], eps=settings.advantage_eps)[0]


def takes_a_step(config: GRPOConfig, rewards: Tensor) -> bool:
    """Compute the objective as the learner does; return True if value and gradient are finite."""
    settings = config.loss
    new, old, _, mask = (tensor[1:] for tensor in random_batch())
    advantages = advantages_of(config, rewards, mask)
    clip: dict[str, Any] = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    named: dict[str, Any] = {}
    select = configured_selection(settings)
    if select is not None:
        rng = np.random.default_rng(0)
        named = {"selected": select(new, old, advantages, mask, rng, **clip)}
    new.requires_grad_()
    value, _ = compute_objective(
        new, old, old - 0.5, None, advantages, mask, loss=LOSSES[settings.type], **clip, **named,
        importance_cap=settings.importance_cap, importance_rule=settings.importance_rule,
        importance_level=settings.importance_level, importance_floor=settings.importance_floor,
        kl_coef=0.0, kl_estimator="k3", aggregation=settings.aggregation,
        denominator=loss_denominator(settings.aggregation, mask, 6),
    )  # fmt: skip
    value.backward()
    return bool(value.isfinite() and new.grad.isfinite().all())


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_combination_takes_a_step_or_is_refused_by_name(loss_type):
    # The second group has no signal, because its rewards are equal.
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    refused = {}
    of_tokens = {"gae", "vine"}
    advantages = (*ADVANTAGES, *of_tokens, "group_to_go")
    for aggregation, advantage, rule in itertools.product(AGGREGATIONS, advantages, RULES):
        loss = {"type": loss_type, "aggregation": aggregation, "advantage": advantage, **rule}
        try:
            config = GRPOConfig.from_dict({"loss": loss})
        except ConfigError as error:
            refused[advantage] = str(error)
        else:
            assert takes_a_step(config, rewards), loss
    assert all(line.startswith(("loss.type=", "loss.advantage=")) for line in refused.values())
    expected = {
        "no_baseline": {*advantages} - {"none"},
        "ppo": set(ADVANTAGES),
        **{name: {"none", "zero", *of_tokens} for name in OF_RESPONSES},
    }
    # `group_to_go` is only for control episodes; test_control.py tests it.
    assert refused.keys() == expected.get(loss_type, {"none", "zero"}) | {"group_to_go"}


TAUGHT = {
    "by rewards": {},
    "and a teacher": {"teacher": "policy"},
    "less a KL": {"kl_coef": 0.1, "kl_in": "reward"},
    "and a KL in the loss": {"kl_coef": 0.1},
}


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("taught", TAUGHT)
def test_a_learner_takes_a_finite_step_by_every_loss_and_advantage_or_they_are_refused(
    loss_type, taught, policy_path
):
    of_rows = loss_type in OF_RESPONSES
    refused = set()
    for advantage in (*ADVANTAGES, "gae", "vine"):
        loss = {"type": loss_type, "advantage": advantage, **TAUGHT[taught]}
        if "teacher" in loss:
            loss["teacher"] = policy_path
        try:
            config = GRPOConfig.from_dict({"model": {"path": policy_path}, "loss": loss})
        except ConfigError as error:
            assert str(error).startswith("loss.")  # noqa: PT017
            refused.add(advantage)
        else:
            (step,) = Learner(config, InProcess()).update([groups_for(config)]).steps
            assert not step.skipped
            assert all(map(math.isfinite, (step.loss, step.grad_norm)))
    takes_none = loss_type in ("ppo", "no_baseline") or (taught == "and a teacher" and of_rows)
    assert ("group_std" in refused) == takes_none
    assert ("zero" in refused) == (takes_none or taught != "and a teacher")
    assert "vine" in refused or taught != "less a KL"


def groups_for(config: GRPOConfig) -> list[RolloutGroup]:
    """Return two groups. Each has a response of 5 tokens, and one of 3 tokens that earns 0."""
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    zeros = torch.zeros(mask.shape, dtype=torch.int32)
    values = torch.full(mask.shape, 0.5).masked_fill(torch.arange(5) % 2 == 1, torch.nan)
    valued = config.loss.advantage == "vine"
    return [
        RolloutGroup(
            prompt_index=index,
            prompt_ids=torch.tensor([3, 4, 5]),
            response_ids=torch.arange(10).view(2, 5) % 7 + 3,
            response_mask=mask,
            behaviour_log_probs=torch.full(mask.shape, -2.0),
            rewards=torch.tensor([1.0, 0.0]),
            finished=torch.ones(2, dtype=torch.bool),
            token_versions=zeros,
            token_rounds=zeros,
            uses=1,
            state_values=values if valued else None,
        )
        for index in range(2)
    ]


@pytest.mark.parametrize(
    "advantage", [name for name in ADVANTAGES if name not in ("none", "batch", "zero")]
)
def test_a_group_of_one_is_refused_where_responses_are_compared(advantage):
    with pytest.raises(ConfigError, match=r"rollout\.group_size=1: must be >= 2 with"):
        GRPOConfig.from_dict({"loss": {"advantage": advantage}, "rollout": {"group_size": 1}})


def test_a_floor_above_the_cap_is_refused():
    rule = {"importance_cap": 0.5, "importance_floor": 0.5, "importance_rule": "mask"}
    with pytest.raises(ConfigError, match=r"loss\.importance_floor=0\.5: must be below"):
        GRPOConfig.from_dict({"loss": rule})
