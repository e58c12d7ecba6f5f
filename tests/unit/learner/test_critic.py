"""The learner's critic, with a real policy, real rollouts and no Ray."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pairs import Pair, copy, distance, equal
from policies import write_quick_policy

from grpo_trainable.algo import explained_variance
from grpo_trainable.protocol.rollout import RolloutGroup

GAE = {"advantage": "gae", "whiten": False}


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


def pair_with(policy_path: str, body: str = "own", **values: Any) -> Pair:
    critic = {"body": body, "lr": 1e-2, **values.pop("critic", {})}
    pair = Pair(policy_path, loss=GAE | values.pop("loss", {}), critic=critic, **values)
    pair.sync()
    return pair


@pytest.mark.slow
def test_a_critic_that_knows_nothing_leaves_the_return(policy_path: str) -> None:
    pair = pair_with(policy_path, loss={"gae_lambda": 1.0})
    groups = pair.rollouts()
    for group, advantages in zip(
        groups, pair.learner._batches.estimate(groups).advantages, strict=True
    ):
        expected = group.rewards[:, None] * group.response_mask
        assert advantages.equal(expected)


def test_whitened_advantages_have_mean_zero_over_the_tokens(policy_path: str) -> None:
    pair = pair_with(policy_path, loss={"whiten": True})
    groups = pair.rollouts()
    advantages = pair.learner._batches.estimate(groups).advantages
    tokens = torch.cat([a[g.response_mask] for g, a in zip(groups, advantages, strict=True)])
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-6)
    assert float(tokens.std()) == pytest.approx(1, abs=1e-5)


@pytest.mark.numerics
@pytest.mark.slow
@pytest.mark.parametrize("body", ["own", "shared"])
def test_neither_microbatches_nor_padding_change_a_step(policy_path: str, body: str) -> None:
    results = []
    for optim in ({"microbatch": 12}, {"microbatch": 5}, {"microbatch_tokens": 40}):
        pair = pair_with(policy_path, body, optim={"lr": 1e-3, **optim}, k=2)
        updated = pair.learner.update([pair.rollouts()])
        critic = copy(pair.learner._state.critic.parameters)
        results.append((updated, pair.weights(), critic))
    (expected, weights, critic), *others = results
    for updated, their_weights, their_critic in others:
        assert distance(weights, their_weights) < 2e-5
        assert distance(critic, their_critic) < 2e-5
        for step, their_step in zip(expected.steps, updated.steps, strict=True):
            assert their_step.critic.loss == pytest.approx(step.critic.loss, rel=1e-4)
            assert their_step.critic.clip_fraction == pytest.approx(step.critic.clip_fraction)


@pytest.mark.slow
@pytest.mark.parametrize("body", ["own", "shared"])
def test_the_critic_learns_what_responses_earn(policy_path: str, body: str) -> None:
    settings = {"clip": 0.0, "lr": 1e-2}
    pair = pair_with(policy_path, body, critic=settings, loss={"gae_lambda": 1.0}, optim={"lr": 0})
    if body == "own":
        before = pair.weights()
    groups = pair.rollouts()
    explained, losses = [], []
    for _ in range(24):
        updated = pair.learner.update([groups])
        explained.append(updated.critic.explained_variance)
        losses.append(updated.steps[0].critic.loss)
    assert explained[0] == 0.0
    assert losses[-1] < losses[0] / 2
    assert updated.critic.value_mean == pytest.approx(updated.critic.return_mean, abs=0.2)
    if body == "own":
        assert explained[-1] > 0.5
        assert equal(pair.weights(), before)


@pytest.mark.slow
def test_a_critic_knows_what_is_written_and_not_what_comes_next(policy_path: str) -> None:
    sampling = {"prompts": 16, "group_size": 4, "min_new_tokens": 2, "max_new_tokens": 2}
    pair = pair_with(
        policy_path, critic={"clip": 0.0}, rollout=sampling, optim={"lr": 0}, rounds=1000
    )
    # The reward of a response depends only on its first token.
    tokens = pair.weights()["embedding.weight"]  # (V, D)
    earned = tokens @ torch.randn(tokens.shape[1], generator=torch.Generator().manual_seed(5))
    earned = earned / earned.std()

    def rollouts() -> list[RolloutGroup]:
        return [replace(g, rewards=earned[g.response_ids[:, 0]]) for g in pair.rollouts()]

    for _ in range(90):
        pair.learner.update([rollouts()])
    others = [group for _ in range(8) for group in rollouts()]
    values = torch.cat(pair.learner._batches.values(others))
    returns = torch.cat([group.rewards for group in others])
    before, after = (explained_variance(values[:, state], returns) for state in (0, 1))
    assert before is not None
    assert after is not None
    assert after > 0.5
    assert before < 0.1


@pytest.mark.numerics
@pytest.mark.slow
def test_a_body_of_its_own_leaves_the_gradient_of_the_policy_alone(policy_path: str) -> None:
    weights = []
    for body, lr in (("own", 1e-2), ("own", 1e-4), ("shared", 1e-2)):
        pair = pair_with(policy_path, body, critic={"lr": lr}, loss={"gae_lambda": 1.0})
        groups = pair.rollouts()
        pair.learner.update([groups])
        weights.append(pair.weights())
        pair.learner.update([groups])
        weights.append(pair.weights())
    own, own_later, slow, slow_later, shared, shared_later = weights
    assert equal(own, slow)
    # The critic's first values are 0, and a head of zeros sends no gradient to the body.
    assert distance(own, shared) < 1e-6
    assert not equal(own_later, slow_later)  # the advantages differ
    assert distance(own_later, shared_later) > 1e-4


def test_a_critic_is_not_among_what_is_published_or_kept_as_policy(policy_path: str) -> None:
    pair, plain = pair_with(policy_path), Pair(policy_path)
    weights = pair.learner._weights().tensors
    state = pair.learner.state()
    assert weights.keys() == state.policy.keys() == plain.learner.state().policy.keys()
    assert not any("critic" in name for name in weights)
    named = {name for name in state.optimizer if not name.count("/exp_avg")}
    assert {"critic/head.weight", "critic/head.bias"} <= named
    assert "critic/body.embedding.weight" in named


@pytest.mark.numerics
@pytest.mark.slow
@pytest.mark.parametrize("body", ["own", "shared"])
def test_a_learner_goes_on_from_its_state_bit_for_bit(policy_path: str, body: str) -> None:
    def step(pair: Pair, prompt: int) -> Any:
        pair.next_prompt = prompt
        pair.sync()
        updated = pair.learner.update([pair.rollouts()])
        return updated.steps, updated.critic, pair.weights(), pair.learner.state().optimizer

    first = pair_with(policy_path, body, k=2)
    step(first, 0)
    state = first.learner.state()
    second = pair_with(policy_path, body, k=2)
    second.learner.load_state(state)
    expected, found = step(first, 4), step(second, 4)
    assert found[:2] == expected[:2]
    assert equal(found[2], expected[2])
    assert equal(found[3], expected[3])


@pytest.mark.slow
def test_a_critic_begins_anew_where_the_state_has_none(policy_path: str) -> None:
    plain = Pair(policy_path)
    plain.sync()
    plain.learner.update([plain.rollouts()])
    state = plain.learner.state()
    pair = pair_with(policy_path, "own")
    pair.learner.load_state(state)
    assert equal(pair.weights(), plain.weights())
    assert not pair.learner._state.critic.parameters["critic/head.weight"].any()
    assert pair.learner.update([pair.rollouts()]).critic.value_mean == 0
    # A learner without a critic ignores the saved critic.
    plain.learner.load_state(pair.learner.state())
    assert equal(plain.weights(), pair.weights())


@pytest.mark.numerics
@pytest.mark.slow
def test_a_token_answers_for_its_own_kl(policy_path: str) -> None:
    loss = {"kl_coef": 0.5, "kl_in": "reward", "gae_lambda": 1.0}
    pair = pair_with(policy_path, loss=loss, optim={"lr": 1e-2})
    pair.learner.update([pair.rollouts()])
    pair.sync()
    groups = pair.learner.reference.annotate(pair.rollouts())
    values = pair.learner._batches.values(groups)
    estimated = pair.learner._batches.estimate(groups).advantages
    for group, v, advantages in zip(groups, values, estimated, strict=True):
        kl = group.behaviour_log_probs - group.reference_log_probs
        to_go = kl.flip(1).cumsum(dim=1).flip(1)
        expected = (group.rewards[:, None] - 0.5 * to_go - v) * group.response_mask
        torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-5)
        assert float(kl.abs().max()) > 1e-3
