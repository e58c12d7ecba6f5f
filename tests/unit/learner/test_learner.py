"""The learner alone, with a real policy, real rollouts and no Ray."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, Weights, copy, distance, equal
from policies import sharpened, write_quick_policy
from torch import Tensor

from grpo_trainable.algo import (
    ADVANTAGES,
    KL_ESTIMATORS,
    LOSSES,
    compute_objective,
    weights_bounded,
)
from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner import learner
from grpo_trainable.learner.learner import Learner
from grpo_trainable.learner.log_probs import BatchWithLogProbs
from grpo_trainable.learner.optimizer import PolicyOptimizer
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.parameters import unique_parameters
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.models.store import save_policy
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.pipeline.report import update_metrics
from grpo_trainable.plugins import PluginError
from grpo_trainable.protocol.checksums import checksum, storage_checksum
from grpo_trainable.protocol.messages import Drift, GradientStep
from grpo_trainable.protocol.rollout import RolloutGroup, TrainBatch
from grpo_trainable.protocol.round_records import step_columns
from grpo_trainable.telemetry.metrics import RATIO_EDGES

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


def with_first(groups: Sequence[RolloutGroup], **fields: Tensor) -> list[RolloutGroup]:
    return [replace(groups[0], **fields), *groups[1:]]


# ---- Before the first round --------------------------------------------------------------------


def test_a_reset_frees_the_old_policy_and_optimizer_before_it_builds_new_ones(
    policy_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(policy_path, loss={"kl_coef": 0.1})
    a_round(pair)
    old = [weakref.ref(pair.learner.policy), weakref.ref(pair.learner.optimizer)]
    old.append(weakref.ref(pair.learner.reference))
    build = learner.build_any_trained_policy
    alive: list[bool] = []

    def building(*args: Any, **options: Any) -> Any:
        alive.extend(reference() is not None for reference in old)
        return build(*args, **options)

    monkeypatch.setattr(learner, "build_any_trained_policy", building)
    pair.learner.reset(pair.config)
    assert alive == [False] * 3


def a_round(pair: Pair) -> tuple[Any, Weights]:
    pair.sync()
    updated = pair.learner.update([pair.rollouts()])
    return updated, pair.weights()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"loss": {"kl_monitor": False}}, {"k": 2}])
def test_warm_up_leaves_nothing_that_a_round_could_see(
    policy_path: str, settings: dict[str, Any]
) -> None:
    cold, warm = Pair(policy_path, **settings), Pair(policy_path, **settings)
    warm.generator.warm_up([warm.prompts.request("train", index) for index in range(4)])
    warm.learner.warm_up(prompt_tokens=7)
    before, after = cold.learner.state(), warm.learner.state()
    assert equal(before.policy, after.policy)
    assert after.optimizer == {}
    assert before.counters == after.counters
    assert all(p.grad is None for p in warm.learner.policy.parameters())
    for _ in range(2):
        (updated, weights), (expected, expected_weights) = a_round(warm), a_round(cold)
        assert equal(weights, expected_weights)
        assert (updated.steps, updated.kl) == (expected.steps, expected.kl)
        assert [span.stage for span in updated.spans] == [span.stage for span in expected.spans]
    assert equal(warm.learner.state().optimizer, cold.learner.state().optimizer)


def test_warm_up_runs_a_microbatch_as_long_as_any_of_a_round(
    policy_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(policy_path, optim={"microbatch": 5}, rollout={"max_new_tokens": 10})
    seen = []
    forward = pair.learner._log_probs.with_entropy
    monkeypatch.setattr(
        pair.learner._log_probs,
        "with_entropy",
        lambda model, batch: seen.append(batch) or forward(model, batch),
    )
    pair.learner.warm_up(prompt_tokens=7)
    (batch,) = seen
    # Seven prompt tokens and ten response tokens, without the last one, which predicts nothing.
    assert batch.input_ids.shape == (5, 16)
    assert batch.response_mask.sum(dim=1).tolist() == [10] * 5


@pytest.mark.slow
def test_warm_up_has_as_many_tokens_as_a_microbatch_of_tokens(
    policy_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(policy_path, optim={"microbatch_tokens": 50}, rollout={"max_new_tokens": 10})
    seen = []
    forward = pair.learner._log_probs.with_entropy
    monkeypatch.setattr(
        pair.learner._log_probs,
        "with_entropy",
        lambda model, batch: seen.append(batch) or forward(model, batch),
    )
    pair.learner.warm_up(prompt_tokens=7)
    (batch,) = seen
    assert batch.input_ids.shape == (3, 16)
    pair.sync()
    pair.learner.update([pair.rollouts()])
    assert all(batch.input_ids.numel() <= 50 for batch in seen)
    assert sum(len(batch.input_ids) for batch in seen[1:]) >= 12


# ---- Weight transfer ---------------------------------------------------------------------------


def test_gradient_step_after_publish_does_not_change_published_weights(policy_path: str) -> None:
    pair = Pair(policy_path)
    published = pair.learner.publish()
    pair.generator.load(published.handle)
    groups = pair.rollouts()
    before = pair.weights()
    pair.learner.update([groups])
    assert not equal(pair.weights(), before)
    # The transport still holds the snapshot.
    again = pair.generator.load(published.handle)
    assert (again.version, again.round) == (0, 0)
    sampled_with = unique_parameters(pair.generator.engine.model)
    assert storage_checksum(sampled_with) == storage_checksum(before)


@pytest.mark.slow
def test_generator_has_the_published_weights_bit_for_bit(policy_path: str) -> None:
    pair = Pair(policy_path)
    pair.sync()
    for round_ in range(2):
        pair.learner.update([pair.rollouts()])
        published = pair.learner.publish()
        loaded = pair.generator.load(published.handle)
        assert (loaded.version, loaded.round) == (published.version, published.round)
        assert loaded.version == round_ + 1
        assert loaded.bytes == sum(t.nbytes for t in pair.weights().values())
        assert equal(copy(unique_parameters(pair.generator.engine.model)), pair.weights())


def test_what_is_frozen_is_named_to_the_transport_and_stays_as_it_is(policy_path: str) -> None:
    pair, named = Pair(policy_path), []
    publish = pair.learner._sender.publish
    pair.learner._sender.publish = lambda weights, frozen: named.append(frozen) or publish(weights)
    pair.sync()
    pair.learner.policy.embedding.weight.requires_grad_(False)
    before = pair.weights()
    pair.learner.update([pair.rollouts()])
    pair.sync()
    assert named == [[], ["embedding.weight"]]
    changed = [name for name, w in pair.weights().items() if not torch.equal(w, before[name])]
    assert changed
    assert "embedding.weight" not in changed


@pytest.mark.slow
def test_groups_carry_version_and_round_of_the_weights_that_sampled_them(policy_path: str) -> None:
    pair = Pair(policy_path, k=2)
    pair.sync()
    pair.learner.update([pair.rollouts()])
    pair.sync()
    for group in pair.rollouts():
        assert (group.token_versions[group.response_mask] == 2).all()
        assert (group.token_rounds[group.response_mask] == 1).all()


# ---- Gradient steps ----------------------------------------------------------------------------


def test_first_step_on_fresh_rollouts_has_ratio_one(policy_path: str) -> None:
    pair = Pair(policy_path, k=3)
    pair.sync()
    updated = pair.learner.update([pair.rollouts()])
    ratios = [step.ratio_max for step in updated.steps]
    assert ratios[0] == pytest.approx(1.0, abs=1e-5)
    assert updated.steps[0].clip_fraction == 0.0
    assert min(ratios[1:]) > 1.001
    assert (updated.version, updated.round) == (3, 1)


def test_sampled_log_probs_are_those_the_learner_computes(policy_path: str) -> None:
    pair = Pair(policy_path)
    pair.sync()
    batch = collated(pair.learner, pair.rollouts())
    log_probs, _ = pair.learner._log_probs.with_entropy(pair.learner.policy, batch)
    assert (log_probs - batch.behaviour_log_probs).abs().max() < 1e-4


def test_learning_rate_zero_leaves_the_weights_as_they_are(policy_path: str) -> None:
    pair = Pair(policy_path, k=2, optim={"lr": 0.0})
    pair.sync()
    before = pair.weights()
    updated = pair.learner.update([pair.rollouts()])
    assert equal(pair.weights(), before)
    assert [step.ratio_max for step in updated.steps] == pytest.approx([1.0, 1.0], abs=1e-5)


def seen_batches(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> list[TrainBatch]:
    """Return a list that collects the rows of each gradient step from now on."""
    seen: list[TrainBatch] = []
    step = learner._steps.take

    def spy(batch: BatchWithLogProbs) -> tuple[GradientStep, Tensor]:
        seen.append(batch.train_batch)
        return step(batch)

    monkeypatch.setattr(learner._steps, "take", spy)
    return seen


def collated(learner: Learner, groups: Sequence[RolloutGroup]) -> TrainBatch:
    return learner._batches.batch(groups).train_batch


def row_keys(batches: Sequence[TrainBatch]) -> list[tuple[int, ...]]:
    """Return the rows in sorted order, each as its sampled tokens without padding."""
    return sorted(
        tuple(batch.target_ids[b][batch.response_mask[b]].tolist())
        for batch in batches
        for b in range(batch.num_rows)
    )


@pytest.mark.slow
def test_same_batch_takes_k_steps_on_all_rows(
    policy_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(policy_path, k=3)
    pair.sync()
    seen = seen_batches(pair.learner, monkeypatch)
    assert len(pair.learner.update([pair.rollouts()]).steps) == 3
    assert [batch.num_rows for batch in seen] == [12, 12, 12]
    assert row_keys(seen[:1]) == row_keys(seen[1:2]) == row_keys(seen[2:])


@pytest.mark.slow
def test_fresh_batches_take_one_step_on_each(
    policy_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(policy_path, k=2, k_mode="fresh_batches")
    pair.sync()
    batches = [pair.rollouts(), pair.rollouts()]
    seen = seen_batches(pair.learner, monkeypatch)
    updated = pair.learner.update(batches)
    assert len(updated.steps) == 2
    assert updated.version == 2
    assert [row_keys([b]) for b in seen] == [
        row_keys([collated(pair.learner, batch)]) for batch in batches
    ]


@pytest.mark.slow
def test_minibatches_use_every_row_once_an_epoch(
    policy_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(policy_path, k=6, k_mode="minibatches", optim={"epochs": 2, "lr": 1e-4})
    pair.sync()
    groups = pair.rollouts()
    seen = seen_batches(pair.learner, monkeypatch)
    assert len(pair.learner.update([groups]).steps) == 6
    # 4 groups of 3 rows are divided into 3 parts. Groups stay whole.
    assert sorted(batch.num_rows for batch in seen[:3]) == [3, 3, 6]
    everything = row_keys([collated(pair.learner, groups)])
    assert row_keys(seen[:3]) == row_keys(seen[3:]) == everything
    assert [row_keys([b]) for b in seen[:3]] != [row_keys([b]) for b in seen[3:]]


@pytest.mark.slow
def test_minibatches_have_the_reference_of_their_own_rows(
    policy_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(policy_path, k=2, k_mode="minibatches", loss={"kl_coef": 0.1})
    pair.sync()
    step = pair.learner._steps.take
    differences = []

    def spy(batch: BatchWithLogProbs) -> tuple[GradientStep, Tensor]:
        reference = pair.learner.reference.model
        expected, _ = pair.learner._log_probs.with_entropy(reference, batch.train_batch)
        differences.append(float((expected - batch.reference).abs().max()))
        return step(batch)

    monkeypatch.setattr(pair.learner._steps, "take", spy)
    pair.learner.update([pair.rollouts()])
    assert differences == pytest.approx([0.0, 0.0], abs=1e-5)


@pytest.mark.parametrize("k_mode", ["same_batch", "fresh_batches", "minibatches"])
def test_round_without_groups_takes_no_step_and_counts(policy_path: str, k_mode: str) -> None:
    pair = Pair(policy_path, k=2, k_mode=k_mode)
    pair.sync()
    before = pair.weights()
    updated = pair.learner.update([])
    assert (updated.round, updated.version, updated.steps, updated.kl) == (1, 0, [], {})
    assert set(step_columns(updated)["round"]) == set()
    assert len(updated.responses.advantages) == 0
    assert equal(pair.weights(), before)
    published = pair.learner.publish()
    assert (published.round, published.version) == (1, 0)


@pytest.mark.slow
def test_fresh_batches_take_a_step_on_each_that_is_left(policy_path: str) -> None:
    pair = Pair(policy_path, k=3, k_mode="fresh_batches")
    pair.sync()
    updated = pair.learner.update([pair.rollouts(), pair.rollouts()])
    assert (updated.version, len(updated.steps)) == (2, 2)


def test_minibatches_make_do_with_the_groups_that_are_left(policy_path: str) -> None:
    pair = Pair(policy_path, k=4, k_mode="minibatches")
    pair.sync()
    updated = pair.learner.update([pair.rollouts()[:2]])
    assert len(updated.steps) == 2
    assert updated.round == 1


@pytest.mark.slow
def test_microbatch_size_never_changes_the_step(policy_path: str) -> None:
    figures, weights = [], []
    for microbatch in (3, 5, 64):
        pair = Pair(
            policy_path,
            # With two steps, the ratios and the KL of the second step are not trivial.
            k=2,
            loss={"kl_coef": 0.1, "aggregation": "token_mean"},
            optim={"microbatch": microbatch, "lr": 1e-4},
        )
        pair.sync()
        steps = pair.learner.update([pair.rollouts()]).steps
        figures.append([f for s in steps for f in (s.loss, s.grad_norm, s.entropy_nats)])
        weights.append(pair.weights())
    for other in (1, 2):
        assert figures[other] == pytest.approx(figures[0], rel=1e-4, abs=1e-6)
        assert distance(weights[0], weights[other]) < 1e-5  # two steps move a weight by 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", [1, 64])
def test_progress_changes_with_every_microbatch(policy_path: str, microbatch: int) -> None:
    pair = Pair(policy_path, optim={"microbatch": microbatch}, loss={"kl_monitor": False})
    pair.sync()
    groups = pair.rollouts()
    before = pair.learner.progress()
    pair.learner.update([groups])
    rows = sum(len(group.rewards) for group in groups)
    assert pair.learner.progress() - before > math.ceil(rows / microbatch)


@pytest.mark.slow
def test_kl_coefficient_adds_its_estimate_to_the_loss(policy_path: str) -> None:
    for estimator in KL_ESTIMATORS.keys() - {"k1"}:  # k1 is not allowed in the loss
        loss: dict[str, float] = {}
        for coefficient in (0.0, 0.25):
            read = {"kl_estimator": estimator} if coefficient else {}
            pair = Pair(policy_path, loss={"kl_coef": coefficient, **read})
            pair.sync()
            groups = pair.rollouts()
            # Move away from the reference, where every estimate is 0.
            with torch.no_grad():
                for parameter in pair.learner.policy.parameters():
                    parameter.mul_(1.05)
            if coefficient == 0.0:
                batch = collated(pair.learner, groups)
                policy, _ = pair.learner._log_probs.with_entropy(pair.learner.policy, batch)
                reference, _ = pair.learner._log_probs.with_entropy(
                    pair.learner.reference.model, batch
                )
                d = policy.detach().double() - reference.double()
                token_kl = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[estimator]
                mask = batch.response_mask
                rows = (token_kl * mask).sum(dim=1) / mask.sum(dim=1)
                expected = float(rows.mean())
                assert abs(expected) > 1e-4
            loss[str(coefficient)] = pair.learner.update([groups]).steps[0].loss
        assert loss["0.25"] - loss["0.0"] == pytest.approx(0.25 * expected, abs=2e-6)


@pytest.mark.slow
def test_reference_is_kept_only_while_something_asks_for_it(policy_path: str) -> None:
    pair = Pair(policy_path, loss={"kl_monitor": False})
    assert pair.learner.reference is None
    pair.sync()
    updated = pair.learner.update([pair.rollouts()])
    assert updated.reference_nll_nats is None
    assert updated.kl == {}
    assert updated.responses.reference_log_probs is updated.responses.policy_log_probs is None
    assert Pair(policy_path, loss={"kl_monitor": False, "kl_coef": 0.1}).learner.reference
    assert Pair(policy_path).learner.reference


@pytest.mark.slow
def test_reference_stays_frozen_and_measures_nats_per_token(policy_path: str) -> None:
    pair = Pair(policy_path)
    pair.sync()
    frozen = checksum(unique_parameters(pair.learner.reference.model))
    groups = pair.rollouts()
    # In the first round, the reference is the policy that sampled.
    sampled = torch.cat([g.behaviour_log_probs[g.response_mask] for g in groups])
    nll = pair.learner.update([groups]).reference_nll_nats
    assert nll == pytest.approx(-float(sampled.mean()), abs=1e-4)
    assert checksum(unique_parameters(pair.learner.reference.model)) == frozen


# ---- The objective of a step, a user's loss and advantage ----------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cap", [None, 1.05])
@pytest.mark.parametrize("loss_type", ["reinforce_with_baseline", "dapo", "cispo", "gspo"])
def test_a_step_on_stale_rollouts_reports_the_objective_of_its_whole_batch(
    policy_path: str, loss_type: str, cap: float | None
) -> None:
    loss = {"type": loss_type, "importance_cap": cap, "aggregation": "token_mean", "kl_coef": 0.1}
    pair = Pair(policy_path, loss=loss, optim={"microbatch": 5})
    pair.sync()
    stale = pair.rollouts()
    for _ in range(2):
        pair.learner.update([pair.rollouts()])
    batch = collated(pair.learner, stale)
    mask, behaviour = batch.response_mask, batch.behaviour_log_probs
    policy = pair.learner._log_probs.without_gradient(pair.learner.policy, batch)
    # With a cap, the old policy is the policy from before the round, so the first step has ratio 1.
    old = behaviour if cap is None else policy
    expected, clipped = compute_objective(
        policy,
        old,
        behaviour,
        pair.learner.reference.log_probs(batch),
        batch.advantages,
        mask,
        loss=LOSSES[loss_type],
        clip_low=pair.config.clip_low,
        clip_high=pair.config.clip_high,
        importance_cap=cap,
        kl_coef=0.1,
        kl_estimator="k3",
        aggregation="token_mean",
        denominator=int(mask.sum()),
    )
    (step,) = pair.learner.update([stale]).steps
    assert step.loss == pytest.approx(float(expected), rel=1e-4)
    assert step.clip_fraction == pytest.approx(float((clipped & mask).sum() / mask.sum()), abs=0.01)
    assert step.ratio_max == pytest.approx(float((policy - old)[mask].exp().max()), rel=1e-4)
    bounded = mask * 0.0 if cap is None else weights_bounded(policy, behaviour, mask, cap)
    expected_share = float(bounded.sum() / mask.sum())
    assert step.weights_bounded_fraction == pytest.approx(expected_share, abs=0.01)
    if loss_type != "reinforce_with_baseline":
        assert (step.clip_fraction > 0) == (cap is None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"k": 2, "loss": {"kl_coef": 0.1}},
        {"loss": {"type": "ppo", "advantage": "gae"}},
        {"loss": {"type": "ppo", "advantage": "gae"}, "critic": {"body": "own"}},
    ],
)
def test_packed_rows_train_as_padded_ones_do(policy_path: str, settings: dict[str, Any]) -> None:
    found = []
    for packing in (False, True):
        pair = Pair(policy_path, **settings, model={"packing": packing}, optim={"microbatch": 5})
        updated, weights = a_round(pair)
        assert pair.learner.policy._packs == packing
        found.append((updated.steps, updated.kl, weights))
    (steps, kl, weights), (packed_steps, packed_kl, packed_weights) = found
    for step, packed in zip(steps, packed_steps, strict=True):
        assert packed.loss == pytest.approx(step.loss, abs=1e-5)
        assert packed.grad_norm == pytest.approx(step.grad_norm, rel=1e-4)
    for name, drift in kl.items():
        assert packed_kl[name].k3 == pytest.approx(drift.k3, rel=1e-3, abs=1e-7)
    assert distance(weights, packed_weights) < 1e-2 * distance(weights, first(policy_path))


def first(policy_path: str) -> Weights:
    return Pair(policy_path).weights()


def away_from_ratio_one(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Return the groups as if a different policy had sampled them.

    At ratio 1, rounding would decide the sign of the gradient of |log ratio|, which `kl_cov` uses.
    """
    generator = torch.Generator().manual_seed(0)
    away = []
    for group in groups:
        noise = 0.02 * torch.randn(group.response_mask.shape, generator=generator)
        moved = group.behaviour_log_probs + noise * group.response_mask
        away.append(replace(group, behaviour_log_probs=moved))
    return away


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["m2po", "clip_cov", "kl_cov"])
def test_tokens_that_a_loss_selects_do_not_depend_on_the_split_into_microbatches(
    policy_path: str, loss_type: str
) -> None:
    own = {"second_moment": 1e-4} if loss_type == "m2po" else {"cov_fraction": 0.2}
    own |= {"cov_band": (0.1, 9.0)} if loss_type == "clip_cov" else {}
    results = []
    for microbatch in (2, 12):
        loss = {"type": loss_type, **own}
        pair = Pair(policy_path, k=2, loss=loss, optim={"microbatch": microbatch})
        pair.sync()
        groups = away_from_ratio_one(pair.rollouts())
        results.append(pair.learner.update([groups]).steps)
    for split, whole in zip(*results, strict=True):
        assert split.loss == pytest.approx(whole.loss, abs=1e-4)
        # The clipped tokens may differ by one.
        assert split.clip_fraction == pytest.approx(whole.clip_fraction, abs=0.01)
    assert (results[0][1].clip_fraction > 0) == (loss_type != "kl_cov")


