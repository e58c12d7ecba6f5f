"""On a small bandit, the first gradient of every preset is the estimator of the preset's paper.

The policy is a table of logits over two actions and an end token, after the prompt or after an
action. Each prompt has one copy of each of the seven responses of at most two tokens. All rewards
are known, and all numbers are float64. A gradient is a sum over tokens of a coefficient times ∇ log
π. The functions below compute each paper's coefficients with loops, from the paper's equation. A
preset's gradient may be a multiple of the paper's gradient, because AdamW removes a constant
factor. `PAPERS` states the factor of each preset.

At the first step of a round, the policy is still the policy that sampled, so rules that depend only
on ratios have no effect. Clips, gates, masks and weights at ρ ≠ 1 have separate tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.advantages import advantage_estimator
from grpo_trainable.learner.gradient_steps import GradientSteps
from grpo_trainable.learner.log_probs import BatchWithLogProbs
from grpo_trainable.learner.optimizer import StepTaken
from grpo_trainable.learner.training_state import KLCoefficient
from grpo_trainable.protocol.rollout import RolloutGroup, TrainBatch
from search_spaces.presets import ALGORITHMS

PROMPT, A, B, END = range(4)
RESPONSES = [(END,), (A, END), (B, END), (A, A), (A, B), (B, A), (B, B)]
LENGTHS = [len(response) for response in RESPONSES]
G, MOST = len(RESPONSES), 2  # number of responses to a prompt, and their maximum length
RESPONSES_IN_ALL = 2 * G
TOKENS_IN_ALL = 2 * sum(LENGTHS)
REWARDS = [[0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]]
PARTS = [[[r, (i % 3) / 2] for i, r in enumerate(row)] for row in REWARDS]
# Values of the states before the first and the second token, from a critic or from completions.
VALUES = [[0.4, 0.7], [0.25, 0.5]]
# Logits of action A, action B and the end token. The rows are the states after the prompt, after A
# and after B. After the prompt, the end token is so rare that Clip-Cov selects it in one response.
LOGITS = [[0.8, 0.5, -2.5], [0.2, -0.4, 0.1], [-0.3, 0.6, 0.2]]
REFERENCE = [[1.0, 0.5, -2.0], [0.0, 0.1, 0.3], [0.2, 0.4, -0.1]]


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ---- The papers --------------------------------------------------------------------------------


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def drift(i: int, t: int) -> float:
    """Return log π − log π_ref of a token."""
    state = PROMPT if t == 0 else RESPONSES[i][t - 1]
    token = RESPONSES[i][t] - 1
    return log_softmax(LOGITS[state])[token] - log_softmax(REFERENCE[state])[token]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: list[float]) -> float:
    """Return the sample standard deviation."""
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


def standardised(values: list[float]) -> list[float]:
    return [(v - mean(values)) / std(values) for v in values]


def centred(values: list[float]) -> list[float]:
    return [v - mean(values) for v in values]


def of_groups(advantages: Callable[[list[float]], list[float]]) -> list[list[float]]:
    return [advantages(rewards) for rewards in REWARDS]


# (prompt, response, token) -> the factor of ∇ log π of this token in the gradient of J
Coefficients = Callable[[int, int, int], float]


def per_response_mean(advantages: list[list[float]]) -> Coefficients:
    """Return 1/N Σ_i 1/|y_i| Σ_t A_i ∇ log π (GRPO, equation 3)."""
    return lambda p, i, t: advantages[p][i] / LENGTHS[i] / RESPONSES_IN_ALL


def per_token_mean(advantages: list[list[float]]) -> Coefficients:
    """Return 1/Σ|y_i| Σ_i Σ_t A_i ∇ log π (DAPO, equation 8)."""
    return lambda p, i, t: advantages[p][i] / TOKENS_IN_ALL


def summed(advantages: list[list[float]]) -> Coefficients:
    """Return 1/N Σ_i A_i ∇ log π(y_i), with the log-prob of the whole response."""
    return lambda p, i, t: advantages[p][i] / RESPONSES_IN_ALL


def grpo() -> Coefficients:
    """Subtract 0.04 times the gradient of k3, (1 − e^−d) ∇ log π, averaged like the loss."""
    policy = per_response_mean(of_groups(standardised))
    return lambda p, i, t: (
        policy(p, i, t) - 0.04 * (1 - math.exp(-drift(i, t))) / LENGTHS[i] / RESPONSES_IN_ALL
    )


def dapo() -> Coefficients:
    """Use rewards of ±1, minus 1 for a response of maximum length.

    The subtraction is equation 13 with a buffer of one token.
    """
    rewards = [
        [2 * r - 1 - (n == MOST) for r, n in zip(row, LENGTHS, strict=True)] for row in REWARDS
    ]
    return per_token_mean([standardised(row) for row in rewards])


def kl_of_response(i: int) -> float:
    return math.fsum(drift(i, t) for t in range(LENGTHS[i]))


def rloo() -> Coefficients:
    """Subtract 0.05 KL from each reward, then the mean of the group's other rewards (eq. 4)."""
    rewards = [[r - 0.05 * kl_of_response(i) for i, r in enumerate(row)] for row in REWARDS]
    return summed(
        [
            [r - mean([other for j, other in enumerate(row) if j != i]) for i, r in enumerate(row)]
            for row in rewards
        ]
    )


