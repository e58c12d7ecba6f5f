"""Control policies: the distribution of their actions, and their episodes as rows of a batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_trainable.algo import group_to_go
from grpo_trainable.algo.advantages import group_mean
from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.control.policy import ControlPolicy
from grpo_trainable.control.spaces import HELD_OUT, Spaces, episode_seed
from grpo_trainable.control.task import ControlTask
from grpo_trainable.control.tokenizer import control_tokenizer
from grpo_trainable.learner.advantages import token_rewards
from grpo_trainable.learner.log_probs import LogProbs
from grpo_trainable.learner.minibatches import largest_microbatch, with_observations
from grpo_trainable.protocol.rollout import RolloutGroup, collate

pytestmark = pytest.mark.numerics

CHOICES = Spaces(observation=(2,), scale=(1.0, 4.0), choices=3, first=5)
NUMBERS = Spaces(observation=(2,), scale=1.0, choices=None, low=(-2.0, 0.0), high=(2.0, 10.0))
IMAGE = Spaces(observation=(20, 18, 3), scale=255.0, choices=2)


def with_law(policy: ControlPolicy, law: list[float], std: float = 1.0) -> ControlPolicy:
    """Set the last layer so that the policy outputs `law` for any observation."""
    with torch.no_grad():
        policy.head.weight.zero_()
        assert policy.head.bias is not None
        policy.head.bias.copy_(torch.tensor(law))
        if policy.log_std is not None:
            policy.log_std.fill_(math.log(std))
    return policy.requires_grad_(False)


# ---- Discrete actions --------------------------------------------------------------------------


def test_probabilities_of_choices_are_those_of_the_softmax():
    """Logits log 1, log 2 and log 1 give the probabilities 1/4, 1/2 and 1/4.

    At temperature 1/2, the probabilities are squared and normalised, which gives 1/6, 4/6 and 1/6.
    """
    policy = with_law(ControlPolicy(CHOICES, 0), [0.0, math.log(2), 0.0])
    hidden = policy.hidden(torch.zeros(3, 2))
    log_probs, entropy = policy.log_probs(hidden, torch.arange(3), 1.0)
    assert log_probs.exp().tolist() == pytest.approx([0.25, 0.5, 0.25])
    assert entropy.tolist() == pytest.approx([1.5 * math.log(2)] * 3)
    colder, _ = policy.log_probs(hidden, torch.arange(3), 0.5)
    assert colder.exp().tolist() == pytest.approx([1 / 6, 4 / 6, 1 / 6])


def test_choices_are_drawn_by_inverse_cdf():
    policy = with_law(ControlPolicy(CHOICES, 0), [0.0, math.log(2), 0.0])
    uniform = torch.tensor([[0.0], [0.2], [0.3], [0.7], [0.8], [1 - 2**-24]])
    actions, log_probs = policy.act(torch.zeros(6, 2), uniform, 1.0)
    assert actions.tolist() == [0, 0, 1, 1, 2, 2]
    assert log_probs.exp().tolist() == pytest.approx([0.25, 0.25, 0.5, 0.5, 0.25, 0.25])
    assert policy.in_environment(actions).tolist() == [5, 5, 6, 6, 7, 7]


def test_temperature_0_takes_the_most_likely_choice():
    policy = with_law(ControlPolicy(CHOICES, 0), [0.0, math.log(2), 0.0])
    actions, log_probs = policy.act(torch.zeros(1, 2), torch.tensor([[0.0]]), 0.0)
    assert actions.tolist() == [1]
    assert log_probs.tolist() == pytest.approx([math.log(0.5)])


# ---- Continuous actions ------------------------------------------------------------------------


def test_the_density_of_a_squeezed_number_by_hand():
    """Check the density of u = tanh(z) at z = 1, where z is distributed as N(0, 1).

    The normal log-density is -1/2 - log(2π)/2, and du/dz = 1 - tanh²(1) = 0.41997.
    """
    policy = with_law(ControlPolicy(NUMBERS, 0), [0.0, 0.0])
    hidden = policy.hidden(torch.zeros(1, 2))
    found, _ = policy.log_probs(hidden, torch.tensor([[1.0, 0.0]]), 1.0)
    normal = -0.5 * math.log(2 * math.pi)
    assert found.tolist() == pytest.approx([(normal - 0.5 - math.log(0.4199743)) + normal])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_density_over_the_bounds_is_one_and_its_entropy_is_right_on_average(temperature):
    one = Spaces(observation=(2,), scale=1.0, choices=None, low=(-1.0,), high=(1.0,))
    policy = with_law(ControlPolicy(one, 0), [0.3], std=0.7)
    z = torch.linspace(-8, 8, 8001)[:, None]
    log_probs, entropy = policy.log_probs(policy.hidden(torch.zeros(8001, 2)), z, temperature)
    u = z[:, 0].double().tanh()
    density = log_probs.double().exp()
    assert float(torch.trapezoid(density, u)) == pytest.approx(1.0, abs=1e-4)
    whole = -torch.trapezoid(density * log_probs.double(), u)
    assert float(torch.trapezoid(density * entropy.double(), u)) == pytest.approx(
        float(whole), abs=1e-4
    )


def test_numbers_are_drawn_by_inverse_cdf_and_lie_within_the_bounds():
    policy = with_law(ControlPolicy(NUMBERS, 0), [0.5, -1.0], std=0.5)
    uniform = torch.tensor([[0.5, 0.8413447], [0.0, 1 - 2**-24]])
    actions, log_probs = policy.act(torch.zeros(2, 2), uniform, 1.0)
    assert actions[0].tolist() == pytest.approx([0.5, -0.5], abs=1e-5)
    given = policy.in_environment(actions)
    assert given[0].tolist() == pytest.approx([2 * math.tanh(0.5), 5 + 5 * math.tanh(-0.5)], 1e-4)
    assert bool(((given > torch.tensor([-2.0, 0.0])) & (given < torch.tensor([2.0, 10.0]))).all())
    assert bool(log_probs.isfinite().all())


def test_temperature_0_takes_the_mean_and_scales_of_it_the_spread():
    policy = with_law(ControlPolicy(NUMBERS, 0), [0.5, -1.0], std=0.5)
    uniform = torch.tensor([[0.8413447, 0.8413447]])
    cold, _ = policy.act(torch.zeros(1, 2), uniform, 0.0)
    assert cold[0].tolist() == pytest.approx([0.5, -1.0], abs=1e-6)
    warm, _ = policy.act(torch.zeros(1, 2), uniform, 2.0)
    assert warm[0].tolist() == pytest.approx([1.5, 0.0], abs=1e-5)


# ---- Networks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spaces", [CHOICES, NUMBERS, IMAGE])
def test_a_policy_is_drawn_from_its_seed_and_scores_what_it_did(spaces: Spaces):
    first, again, other = (ControlPolicy(spaces, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, again.weights()[name]) for name, a in first.weights().items())
    assert not torch.equal(first.head_weight, other.head_weight)
    rng = torch.Generator().manual_seed(0)
    seen = torch.randint(0, 256, (7, *spaces.observation), generator=rng, dtype=torch.uint8)
    uniform = torch.rand(7, spaces.action_numbers or 1, generator=rng)
    actions, log_probs = first.act(seen, uniform, 0.9)
    found, _ = first.log_probs(first.hidden(seen), actions, 0.9)
    assert found.tolist() == pytest.approx(log_probs.tolist(), abs=1e-6)


def test_numbers_are_divided_by_what_they_reach():
    policy = ControlPolicy(CHOICES, 0)
    plain = ControlPolicy(replace(CHOICES, scale=1.0), 0)
    seen = torch.tensor([[1.0, 2.0]])
    assert torch.equal(policy.hidden(seen), plain.hidden(torch.tensor([[1.0, 0.5]])))


# ---- Tokens and tasks --------------------------------------------------------------------------


def test_choices_have_names_and_a_prompt_is_one_token():
    tokenizer = control_tokenizer(CHOICES)
    assert tokenizer.decode([0, 2, 1]) == "5 7 6"
    assert tokenizer.encode_prompt("seed 17") == tokenizer.encode_prompt("seed 3") == [3]
    assert tokenizer.eos_id not in (0, 1, 2, 3)
    assert control_tokenizer(NUMBERS).decode([0, 0]) == "act act"


def test_seeds_that_are_held_out_are_none_that_are_trained_on():
    config = GRPOConfig.from_dict({"task": {"name": "control"}})
    task = ControlTask(config.task, 7)
    assert task.train_example(3).ground_truth == {"seed": 3} == {"seed": episode_seed("train", 3)}
    assert [e.ground_truth for e in task.eval_examples(2)] == [
        {"seed": HELD_OUT},
        {"seed": HELD_OUT + 1},
    ]


# ---- Advantages --------------------------------------------------------------------------------


def test_what_is_earned_from_here_on_is_compared_with_the_group():
    """The returns are (2, 1) and (1, 0): the second episode ended after its first step."""
    rewards = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    assert group_to_go(rewards, mask, gamma=1.0).tolist() == [[0.5, 0.5], [-0.5, 0.0]]


def test_discounted_rewards_count_less():
    rewards, mask = torch.tensor([[0.0, 4.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    assert group_to_go(rewards, mask, gamma=0.5).tolist() == [[1.0, 2.0], [-1.0, -2.0]]


def test_a_reward_at_the_end_alone_is_compared_as_by_group_mean():
    rewards, mask = torch.tensor([1.0, 3.0, 4.0]), torch.ones(3, 5, dtype=torch.bool)
    at_the_end = torch.zeros(3, 5)
    at_the_end[:, -1] = rewards
    expected = group_mean(rewards[None], eps=1e-8)[0]
    found = group_to_go(at_the_end, mask, gamma=1.0)
    assert torch.allclose(found, expected[:, None].expand(3, 5))


def test_an_episode_alone_is_refused():
    with pytest.raises(ValueError, match="at least 2 episodes"):
        group_to_go(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), gamma=1.0)


# ---- Batches -----------------------------------------------------------------------------------


def group(actions: Tensor | None = None) -> RolloutGroup:
    """Return two episodes, with 3 and 2 actions. Observation t of episode g is (g + 1, t)."""
    mask = torch.tensor([[True, True, True], [True, True, False]])
    ids = torch.tensor([[0, 1, 2], [2, 1, 4]])
    steps = torch.arange(3.0).expand(2, 3)
    seen = torch.stack([torch.tensor([[1.0], [2.0]]).expand(2, 3), steps], dim=2) * mask[..., None]
    return RolloutGroup(
        prompt_index=0,
        prompt_ids=torch.tensor([3]),
        response_ids=ids,
        response_mask=mask,
        behaviour_log_probs=torch.zeros(2, 3),
        rewards=torch.tensor([3.0, 1.0]),
        finished=torch.tensor([True, True]),
        token_versions=torch.zeros(2, 3, dtype=torch.int32),
        token_rounds=torch.zeros(2, 3, dtype=torch.int32),
        observations=seen,
        actions=actions,
        turn_rewards=torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, torch.nan]]),
    )


def test_rows_hold_what_was_seen_where_the_action_is_predicted():
    batch = collate([group()], [torch.zeros(2)], pad_id=4)
    assert batch.observations is not None
    assert batch.actions is None
    assert batch.observations[0].tolist() == [[1, 0], [1, 1], [1, 2]]
    assert batch.target_ids[batch.response_mask].tolist() == [0, 1, 2, 2, 1]
    shorter = batch.select(torch.tensor([1]))
    assert shorter.observations is not None
    assert shorter.observations.tolist() == [[[2, 0], [2, 1]]]


def test_log_probs_of_a_batch_are_those_of_its_policy():
    config = GRPOConfig.from_dict({"task": {"name": "control"}})
    policy = ControlPolicy(CHOICES, 3)
    batch = collate([group()], [torch.zeros(2)], pad_id=4)
    found, entropy = LogProbs(config, [4]).with_entropy(policy, batch)
    seen, taken = torch.tensor([[2.0, 0.0], [2.0, 1.0]]), torch.tensor([2, 1])
    expected, _ = policy.log_probs(policy.hidden(seen), taken, 1.0)
    assert found[1, :2].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert found[1, 2] == entropy[1, 2] == 0


def test_log_probs_of_numbers_are_those_of_the_actions():
    config = GRPOConfig.from_dict({"task": {"name": "control"}})
    policy, actions = ControlPolicy(NUMBERS, 3), torch.randn(2, 3, 2)
    batch = collate([group(actions)], [torch.zeros(2)], pad_id=4)
    found, _ = LogProbs(config, [4]).with_entropy(policy, batch)
    seen = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    expected, _ = policy.log_probs(policy.hidden(seen), actions[0], 1.0)
    assert found[0].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_each_action_answers_for_what_it_earned():
    config = GRPOConfig.from_dict({"task": {"name": "control"}})
    assert token_rewards(config, group(), 0.0).tolist() == [[1, 1, 1], [0, 1, 0]]


@pytest.mark.parametrize("spaces", [CHOICES, NUMBERS, IMAGE])
def test_a_made_up_microbatch_runs_through_the_policy(spaces: Spaces):
    config = GRPOConfig.from_dict({"task": {"name": "control"}, "rollout": {"max_new_tokens": 3}})
    policy = ControlPolicy(spaces, 0)
    micro = with_observations(largest_microbatch(config, 1, [4]), policy)
    found, _ = LogProbs(config, [4]).with_entropy(policy, micro)
    assert found.shape == (64, 3)
    assert bool(found.isfinite().all())


# ---- Settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {"env": "CartPole-v1"}}, "model.env=CartPole-v1: has no effect with"),
        ({"task": {"name": "control"}, "model": {"env": None}}, "needs an environment to act in"),
        ({"task": {"name": "control"}, "engine": "torch"}, "engine=torch: cannot sample actions"),
        ({"engine": "control"}, "engine=control: only acts in environments"),
        ({"loss": {"advantage": "group_to_go"}}, "group_to_go compares episodes step by step"),
        ({"task": {"name": "control"}, "loss": {"advantage": "vine"}}, "must not be vine"),
        ({"task": {"name": "control"}, "rollout": {"stop": ["."]}}, "needs a task with text"),
        ({"task": {"name": "control"}, "model": {"path": "here"}}, "needs a task with text"),
        ({"task": {"mix": '{"math": 1, "control": 1}'}}, "so it cannot be part of a mix"),
    ],
)
def test_what_contradicts_a_control_policy_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig.from_dict(settings)