@pytest.mark.slow
def test_a_loss_named_by_reference_trains_the_same_bits_as_by_its_name(policy_path: str) -> None:
    by_reference = {
        "type": "grpo_trainable.algo.losses:grpo_clip",
        "advantage": "grpo_trainable.algo.advantages:group_std",
    }
    results = []
    for loss in ({}, by_reference):
        pair = Pair(policy_path, k=2, loss=loss)
        rounds = [a_round(pair) for _ in range(2)]
        results.append([(updated.steps, updated.kl) for updated, _ in rounds])
        results.append(checksum(unique_parameters(pair.learner.policy)))
    assert results[:2] == results[2:]


@pytest.mark.slow
def test_a_users_loss_and_advantage_are_what_a_step_minimises(
    policy_path: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def loss(log_probs, old_log_probs, advantages, mask, *, clip_low, clip_high):\n"
        "    return -advantages * log_probs * (1 + clip_high - clip_low)\n"
        "def advantage(rewards, *, eps):\n"
        "    return rewards - 0.25\n"
    )
    mine = {"type": f"{path}:loss", "advantage": f"{path}:advantage", "clip_high": 0.5}
    pair = Pair(policy_path, loss=mine)
    pair.sync()
    groups = pair.rollouts()
    before = pair.weights()
    updated = pair.learner.update([groups])
    # With fresh rollouts, log π is the recorded log-prob. The loss averages over the tokens of each
    # response, and then over the responses.
    rewards = torch.stack([group.rewards for group in groups])
    means = torch.stack(
        [
            (group.behaviour_log_probs.sum(dim=1) / group.response_mask.sum(dim=1))
            for group in groups
        ]
    )
    expected = float((-(rewards - 0.25) * means * 1.3).mean())
    assert updated.steps[0].loss == pytest.approx(expected, rel=1e-4)
    assert updated.steps[0].clip_fraction == 0.0
    assert updated.responses.advantages.tolist() == (rewards - 0.25).flatten().tolist()
    assert not equal(pair.weights(), before)