def maxrl() -> Coefficients:
    """Return the mean of ∇ log π(y) over correct responses minus the mean over all responses."""
    return summed([[G * (r / sum(row) - 1 / G) for r in row] for row in REWARDS])


def over_the_batch(rows: list[list[float]]) -> list[list[float]]:
    flat = standardised([value for row in rows for value in row])
    return [flat[:G], flat[G:]]


def reinforce_pp() -> Coefficients:
    rewards = [[r - 0.01 * kl_of_response(i) for i, r in enumerate(row)] for row in REWARDS]
    return per_response_mean(over_the_batch(rewards))


def reinforce_pp_baseline() -> Coefficients:
    """Subtract 0.01 times the gradient of k2, d ∇ log π."""
    policy = per_response_mean(over_the_batch(of_groups(centred)))
    return lambda p, i, t: policy(p, i, t) - 0.01 * drift(i, t) / LENGTHS[i] / RESPONSES_IN_ALL


def gdpo() -> Coefficients:
    """Standardise each part in its group, then the sums of the parts in the batch (eqs. 4 to 7)."""
    parts = [[standardised([part[k] for part in row]) for k in range(2)] for row in PARTS]
    return per_response_mean(
        over_the_batch([[a + b for a, b in zip(*row, strict=True)] for row in parts])
    )


def whitened_over_tokens(advantage: Callable[[int, int, int], float]) -> Coefficients:
    places = [(p, i, t) for p in range(2) for i in range(G) for t in range(LENGTHS[i])]
    white = dict(zip(places, standardised([advantage(*place) for place in places]), strict=True))
    return lambda p, i, t: white[p, i, t] / TOKENS_IN_ALL


def ppo() -> Coefficients:
    """With λ = 1, the advantage is the reward of the response minus the value of the state."""
    return whitened_over_tokens(lambda p, i, t: REWARDS[p][i] - VALUES[p][t])


def vineppo() -> Coefficients:
    """Subtract the state's value from the next state's value or, at the end, from the reward.

    This is equation 8. Also subtract 1e-4 times the gradient of k3.
    """
    policy = whitened_over_tokens(
        lambda p, i, t: (REWARDS[p][i] if t + 1 == LENGTHS[i] else VALUES[p][1]) - VALUES[p][t]
    )
    return lambda p, i, t: policy(p, i, t) - 1e-4 * (1 - math.exp(-drift(i, t))) / TOKENS_IN_ALL


def rlhf_ppo() -> Coefficients:
    """Subtract 0.1 times the KL of each token from its reward, and use GAE with λ = 0.95."""

    def advantage(p: int, i: int, t: int) -> float:
        if t == LENGTHS[i]:
            return 0.0
        is_last = t + 1 == LENGTHS[i]
        reward = (REWARDS[p][i] if is_last else 0.0) - 0.1 * drift(i, t)
        delta = reward + (0.0 if is_last else VALUES[p][t + 1]) - VALUES[p][t]
        return delta + 0.95 * advantage(p, i, t + 1)

    return whitened_over_tokens(advantage)


def rlhf_grpo() -> Coefficients:
    """Subtract 0.1 times the KL of each response from its reward."""
    rewards = [[r - 0.1 * kl_of_response(i) for i, r in enumerate(row)] for row in REWARDS]
    return per_response_mean([standardised(row) for row in rewards])


