"""The sample of responses on which the KL is measured, and the estimates from it."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from pairs import Pair, equal
from policies import write_quick_policy
from torch import Tensor

from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.learner.kl_monitor import (
    draw,
    drift,
    drift_before_step,
    estimate,
    on_watched_rows,
    reference_nll,
    watched_rows,
)
from grpo_trainable.learner.log_probs import BatchWithLogProbs
from grpo_trainable.pipeline.report import update_metrics
from grpo_trainable.protocol.rollout import TrainBatch


def rows(count: int, width: int = 3) -> TrainBatch:
    ids = torch.arange(count * width).reshape(count, width)
    return TrainBatch(
        input_ids=ids,
        target_ids=ids + 1,
        response_mask=torch.ones(count, width, dtype=torch.bool),
        behaviour_log_probs=torch.zeros(count, width),
        advantages=torch.zeros(count, width),
    )


# ---- The draw ------------------------------------------------------------------------------------


@pytest.mark.parametrize("responses", range(1, 12))
def test_no_group_is_drawn_twice_before_every_group_is_drawn_once(responses: int) -> None:
    for seed in range(20):
        mask = draw([4, 4, 4], responses, np.random.default_rng(seed))
        shares = mask.reshape(3, 4).sum(axis=1)
        assert shares.sum() == responses
        assert shares.max() - shares.min() <= 1


def every_draw(groups: int, size: int, responses: int) -> set[bytes]:
    """Return every mask in which the numbers of drawn rows per group differ by at most one."""
    found = set()
    for places in combinations(range(groups * size), responses):
        mask = np.zeros(groups * size, dtype=bool)
        mask[list(places)] = True
        shares = mask.reshape(groups, size).sum(axis=1)
        if shares.max() - shares.min() <= 1:
            found.add(mask.tobytes())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "size", "responses"), [(3, 2, 2), (2, 3, 2), (2, 2, 3)])
def test_the_mean_over_all_possible_draws_is_the_figure_of_all_responses(
    groups: int, size: int, responses: int
) -> None:
    expected = every_draw(groups, size, responses)
    drawn = [draw([size] * groups, responses, np.random.default_rng(s)) for s in range(4000)]
    # All draws occur, about equally often.
    counts = [sum(mask.tobytes() == one for mask in drawn) for one in expected]
    assert sum(counts) == len(drawn)
    assert min(counts) > 0.7 * len(drawn) / len(expected)
    values = torch.tensor([1.0, -2.0, 4.0, 0.5, 8.0, -1.0], dtype=torch.float64)[: groups * size]
    masks = [torch.from_numpy(np.frombuffer(one, dtype=bool).copy()) for one in expected]
    estimates = [estimate(values[mask], len(values), 5.0, known=3.0).value for mask in masks]
    assert np.mean(estimates) == pytest.approx((3.0 + float(values.sum())) / 5.0, rel=1e-12)


@pytest.mark.slow
def test_every_response_is_equally_likely_to_be_drawn_from_groups_of_unequal_size() -> None:
    drawn = [draw([1, 5, 2], 3, np.random.default_rng(seed)) for seed in range(4000)]
    assert {mask.sum() for mask in drawn} == {3}
    assert np.mean(drawn, axis=0) == pytest.approx([3 / 8] * 8, abs=0.03)


def test_the_draw_depends_on_the_seed_and_the_round_alone() -> None:
    def drawn(seed: int, round_: int, responses: int | None = 13) -> list[Any]:
        masks = watched_rows([rows(32), rows(16)], [4] * 12, responses, seed=seed, round_=round_)
        return [None if mask is None else mask.tolist() for mask in masks]

    assert drawn(1, 2) == drawn(1, 2)
    assert [len(mask) for mask in drawn(1, 2)] == [32, 16]
    assert sum(map(sum, drawn(1, 2))) == 13
    assert len({str(drawn(seed, round_)) for seed in range(3) for round_ in range(3)}) == 9
    assert drawn(1, 2, None) == drawn(1, 2, 48) == drawn(1, 2, 49) == [None, None]


def test_watched_rows_of_all_batches_share_one_pass() -> None:
    batches = [rows(4, width=3), rows(2, width=5), rows(2, width=2)]
    nothing = torch.zeros(2, dtype=torch.bool)
    masks = [torch.tensor([True, False, False, True]), torch.tensor([False, True]), nothing]
    calls = []

    def log_probs(batch: TrainBatch) -> Tensor:
        calls.append(batch.num_rows)
        return -(batch.input_ids + 1.0) * batch.response_mask

    found = on_watched_rows(log_probs, batches, masks)
    assert calls == [3]
    for batch, mask, values in zip(batches, masks, found, strict=True):
        assert values.equal(torch.where(mask[:, None], -(batch.input_ids + 1.0), 0.0))
    everything = on_watched_rows(log_probs, batches, [None, None, None])
    assert calls == [3, 4, 2, 2]
    assert all(values.equal(log_probs(b)) for b, values in zip(batches, everything, strict=True))


# ---- The estimates -------------------------------------------------------------------------------


def test_estimate_by_hand() -> None:
    # The mean is 2, so the estimated sum of 4 responses is 8, and 10 is added. The variance of 1
    # and 3 is 2, and half of the responses are measured.
    half = estimate(torch.tensor([1.0, 3.0]), responses=4, divisor=5.0, known=10.0)
    assert half == pytest.approx((18 / 5, 4 / 5 * math.sqrt(0.5 * 2 / 2)))
    assert estimate(torch.tensor([1.0, 3.0, 5.0]), 3, 3) == (3.0, 0.0)


def four_rows(watched: Tensor | None) -> tuple[Tensor, BatchWithLogProbs]:
    """Return log-probs of the policy, and four rows. The last row is an empty response."""
    mask = torch.tensor([[True, True], [True, False], [True, True], [False, False]])
    batch = TrainBatch(
        input_ids=torch.zeros(4, 2, dtype=torch.long),
        target_ids=torch.zeros(4, 2, dtype=torch.long),
        response_mask=mask,
        behaviour_log_probs=torch.tensor([[-1.0, -2.0], [-3.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]),
        advantages=torch.zeros(4, 2),
    )
    policy = torch.tensor([[-1.0, -1.0], [-2.0, 0.0], [-3.0, -1.0], [0.0, 0.0]])
    return policy, BatchWithLogProbs(
        train_batch=batch,
        own_tokens=torch.zeros_like(mask),
        watched=watched,
        reference=torch.tensor([[-2.0, -3.0], [-3.0, 0.0], [-4.0, -1.0], [0.0, 0.0]]),
        start=policy - 0.5 * mask,
    )


def test_drift_and_nll_by_hand() -> None:
    # The KL to the reference (k1) is 3, 1 and 1 nats, and the last row is empty. The NLL under the
    # reference is 13 nats for 5 tokens.
    policy, batch = four_rows(None)
    assert drift([policy], [batch])["reference"].k1 == pytest.approx(5 / 3)
    assert drift([policy], [batch])["reference"].k1_se == 0.0
    assert drift([policy], [batch])["behaviour"].k1 == pytest.approx((1 + 1 - 2) / 3)
    assert reference_nll([batch]) == pytest.approx((13 / 5, 0.0))

    policy, batch = four_rows(torch.tensor([True, True, False, False]))
    reference = drift([policy], [batch])["reference"]
    # Now the KL is measured only on the first two responses, and its mean is 2. So the estimated
    # sum over all 4 responses is 8. The sum is divided by 3, the number of non-empty responses.
    se = 4 / 3 * math.sqrt(0.5 * 2 / 2)
    assert (reference.k1, reference.k1_se) == pytest.approx((8 / 3, se))
    k3 = torch.tensor([math.exp(-1) + math.exp(-2) + 1, math.exp(-1)], dtype=torch.float64)
    se = 4 / 3 * math.sqrt(0.5 * float(k3.var()) / 2)
    assert (reference.k3, reference.k3_se) == pytest.approx((4 / 3 * float(k3.mean()), se))
    # The NLL of all responses under the sampler is 8 nats. The NLL under the reference is higher by
    # 2 and 0 nats for the two measured responses, so by an estimated 4 nats for all four responses.
    nll = reference_nll([batch])
    assert nll == pytest.approx((12 / 5, 4 / 5 * math.sqrt(0.5 * 2 / 2)))


def test_kl_before_a_step_covers_all_its_rows_where_no_pass_is_needed() -> None:
    policy, batch = four_rows(torch.tensor([True, True, False, False]))
    before = drift_before_step(policy, batch)
    assert before["behaviour"] == drift([policy], [four_rows(None)[1]])["behaviour"]
    assert before["reference"] == drift([policy], [batch])["reference"]
    rest = torch.tensor([2, 3])
    assert drift_before_step(policy[rest], batch.select(rest)).keys() == {"behaviour"}


@pytest.mark.slow
def test_estimates_of_many_rounds_agree_with_the_full_pass() -> None:
    """Simulate 500 rounds whose KL is skewed, and similar within a group, as in training."""
    rng = np.random.default_rng(0)
    within, errors = 0, []
    for round_ in range(500):
        level = rng.gamma(4.0, 1.0, size=(16, 1))
        kl = torch.from_numpy(level * rng.gamma(4.0, 0.25, size=(16, 4)) - 0.3)
        mask = torch.from_numpy(draw([4] * 16, 16, np.random.default_rng(round_))).view(16, 4)
        found = estimate(kl[mask], kl.numel(), kl.numel())
        errors.append(found.value - float(kl.mean()))
        within += abs(errors[-1]) <= 2 * found.se
    assert within / 500 >= 0.88
    assert abs(np.mean(errors)) < 2 * np.std(errors) / math.sqrt(500)


# ---- The settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "responses"),
    [
        ({}, 16),
        ({"loss.kl_monitor_responses": 24}, 24),
        ({"loss.kl_monitor_responses": "all"}, None),
        ({"loss.kl_coef": 0.1}, None),
        ({"callbacks.kl_stop": 40.0}, None),
        ({"loss.kl_monitor": False}, None),
        ({"placement": "disaggregated", "resources.num_learners": 3}, 18),
    ],
)
def test_settings_that_act_on_the_kl_measure_all_responses(
    settings: dict[str, Any], responses: int | None
) -> None:
    data: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        (data.setdefault(section, {}) if section else data)[name] = value
    assert schedule.monitored_responses(GRPOConfig.from_dict(data)) == responses


# ---- A learner that monitors a sample ------------------------------------------------------------


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


STALE = {"k": 2, "k_mode": "fresh_batches"}


@pytest.mark.parametrize(
    ("mode", "stale"),
    [
        ({}, False),
        pytest.param({"k": 2, "k_mode": "minibatches"}, False, marks=pytest.mark.slow),
        pytest.param(STALE, False, marks=pytest.mark.slow),
        pytest.param(STALE, True, marks=pytest.mark.slow),
    ],
)
def test_a_sample_changes_no_weight_and_measures_what_it_draws(
    policy_path: str, mode: dict[str, Any], stale: bool
) -> None:
    sampled, full = (
        Pair(policy_path, **mode, loss={"kl_monitor_responses": count}) for count in (4, "all")
    )
    for round_ in range(2):
        answers = []
        for pair in (sampled, full):
            if not (stale and round_):
                pair.sync()
            batches = [pair.rollouts() for _ in range(2 if mode == STALE else 1)]
            answers.append(pair.learner.update(batches))
        ours, theirs = answers
        assert equal(sampled.weights(), full.weights())
        assert [step.loss for step in ours.steps] == [step.loss for step in theirs.steps]

        policy, reference = ours.responses.policy_log_probs, ours.responses.reference_log_probs
        of_all = theirs.responses.policy_log_probs, theirs.responses.reference_log_probs
        assert policy is not None
        assert reference is not None
        drawn = ~np.isnan(policy)
        assert drawn.sum() == 4
        assert (drawn == ~np.isnan(reference)).all()
        kls = (of_all[0] - of_all[1])[drawn]  # pyright: ignore[reportOptionalOperand]
        assert ours.kl["reference"].k1 == pytest.approx(kls.mean(), abs=1e-4)
        se = kls.std(ddof=1) / 2 * math.sqrt(1 - 4 / len(drawn))
        assert ours.kl["reference"].k1_se == pytest.approx(se, rel=1e-3, abs=1e-5)
        assert ours.reference_nll_nats == pytest.approx(
            theirs.reference_nll_nats, abs=4 * ours.reference_nll_se + 1e-5
        )
        assert theirs.reference_nll_se == theirs.kl["reference"].k1_se == 0
        assert ours.sampler_mismatch_nats == theirs.sampler_mismatch_nats
        for mine, other in zip(ours.steps, theirs.steps, strict=True):
            assert mine.kl["behaviour"] == other.kl["behaviour"]


def test_a_batch_that_the_first_step_processes_needs_no_pass_before_it(
    policy_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(policy_path, **STALE, loss={"kl_monitor_responses": "all"})
    pair.sync()
    batches = [pair.rollouts() for _ in range(4)]
    pair.learner.update(batches[:2])
    seen, start = [], pair.learner._batches._start
    monkeypatch.setattr(
        pair.learner._batches, "_start", lambda b: seen.append(b.num_rows) or start(b)
    )
    pair.learner.update(batches[2:])  # older weights sampled all tokens
    assert seen == [12]


def test_the_reference_sees_only_the_drawn_rows(
    policy_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(policy_path, loss={"kl_monitor_responses": 4})
    assert pair.learner.reference is not None
    seen, passed = [], pair.learner.reference.log_probs
    monkeypatch.setattr(
        pair.learner.reference, "log_probs", lambda b: seen.append(b.num_rows) or passed(b)
    )
    pair.sync()
    updated = pair.learner.update([pair.rollouts()])
    assert seen == [4]
    row = update_metrics(updated, [])
    assert row["kl/reference_nats_se"] == updated.kl["reference"].k1_se
    assert row["kl/previous_k3_nats_se"] == updated.kl["previous"].k3_se > 0
    assert row["response/reference_nll_nats_se"] == updated.reference_nll_se