@pytest.mark.parametrize("key", ["type", "advantage"])
def test_a_wrong_function_is_refused_before_there_is_a_learner(
    policy_path: str, tmp_path: Path, key: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def wrong(*tensors, **settings):\n    return 0.0\n")
    with pytest.raises(PluginError, match=rf"^loss\.{key}=.*mine\.py:wrong: .* is a float$"):
        Pair(policy_path, loss={key: f"{path}:wrong"})


def test_a_mistake_in_mid_run_names_the_function_in_one_line(
    policy_path: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def only_small(rewards, *, eps):\n    assert len(rewards) < 4\n    return rewards"
    )
    pair = Pair(policy_path, loss={"advantage": f"{path}:only_small"})
    pair.sync()
    with pytest.raises(
        PluginError, match=r"only_small: raised AssertionError \(mine.py, line 2\)$"
    ):
        pair.learner.update([pair.rollouts()])


# ---- KL ------------------------------------------------------------------------------------------


def naive_log_probs(model: TransformerLM, groups: Sequence[RolloutGroup], config: GRPOConfig):
    """Return each response's summed log-prob, computed for each one alone by a plain softmax."""
    sums = []
    for group in groups:
        for ids, mask in zip(group.response_ids, group.response_mask, strict=True):
            response = ids[mask]
            row = torch.cat((group.prompt_ids, response))
            with torch.no_grad():
                logits = model(row[None, :-1])[0, len(group.prompt_ids) - 1 :]
            logits = logits.double() / config.rollout.temperature
            eos_id = read_tokenizer(config.model.path).eos_id
            logits[: config.rollout.min_new_tokens - 1, eos_id] = -torch.inf
            chosen = logits.log_softmax(-1).gather(1, response[:, None])
            sums.append(float(chosen.sum()))
    return torch.tensor(sums, dtype=torch.float64)


MODES = [
    {"k": 1},
    {"k": 2},
    {"k": 4, "k_mode": "minibatches", "optim": {"epochs": 2, "lr": 1e-2}},
    {"k": 2, "k_mode": "fresh_batches"},
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_kl_after_a_round_equals_a_plain_recomputation(
    policy_path: str, mode: dict[str, Any]
) -> None:
    pair = Pair(policy_path, **mode, loss={"kl_monitor_responses": "all"})
    for _ in range(2):
        pair.sync()
        batches = [pair.rollouts()]
        if mode.get("k_mode") == "fresh_batches":
            batches.append(pair.rollouts())
        groups = [group for batch in batches for group in batch]
        before = naive_log_probs(pair.learner.policy, groups, pair.config)
        updated = pair.learner.update(batches)
        after = naive_log_probs(pair.learner.policy, groups, pair.config)
        reference = naive_log_probs(pair.learner.reference.model, groups, pair.config)
        sampled = torch.cat([g.behaviour_log_probs.double().sum(dim=1) for g in groups])

        others = {"reference": reference, "previous": before, "behaviour": sampled}
        assert updated.kl.keys() == others.keys()
        for name, other in others.items():
            expected = float((after - other).mean())
            assert updated.kl[name].k1 == pytest.approx(expected, rel=1e-3, abs=1e-4)
        figures = updated.responses
        assert figures.policy_log_probs == pytest.approx(after.numpy(), abs=1e-3)
        assert figures.reference_log_probs == pytest.approx(reference.numpy(), abs=1e-3)
        assert figures.advantages.shape == after.shape
        assert min(updated.kl["reference"].k3, updated.kl["previous"].k3) > 0
    # The second round starts away from the reference.
    assert updated.kl["reference"] != updated.kl["previous"]


AT_THE_GENERATOR = {"placement": "disaggregated", "resources": {"reference": "generator"}}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_pass_of_the_reference_in_the_generator_measures_and_trains_the_same(
    policy_path: str, mode: dict[str, Any]
) -> None:
    mode = {**mode, "loss": {**mode.get("loss", {}), "kl_coef": 0.1}}
    here, there = Pair(policy_path, **mode), Pair(policy_path, **mode, **AT_THE_GENERATOR)
    assert there.learner.reference is None
    for _ in range(2):
        results = []
        for pair in (here, there):
            pair.sync()
            count = 2 if mode.get("k_mode") == "fresh_batches" else 1
            results.append(pair.learner.update([pair.rollouts() for _ in range(count)]))
        ours, theirs = results
        assert theirs.reference_nll_nats == pytest.approx(ours.reference_nll_nats, abs=1e-5)
        for name, drift in ours.kl.items():
            assert theirs.kl[name].k1 == pytest.approx(drift.k1, rel=1e-3, abs=1e-4)
            assert theirs.kl[name].k3 == pytest.approx(drift.k3, rel=1e-3, abs=1e-4)
        losses = [[step.loss for step in each.steps] for each in results]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-6)
        assert theirs.responses.reference_log_probs == pytest.approx(
            ours.responses.reference_log_probs, abs=1e-3
        )
    assert distance(here.weights(), there.weights()) < 1e-3


def test_a_group_without_the_log_probs_of_its_reference_is_never_trained_on(
    policy_path: str,
) -> None:
    pair = Pair(policy_path, **AT_THE_GENERATOR)
    pair.sync()
    groups = [replace(group, reference_log_probs=None) for group in pair.rollouts()]
    with pytest.raises(AssertionError, match="no log-probs under the reference"):
        pair.learner.update([groups])


@pytest.mark.slow
def test_kl_before_a_step_is_that_after_the_step_before(policy_path: str) -> None:
    one, two = Pair(policy_path, k=1), Pair(policy_path, k=2)
    for pair in (one, two):
        pair.sync()
    first = one.learner.update([one.rollouts()])
    start, second = two.learner.update([two.rollouts()]).steps
    assert start.kl["previous"] == Drift(k1=0.0, k3=0.0)
    reference = start.kl["reference"]
    assert (reference.k1, reference.k3) == pytest.approx((0.0, 0.0), abs=1e-6)
    for name, drift in first.kl.items():
        assert drift.k3 > 0
        assert second.kl[name].k1 == pytest.approx(drift.k1, rel=1e-4)
        assert second.kl[name].k3 == pytest.approx(drift.k3, rel=1e-4)


@pytest.mark.slow
def test_the_mismatch_is_measured_on_tokens_of_the_weights_that_the_learner_has(
    policy_path: str,
) -> None:
    pair = Pair(policy_path)
    pair.sync()
    groups = pair.rollouts()
    # A sampler that records each log-prob 0.1 too high has p / b = e^−0.1 at each token.
    off = [
        replace(g, behaviour_log_probs=g.behaviour_log_probs + 0.1 * g.response_mask)
        for g in groups
    ]
    # Half of the groups come from other weights, so their log-probs do not count.
    other = [replace(g, token_versions=torch.full_like(g.token_versions, 7)) for g in off]
    lengths = [group.response_mask.sum(dim=1).float().mean().item() for group in groups]
    updated = pair.learner.update([off[:2] + other[2:]])
    expected = (math.exp(-0.1) - 1 + 0.1) * sum(lengths[:2]) / 2
    assert updated.sampler_mismatch_nats == pytest.approx(expected, rel=1e-3)
    # No rollouts come from the learner's current weights any more.
    assert pair.learner.update([pair.rollouts()]).sampler_mismatch_nats is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_sampler_and_learner_agree_without_a_mismatch(
    policy_path: str, mode: dict[str, Any]
) -> None:
    pair = Pair(policy_path, **mode)
    pair.sync()
    batches = [pair.rollouts() for _ in range(2 if "fresh" in mode.get("k_mode", "") else 1)]
    mismatch = pair.learner.update(batches).sampler_mismatch_nats
    assert mismatch is not None
    assert 0 <= mismatch < 1e-8


# ---- Truncated importance sampling ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_importance_cap_changes_nothing_on_fresh_rollouts(
    policy_path: str, mode: dict[str, Any]
) -> None:
    ends = []
    for cap in (None, 2.0):
        pair = Pair(policy_path, **mode, loss={"importance_cap": cap, "kl_monitor": False})
        pair.sync()
        batches = [pair.rollouts() for _ in range(2 if "fresh" in mode.get("k_mode", "") else 1)]
        updated = pair.learner.update(batches)
        assert updated.steps[0].ratio_max == pytest.approx(1.0, abs=1e-5)
        ends.append(pair.weights())
    assert distance(*ends) < 1e-4