def clip_cov() -> Coefficients:
    """Leave out the one token whose covariance is between 1 and 5 (equations 10 to 12)."""
    advantages = of_groups(standardised)
    places = [(p, i, t) for p in range(2) for i in range(G) for t in range(LENGTHS[i])]
    logs = [log_softmax(LOGITS[PROMPT if t == 0 else RESPONSES[i][t - 1]])[RESPONSES[i][t] - 1]
            for _, i, t in places]  # fmt: skip
    spread = [advantages[p][i] for p, i, _ in places]
    cov = [a * b for a, b in zip(centred(logs), centred(spread), strict=True)]
    (dropped,) = (place for place, own in zip(places, cov, strict=True) if 1 <= own <= 5)
    policy = per_token_mean(advantages)
    return lambda p, i, t: 0.0 if (p, i, t) == dropped else policy(p, i, t)


@dataclass(frozen=True)
class Paper:
    """An estimator, and the ratio of the preset's gradient to the estimator."""

    coefficients: Coefficients
    factor: float = 1.0


# The aggregation `constant` divides by the maximum length of a response.
SUM = 1 / MOST
PAPERS: dict[str, Callable[[], Paper]] = {
    "grpo": lambda: Paper(grpo()),
    "dr_grpo": lambda: Paper(summed(of_groups(centred)), SUM),
    "dapo": lambda: Paper(dapo()),
    "cispo": lambda: Paper(per_token_mean(of_groups(standardised))),
    # The sequence ratio is the geometric mean of the token ratios, so its gradient at ρ = 1 is
    # 1/|y| Σ_t ∇ log π.
    "gspo": lambda: Paper(per_response_mean(of_groups(standardised))),
    "gmpo": lambda: Paper(per_response_mean(of_groups(standardised))),
    "sapo": lambda: Paper(per_response_mean(of_groups(standardised))),
    "topr": lambda: Paper(summed(of_groups(centred)), SUM),
    "dppo_tv": lambda: Paper(summed(of_groups(centred)), SUM),
    "dppo_kl": lambda: Paper(summed(of_groups(centred)), SUM),
    "m2po": lambda: Paper(per_token_mean(of_groups(standardised))),
    "clip_cov": lambda: Paper(clip_cov()),
    # The KL to the old policy has its minimum, and so no gradient, at ρ = 1.
    "kl_cov": lambda: Paper(per_token_mean(of_groups(standardised))),
    "maxrl": lambda: Paper(maxrl(), SUM),
    "rloo": lambda: Paper(rloo(), SUM),
    "reinforce": lambda: Paper(summed(REWARDS), SUM),
    "reinforce_pp": lambda: Paper(reinforce_pp()),
    "reinforce_pp_baseline": lambda: Paper(reinforce_pp_baseline()),
    "icepop": lambda: Paper(per_response_mean(of_groups(standardised))),
    "gdpo": lambda: Paper(gdpo()),
    "olmo_rl": lambda: Paper(per_token_mean(of_groups(centred))),
    "ppo": lambda: Paper(ppo()),
    "vineppo": lambda: Paper(vineppo()),
    "rlhf_ppo": lambda: Paper(rlhf_ppo()),
    "rlhf_grpo": lambda: Paper(rlhf_grpo()),
    "areal": lambda: Paper(per_response_mean(of_groups(standardised))),
    # min(5, ρ) (R − v) Σ_t ∇ log π, where v is the group's mean reward (equation 5).
    "pipeline_rl": lambda: Paper(summed(of_groups(centred)), SUM),
}


def gradient_of(paper: Paper) -> np.ndarray:
    """Return ∇ of −J with respect to the logits, (3, 3)."""
    gradient = np.zeros((3, 3))
    for p in range(2):
        for i, response in enumerate(RESPONSES):
            for t, token in enumerate(response):
                state = PROMPT if t == 0 else response[t - 1]
                probabilities = np.exp(log_softmax(LOGITS[state]))
                of_log = -probabilities
                of_log[token - 1] += 1
                gradient[state] -= paper.factor * paper.coefficients(p, i, t) * of_log
    return gradient


# ---- The presets -------------------------------------------------------------------------------