@pytest.mark.slow
def test_stale_tokens_weigh_what_the_cap_allows(policy_path: str) -> None:
    pair = Pair(policy_path, loss={"importance_cap": 1.05})
    pair.sync()
    stale = pair.rollouts()
    for _ in range(3):
        pair.learner.update([pair.rollouts()])
    batch = collated(pair.learner, stale)
    start = pair.learner._log_probs.without_gradient(pair.learner.policy, batch)
    mask = batch.response_mask
    weight = (start - batch.behaviour_log_probs).exp().clamp(max=1.05)
    assert ((weight == 1.05) & mask).any()
    assert ((weight < 1) & mask).any()
    # At the first step the ratio is 1: a token's loss is −A times its weight.
    token_loss = torch.where(mask, -batch.advantages * weight, 0.0)
    expected = (token_loss.sum(dim=1) / mask.sum(dim=1)).mean()
    (step,) = pair.learner.update([stale]).steps
    assert step.loss == pytest.approx(float(expected), rel=1e-4)
    assert step.ratio_max == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_monitoring_changes_no_weight(policy_path: str) -> None:
    ends = []
    for monitor in (True, False):
        pair = Pair(policy_path, k=2, k_mode="fresh_batches", loss={"kl_monitor": monitor})
        for _ in range(2):
            pair.sync()
            pair.learner.update([pair.rollouts(), pair.rollouts()])
        ends.append(pair.weights())
    assert equal(*ends)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_without_learning_the_kl_to_reference_and_previous_is_0(
    policy_path: str, mode: dict[str, Any]
) -> None:
    optim = {**mode.get("optim", {}), "lr": 0.0}
    rounds = 20 if mode["k"] == 1 else 4
    pair = Pair(policy_path, **{**mode, "rounds": rounds, "optim": optim})
    for _ in range(rounds):
        pair.sync()
        batches = [pair.rollouts() for _ in range(2 if "fresh" in mode.get("k_mode", "") else 1)]
        kl = pair.learner.update(batches).kl
        for other in ("reference", "previous"):
            assert kl[other].k1 == pytest.approx(0.0, abs=1e-5)
            assert 0 <= kl[other].k3 <= 1e-9
        assert abs(kl["behaviour"].k1) <= 1e-3
        assert 0 <= kl["behaviour"].k3 <= 1e-6


@pytest.mark.slow
def test_previous_is_the_policy_before_the_round_not_before_the_last_step(
    policy_path: str,
) -> None:
    one, four = (Pair(policy_path, k=k, optim={"lr": 1e-3}) for k in (1, 4))
    drifts = []
    for pair in (one, four):
        pair.sync()
        drifts.append(pair.learner.update([pair.rollouts()]).kl["previous"].k3)
    assert drifts[1] > 3 * drifts[0]


@pytest.mark.slow
def test_behaviour_kl_shows_staleness(policy_path: str) -> None:
    pair = Pair(policy_path, optim={"lr": 1e-3})
    pair.sync()
    stale = pair.rollouts()
    for _ in range(6):
        pair.sync()
        fresh = pair.learner.update([pair.rollouts()]).kl
        # The policy before the round sampled these tokens, so both KLs are the same.
        assert fresh["behaviour"].k3 == pytest.approx(fresh["previous"].k3, rel=0.02)
    late = pair.learner.update([stale]).kl
    assert late["behaviour"].k3 > 2 * late["previous"].k3


def test_mean_kl_of_all_responses_is_the_exact_kl_of_a_tiny_vocabulary() -> None:
    vocabulary, length = 4, 3
    shape = ModelConfig(
        vocab_size=vocabulary, context_length=8, d_model=8, num_layers=1, num_heads=1, d_ff=16
    )
    policy, reference = sharpened(shape, seed=0), sharpened(shape, seed=1)
    everything = torch.cartesian_prod(*[torch.arange(vocabulary)] * length)
    ids = torch.cat((torch.zeros(len(everything), 1, dtype=torch.int64), everything), dim=1)
    mask = torch.ones(len(ids), length, dtype=torch.bool)
    law = {"temperature": 0.9, "min_new_tokens": 1, "end_ids": (0,)}
    with torch.no_grad():
        log_p, log_q = (
            response_log_probs(model, ids[:, :-1], ids[:, 1:], mask, **law)[0].double()
            for model in (policy, reference)
        )
        p, q = (
            (model(ids[:, :-1]) / 0.9).double().log_softmax(-1) for model in (policy, reference)
        )
    weight = log_p.sum(dim=1).exp()  # the probability of each response
    assert float(weight.sum()) == pytest.approx(1.0, abs=1e-5)
    # By the chain rule, the KL is a sum over next tokens, each weighted by the probability of its
    # prefix. Each response adds its probability to all of its prefixes.
    exact = float((weight[:, None] * (p.exp() * (p - q)).sum(dim=-1)).sum())
    assert exact > 0.1
    for estimator in ("k1", "k3"):
        tokens = KL_ESTIMATORS[estimator](log_p, log_q, mask)
        assert float((weight * tokens.sum(dim=1)).sum()) == pytest.approx(exact, rel=1e-4)