class Table:
    """Log-probs from a table of logits, in place of a language model's."""

    def __init__(self, logits: list[list[float]]) -> None:
        self.logits = torch.tensor(logits, requires_grad=True)

    def with_entropy(self, policy: object, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        mask = batch.response_mask
        rows = self.logits.log_softmax(dim=1)[batch.input_ids.clamp(max=2)]
        found = rows.gather(2, (batch.target_ids - 1).clamp(min=0).unsqueeze(2)).squeeze(2)
        return found * mask, torch.zeros_like(found)

    def without_gradient(self, policy: object, batch: TrainBatch) -> Tensor:
        return self.with_entropy(policy, batch)[0].detach()


def padded(responses: list[Any], missing: float = 0) -> Tensor:
    return torch.tensor([[*own, missing][:MOST] for own in responses])


def group(prompt: int) -> RolloutGroup:
    ids = padded(RESPONSES)
    mask = ids > 0
    batch = rows([ids], [mask], torch.zeros(G))
    return RolloutGroup(
        prompt_index=prompt,
        prompt_ids=torch.tensor([PROMPT]),
        response_ids=ids,
        response_mask=mask,
        behaviour_log_probs=Table(LOGITS).without_gradient(None, batch),
        reference_log_probs=Table(REFERENCE).without_gradient(None, batch),
        rewards=torch.tensor(REWARDS[prompt]),
        reward_parts=torch.tensor(PARTS[prompt]),
        state_values=torch.tensor(VALUES[prompt]).expand(G, MOST),
        finished=torch.tensor([END in response for response in RESPONSES]),
        token_versions=torch.zeros_like(ids),
        token_rounds=torch.zeros_like(ids),
    )


def rows(ids: list[Tensor], masks: list[Tensor], advantages: Tensor) -> TrainBatch:
    """Return a batch in float64, which `collate` does not do. Advantages are (B,) or (B, S)."""
    targets, mask = torch.cat(ids), torch.cat(masks)
    inputs = torch.cat((torch.full((len(targets), 1), PROMPT), targets[:, :-1]), dim=1)
    wide = advantages if advantages.ndim == 2 else advantages[:, None].expand(targets.shape)
    batch = TrainBatch(
        input_ids=inputs,
        target_ids=targets,
        response_mask=mask,
        behaviour_log_probs=torch.zeros(targets.shape),
        advantages=wide * mask,
    )
    return replace(batch, behaviour_log_probs=Table(LOGITS).without_gradient(None, batch))


def first_gradient(config: GRPOConfig) -> Tensor:
    """Return the logits' gradient in the learner's first step of a round, (3, 3)."""
    groups, table = [group(0), group(1)], Table(LOGITS)
    coefficient = KLCoefficient(config.loss)
    values = [torch.tensor(own).expand(G, MOST) for own in VALUES]
    estimate = advantage_estimator(config, lambda groups: values)
    advantages = torch.cat(estimate(groups, coefficient.in_reward).advantages)
    batch = rows([g.response_ids for g in groups], [g.response_mask for g in groups], advantages)
    with_log_probs = BatchWithLogProbs(
        train_batch=batch,
        own_tokens=batch.response_mask,
        reference=Table(REFERENCE).without_gradient(None, batch),
    )
    optimizer = SimpleNamespace(
        steps=0, skipped=0, step=lambda loss: StepTaken(0.0, 0.0, False, 0.0)
    )
    state = SimpleNamespace(
        policy=None, critic=None, optimizer=optimizer, kl_coefficient=coefficient
    )
    steps = GradientSteps(config, cast(Any, state), cast(Any, table), torch.device("cpu"))
    step, _ = steps.take(with_log_probs)
    assert step.ratio_max == 1.0
    gradient = table.logits.grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_first_gradient_of_a_preset_is_its_papers(name: str) -> None:
    preset, paper = ALGORITHMS[name], PAPERS[name]()
    fixed = {
        "rollout.prompts": 4,
        "rollout.group_size": G,
        "rollout.max_new_tokens": MOST,
        "optim.microbatch": 3,
    }
    (config,) = preset.under(preset.space).trials(fixed, [0])
    if config.reads("loss.advantage_eps"):  # the papers' formulas have no epsilon
        config = replace(config, loss=replace(config.loss, advantage_eps=1e-14))
    expected = torch.from_numpy(gradient_of(paper))
    assert expected.abs().max() > 1e-3
    assert (first_gradient(config) - expected).abs().max() < 1e-10


def test_every_preset_has_a_paper() -> None:
    assert PAPERS.keys() == ALGORITHMS.keys()