def test_ratios_are_counted_in_their_bins(policy_path: str) -> None:
    pair = Pair(policy_path, k=3, optim={"lr": 1e-2})
    pair.sync()
    groups = pair.rollouts()
    steps = pair.learner.update([groups]).steps
    tokens = sum(group.num_tokens for group in groups)
    assert [sum(step.ratio_counts) for step in steps] == [tokens] * 3
    middle = len(RATIO_EDGES) // 2 - 1
    assert RATIO_EDGES[middle] < 1 < RATIO_EDGES[middle + 1]
    assert steps[0].ratio_counts[middle] == tokens  # the policy is the one that sampled
    assert steps[2].ratio_counts[middle] < tokens


def test_stale_rollouts_have_a_smaller_effective_sample_size(policy_path: str) -> None:
    pair = Pair(policy_path, k=2)
    pair.sync()
    stale = pair.rollouts()
    fresh, moved = pair.learner.update([pair.rollouts()]).steps
    assert fresh.ess_fraction == pytest.approx(1.0, abs=1e-6)  # the policy is the one that sampled
    assert moved.ess_fraction < 1
    policy = naive_log_probs(pair.learner.policy, stale, pair.config)
    sampled = torch.cat([g.behaviour_log_probs.double().sum(dim=1) for g in stale])
    weights = (policy - sampled).exp()
    expected = float(weights.sum() ** 2 / weights.square().sum()) / len(weights)
    updated = pair.learner.update([stale])
    assert updated.steps[0].ess_fraction == pytest.approx(expected, rel=1e-3)
    row = update_metrics(updated, stale)
    mean = sum(step.ess_fraction for step in updated.steps) / 2
    assert row["off_policy/ess_fraction"] == pytest.approx(mean)


# ---- KL in the reward, and its steered coefficient ---------------------------------------------


def moved(policy_path: str, **loss: Any) -> Pair:
    """Return a pair whose policy has moved away from the reference."""
    pair = Pair(policy_path, loss={"advantage": "group_mean", **loss})
    pair.sync()
    pair.learner.update([pair.rollouts()])
    pair.sync()
    return pair


def sampled_kl(pair: Pair, groups: Sequence[RolloutGroup]) -> Tensor:
    """Return Σ (log b − log π_ref) for each response, (groups, G)."""
    annotated = pair.learner.reference.annotate(groups)
    return torch.stack(
        [(g.behaviour_log_probs - g.reference_log_probs).sum(dim=1) for g in annotated]
    )


@pytest.mark.slow
def test_kl_in_the_reward_is_taken_off_before_the_advantage(policy_path: str) -> None:
    pair = moved(policy_path, kl_coef=0.1, kl_in="reward")
    groups = pair.rollouts()
    kl = sampled_kl(pair, groups)
    assert kl.abs().max() > 0.1
    updated = pair.learner.update([groups])
    rewards = torch.stack([group.rewards for group in groups]) - 0.1 * kl
    expected = ADVANTAGES["group_mean"](rewards, eps=1e-8)
    assert updated.responses.advantages == pytest.approx(expected.flatten().numpy(), abs=1e-5)
    # On-policy, the loss is minus the mean advantage, which is 0, and has no separate KL term.
    assert updated.steps[0].loss == pytest.approx(0.0, abs=1e-5)
    assert updated.responses.reference_log_probs is not None
    assert updated.kl_coefficient == 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_steered_coefficient_follows_the_kl_and_is_kept_in_the_state(
    policy_path: str, kl_in: str
) -> None:
    steering = {"kl_coef": 0.5, "kl_in": kl_in, "kl_target": 1e-3, "kl_gain": 0.5}
    pair = moved(policy_path, **steering)
    # `moved` trained a round that the reference sampled, so the KL was 0. The relative error,
    # −1, was clipped to −0.2, so the coefficient was multiplied by 1 − 0.5 · 0.2.
    groups = pair.rollouts()
    assert float(sampled_kl(pair, groups).mean()) > 2e-3
    updated = pair.learner.update([groups])
    assert updated.kl_coefficient == pytest.approx(0.5 * 0.9)
    state = pair.learner.state()
    assert state.counters["kl_coef"] == pytest.approx(0.5 * 0.9 * 1.1)

    restored = Pair(policy_path, loss={"advantage": "group_mean", **steering})
    restored.learner.load_state(state)
    batch = pair.rollouts()
    results = [learner.update([batch]) for learner in (pair.learner, restored.learner)]
    assert results[0].steps == results[1].steps
    assert results[0].kl_coefficient == results[1].kl_coefficient == state.counters["kl_coef"]
    assert restored.learner.state().counters == pair.learner.state().counters

    fixed = Pair(policy_path, loss={"kl_coef": 0.5})
    fixed.learner.load_state(state)
    assert fixed.learner.update([batch]).kl_coefficient == 0.5
    assert "kl_coef" not in fixed.learner.state().counters


# ---- Long responses ----------------------------------------------------------------------------


def cut_off(groups: Sequence[RolloutGroup], rows: Sequence[int]) -> list[RolloutGroup]:
    """Return the groups with the responses `rows` of each group marked as unfinished."""
    finished = torch.ones(len(groups[0].finished), dtype=torch.bool)
    finished[list(rows)] = False
    return [replace(group, finished=finished) for group in groups]


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
def test_filter_leaves_cut_off_responses_out_of_the_loss_alone(
    policy_path: str, aggregation: str
) -> None:
    loss = {"advantage": "group_mean", "aggregation": aggregation}
    pair = Pair(policy_path, loss=loss, rollout={"overlong": "filter"}, optim={"microbatch": 5})
    pair.sync()
    groups = cut_off(pair.rollouts(), rows=[1])
    rewards = torch.stack([group.rewards for group in groups])
    lengths = torch.stack([group.response_mask.sum(dim=1) for group in groups]).float()
    # The unfinished response still counts in the group mean. At ratio 1, a token's loss is −A.
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    kept = torch.tensor([True, False, True])
    expected = {
        "sequence_mean": -advantages[:, kept].sum() / rewards.numel(),
        "token_mean": -(advantages * lengths)[:, kept].sum() / lengths[:, kept].sum(),
        "constant": -(advantages * lengths)[:, kept].sum() / (10 * rewards.numel()),
    }[aggregation]
    updated = pair.learner.update([groups])
    assert updated.steps[0].loss == pytest.approx(float(expected), abs=1e-5)
    assert updated.responses.advantages == pytest.approx(advantages.flatten().numpy(), abs=1e-6)
    # The step counts only the tokens in the loss, but log-probs cover all responses.
    assert sum(updated.steps[0].ratio_counts) == int(lengths[:, kept].sum())
    assert (updated.responses.policy_log_probs < 0).all()


def test_a_step_whose_responses_were_all_cut_off_has_no_gradient(policy_path: str) -> None:
    pair = Pair(policy_path, rollout={"overlong": "filter"})
    pair.sync()
    before = pair.weights()
    (step,) = pair.learner.update([cut_off(pair.rollouts(), rows=[0, 1, 2])]).steps
    assert (step.loss, step.grad_norm, step.skipped) == (0.0, 0.0, False)
    assert equal(pair.weights(), before)


@pytest.mark.slow
def test_lengths_are_taken_off_the_reward_before_the_advantage(policy_path: str) -> None:
    pair = Pair(
        policy_path,
        loss={"advantage": "group_mean"},
        rollout={"overlong": "penalty", "overlong_buffer": 5, "overlong_penalty": 0.5},
        task={"length_penalty": 0.01, "length_target": 4},
    )
    pair.sync()
    # The policy samples 10, 8 and 3 tokens. Equal lengths would cancel in the mean of the group.
    sampled = torch.arange(10) < torch.tensor([[10], [8], [3]])
    groups = [replace(group, response_mask=sampled) for group in pair.rollouts()]
    rewards = torch.stack([group.rewards for group in groups])
    # The penalty for overlong responses is 0.5 × (5, 3, 0) / 5, and the other 0.01 × (6, 4, 1).
    shaped = rewards - torch.tensor([0.56, 0.34, 0.01])
    expected = shaped - shaped.mean(dim=1, keepdim=True)
    advantages = pair.learner.update([groups]).responses.advantages
    assert advantages == pytest.approx(expected.flatten().numpy(), abs=1e-6)


# ---- Non-finite steps --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("field", ["rewards", "behaviour_log_probs"])
def test_step_that_is_not_finite_changes_nothing_and_is_counted(
    policy_path: str, field: str
) -> None:
    pair = Pair(policy_path)
    pair.sync()
    groups = pair.rollouts()
    pair.learner.update([groups])
    before, optimizer = pair.weights(), pair.learner.state().optimizer

    spoilt = getattr(groups[0], field).clone()
    spoilt.view(-1)[0] = math.nan
    updated = pair.learner.update([with_first(groups, **{field: spoilt})])
    assert [step.skipped for step in updated.steps] == [True]
    assert updated.skipped_steps == 1
    assert (updated.version, updated.round) == (1, 2)
    assert equal(pair.weights(), before)
    assert equal(pair.learner.state().optimizer, optimizer)

    after = pair.learner.update([groups])
    assert (after.version, after.skipped_steps) == (2, 1)
    assert not equal(pair.weights(), before)


@pytest.mark.slow
def test_a_ratio_beyond_float32_costs_no_step_and_is_counted(policy_path: str) -> None:
    pair = Pair(policy_path, k=2)
    pair.sync()
    groups = pair.rollouts()
    # For one token each of the best and the worst response, the recorded probability is e^-100
    # times the real one.
    unlikely = groups[0].behaviour_log_probs.clone()
    for row in (groups[0].rewards.argmax(), groups[0].rewards.argmin()):
        unlikely[row, 0] -= 100
    # The learner treats tokens of its current version differently, so these tokens are older.
    older = groups[0].token_versions - 1
    spoilt = with_first(groups, behaviour_log_probs=unlikely, token_versions=older)
    updated = pair.learner.update([spoilt])
    assert updated.skipped_steps == 0
    assert all(math.isfinite(step.grad_norm) for step in updated.steps)
    assert [step.ratio_max for step in updated.steps] == pytest.approx([math.exp(20)] * 2, rel=1e-4)
    assert step_columns(updated)["bounded_tokens"] == [2, 2]


@pytest.mark.slow
def test_too_many_steps_in_a_row_that_are_not_finite_end_the_trial(policy_path: str) -> None:
    pair = Pair(policy_path, optim={"max_skipped_steps": 2})
    pair.sync()
    groups = pair.rollouts()
    spoilt = with_first(groups, rewards=torch.tensor([math.nan, 0.0, 1.0]))
    for batch in (spoilt, spoilt, groups, spoilt, spoilt):
        pair.learner.update([batch])
    with pytest.raises(RuntimeError, match=r"optim\.max_skipped_steps=2"):
        pair.learner.update([spoilt])


# ---- Learning rate -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "factor"),
    [
        ("constant", lambda done: 1.0),
        ("linear", lambda done: 1 - done),
        ("cosine", lambda done: (1 + math.cos(math.pi * done)) / 2),
    ],
)
def test_learning_rate_is_a_function_of_the_gradient_steps_done(
    policy_path: str, schedule: str, factor: Any
) -> None:
    pair = Pair(policy_path, rounds=3, k=2, optim={"lr": 1e-3, "schedule": schedule})
    pair.sync()
    rates = [s.lr for _ in range(3) for s in pair.learner.update([pair.rollouts()]).steps]
    assert rates == [pytest.approx(1e-3 * factor(i / 6), rel=1e-12) for i in range(6)]


def rates(optimizer: PolicyOptimizer, weight: torch.Tensor, steps: int) -> list[float]:
    taken = []
    for _ in range(steps):
        weight.grad = torch.ones(1)
        taken.append(optimizer.step(loss=0.0).lr)
    return taken


@pytest.mark.parametrize(
    ("schedule", "decay"),
    [
        ("constant", [3e-3, 3e-3, 3e-3, 3e-3]),
        ("linear", [3e-3, 2.25e-3, 1.5e-3, 0.75e-3]),
        # 3e-3 (1 + cos(π i / 4)) / 2, where cos(π / 4) = √½
        ("cosine", [3e-3, 1.5e-3 * (1 + 0.5**0.5), 1.5e-3, 1.5e-3 * (1 - 0.5**0.5)]),
    ],
)
def test_learning_rate_rises_with_each_step_of_the_warm_up_then_decays(
    schedule: str, decay: list[float]
) -> None:
    optim = {"lr": 3e-3, "warmup_rounds": 1, "schedule": schedule}
    config = GRPOConfig.from_dict({"rounds": 3, "k": 2, "optim": optim})
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = PolicyOptimizer({"w": weight}, config)
    expected = [1e-3, 2e-3, *decay]
    assert rates(optimizer, weight, 1) == [pytest.approx(expected[0], rel=1e-12)]

    resumed = PolicyOptimizer({"w": weight}, config)  # in the middle of round 1
    resumed.load_state(optimizer.tensors(), optimizer.counters())
    assert rates(resumed, weight, 5) == [pytest.approx(rate, rel=1e-12) for rate in expected[1:]]


def test_warm_up_longer_than_the_trial_never_reaches_the_learning_rate() -> None:
    optim = {"lr": 1e-3, "warmup_rounds": 4, "schedule": "linear"}
    config = GRPOConfig.from_dict({"rounds": 2, "optim": optim})
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = PolicyOptimizer({"w": weight}, config)
    assert rates(optimizer, weight, 2) == [pytest.approx(2e-4), pytest.approx(4e-4)]


# ---- Checkpoints -------------------------------------------------------------------------------


@pytest.mark.slow
def test_restored_learner_goes_on_bit_for_bit(policy_path: str) -> None:
    values: dict[str, Any] = {
        "k": 2,
        "k_mode": "minibatches",
        "optim": {"lr": 1e-2, "weight_decay": 0.1, "schedule": "cosine"},
    }
    pair = Pair(policy_path, **values)
    pair.sync()
    batches = [pair.rollouts() for _ in range(3)]
    pair.learner.update([batches[0]])
    state = pair.learner.state()
    stored, stored_optimizer = copy(state.policy), copy(state.optimizer)
    expected = [pair.learner.update([batch]) for batch in batches[1:]]
    assert equal(state.policy, stored), "the state shares storage with the policy"

    restored = Pair(policy_path, **values)
    restored.learner.load_state(state)
    got = [restored.learner.update([batch]) for batch in batches[1:]]
    assert [u.steps for u in got] == [u.steps for u in expected]
    assert [(u.version, u.round) for u in got] == [(u.version, u.round) for u in expected]
    assert equal(restored.weights(), pair.weights())
    assert equal(restored.learner.state().optimizer, pair.learner.state().optimizer)
    assert equal(state.policy, stored), "the restored learner trains on the state's own tensors"
    assert equal(state.optimizer, stored_optimizer)


@pytest.mark.slow
def test_learner_that_takes_anothers_state_keeps_its_own_settings(policy_path: str) -> None:
    # In population based training, a trial continues from a better trial's checkpoint, with its own
    # settings.
    donor = Pair(policy_path)
    donor.sync()
    donor.learner.update([donor.rollouts()])
    taker = Pair(policy_path, optim={"lr": 1e-3}, k=2)
    taker.learner.load_state(donor.learner.state())
    assert equal(taker.weights(), donor.weights())
    taker.sync()
    steps = taker.learner.update([taker.rollouts()]).steps
    assert [step.lr for step in steps] == [1e-3, 1e-3]
    assert taker.learner.version == 3


@pytest.mark.slow
def test_state_before_the_first_step_restores(policy_path: str) -> None:
    pair = Pair(policy_path)
    pair.sync()
    groups = pair.rollouts()
    restored = Pair(policy_path)
    restored.learner.load_state(pair.learner.state())
    assert restored.learner.update([groups]).steps == pair.learner.update([groups]).steps


@pytest.mark.slow
def test_skipped_steps_are_restored(policy_path: str) -> None:
    pair = Pair(policy_path, optim={"max_skipped_steps": 1})
    pair.sync()
    spoilt = with_first(pair.rollouts(), rewards=torch.full((3,), math.nan))
    pair.learner.update([spoilt])
    restored = Pair(policy_path, optim={"max_skipped_steps": 1})
    restored.learner.load_state(pair.learner.state())
    with pytest.raises(RuntimeError, match="2 gradient steps in a row"):
        restored.learner.update([spoilt])


def test_state_trained_against_another_reference_is_refused(
    policy_path: str, tmp_path: Path
) -> None:
    pair = Pair(policy_path)
    state = pair.learner.state()
    other = TransformerLM(pair.learner.policy.config, seed=4)
    save_policy(tmp_path / "other", other, read_tokenizer(None), torch.float32)
    with pytest.raises(ValueError, match=r"reference policy has checksum .*model\.path=.*other"):
        Pair(str(tmp_path / "other")).learner.load_state(state)
