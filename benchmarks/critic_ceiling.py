"""How much of what a response earns can a critic know while it is written, and how much does it?

The shipped story policy answers prompts of the keyword task and is not trained. For states with few
and with many tokens so far it reports the share of the variance of the reward that is explained

* by position and by whether the keyword is written already: a ceiling, nearly all there is to know;
* by a vector on the policy's own hidden states, fitted by ridge regression on three quarters of the
  rounds and asked about the others: what a critic finds there without training a body;
* by the critic of `loss.advantage=gae` in the first and in the last quarter of its rounds, with
  several learning rates and numbers of gradient steps a round. It is asked before it trains on a
  round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from measure import parser_of, provenance, run_benchmark, write
from token_advantages import Sampler
from torch import Tensor

from grpo_trainable.actors.learner import Learner
from grpo_trainable.algo import explained_variance
from grpo_trainable.config import GRPOConfig
from grpo_trainable.models.scoring import response_states
from grpo_trainable.rollout import RolloutGroup, collate
from grpo_trainable.transports.in_process import InProcess

RIDGE = 10.0
BANDS = ((0, 10), (10, 20), (20, 60))  # tokens so far
# Name -> settings. The learning rate of the policy is 0, so that of the critic is given.
ARMS: dict[str, dict[str, Any]] = {
    "lr 1e-3, k=1": {"critic": {"lr": 1e-3}},
    "lr 2e-4, k=1": {"critic": {"lr": 2e-4}},
    "lr 2e-4, k=4": {"critic": {"lr": 2e-4}, "k": 4},
}


class Round(NamedTuple):
    groups: Sequence[RolloutGroup]
    states: Tensor  # (T, D), the policy's hidden states
    rewards: Tensor  # (T,), what the response earns
    written: Tensor  # (T,) bool, whether the keyword was among the tokens so far
    position: Tensor  # (T,), tokens so far


def main() -> None:
    counts = {"rounds": (24, "of 64 responses, which every critic trains on in turn")}
    parser = parser_of(__doc__, "critic_ceiling.json", seed="of prompts and draws", counts=counts)
    args = parser.parse_args()
    sampler = PrefixSampler(args.seed)
    rounds = [sampler.round(index) for index in range(args.rounds)]
    found = {"the keyword written, position": of_bands(rounds, ceiling(rounds))}
    print(show(found), flush=True)
    last = rounds[-max(1, len(rounds) // 4) :]
    by_states = of_bands(last, from_states(rounds[: -len(last)], last))
    found["the policy's hidden states"] = by_states
    print(show({"the policy's hidden states": by_states}), flush=True)
    for name, settings in ARMS.items():
        values = by_critic(rounds, settings, args.seed)
        found[f"critic, {name}, first quarter"] = of_bands(rounds[: len(last)], values[: len(last)])
        found[f"critic, {name}"] = of_bands(last, values[-len(last) :])
        print(show({name: found[f"critic, {name}"]}), flush=True)
    workload = {"task": "keyword", "rounds": args.rounds, "arms": ARMS, "bands": BANDS}
    rewards = torch.cat([r.rewards for r in rounds])
    measured = {"reward": float(rewards.mean()), "explained_variance": found}
    write(args.out, {**provenance(args), "workload": workload, **measured})


# ---- Rollouts ----------------------------------------------------------------------------------


class PrefixSampler(Sampler):
    """Samples rounds, and knows of each prefix of a response whether its keyword is written."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, k=1, critic_lr=1e-3)

    @torch.no_grad()
    def round(self, index: int) -> Round:
        prompts = self.config.rollout.prompts
        groups = self.groups(range(index * prompts, (index + 1) * prompts))
        masks = [group.response_mask for group in groups]
        batch = collate(groups, [group.rewards for group in groups], self._tokenizer.pad_id)
        states = response_states(self._policy, batch.input_ids, batch.response_mask)
        return Round(
            groups=groups,
            states=states.float(),
            rewards=torch.cat([tokens_of(group.rewards, group) for group in groups]),
            written=torch.cat([self._written(group)[group.response_mask] for group in groups]),
            position=torch.cat([(mask.cumsum(dim=1) - 1)[mask] for mask in masks]),
        )

    def _written(self, group: RolloutGroup) -> Tensor:
        """(G, R) bool."""
        written = torch.zeros_like(group.response_mask)
        for row in group.rewards.nonzero()[:, 0].tolist():
            ids = group.response_ids[row][group.response_mask[row]].tolist()
            for t in range(1, len(ids)):
                text = self._tokenizer.decode(ids[:t])
                written[row, t] = bool(self._reward(group.prompt_index, text))
        return written


def tokens_of(values: Tensor, group: RolloutGroup) -> Tensor:
    """(T,): a value of each response, (G,), at each of its tokens."""
    return values[:, None].expand(group.response_mask.shape)[group.response_mask]


# ---- What explains it --------------------------------------------------------------------------


def ceiling(rounds: Sequence[Round]) -> list[Tensor]:
    """The mean reward of the states that agree in position and in whether the keyword is written,
    (T,) for each round."""
    written = torch.cat([r.written for r in rounds])
    kind = 2 * torch.cat([r.position for r in rounds]) + written
    rewards = torch.cat([r.rewards for r in rounds])
    sums = torch.zeros(int(kind.max()) + 1).index_add_(0, kind, rewards)
    means = sums / kind.bincount(minlength=len(sums)).clamp(min=1)
    return list(means[kind].split([len(r.rewards) for r in rounds]))


def from_states(fitted: Sequence[Round], asked: Sequence[Round]) -> list[Tensor]:
    """What a vector on the hidden states says of the rounds asked about."""
    states = torch.cat([with_one(r.states) for r in fitted])
    rewards = torch.cat([r.rewards for r in fitted]).double()
    penalty = RIDGE * torch.eye(states.shape[1], dtype=states.dtype)
    vector = torch.linalg.solve(states.T @ states + penalty, states.T @ rewards)
    return [(with_one(r.states) @ vector).float() for r in asked]


def with_one(states: Tensor) -> Tensor:
    return torch.cat([states, torch.ones(len(states), 1)], dim=1).double()


def by_critic(rounds: Sequence[Round], settings: dict[str, Any], seed: int) -> list[Tensor]:
    """What a critic says of each round's states before it trains on them, (T,) each."""
    learner = Learner(config_of(settings, seed), InProcess())
    batches: Any = learner._batches
    said = []
    for r in rounds:
        values = batches.values(r.groups)
        said.append(torch.cat([v[g.response_mask] for v, g in zip(values, r.groups, strict=True)]))
        learner.update([r.groups])
    return said


def config_of(settings: dict[str, Any], seed: int) -> GRPOConfig:
    return GRPOConfig.from_dict(
        {
            "seed": seed,
            "rounds": 10**6,
            "loss": {"type": "ppo", "advantage": "gae", "kl_monitor": False},
            "optim": {"lr": 0.0},
            **settings,
        }
    )


# ---- What came out -----------------------------------------------------------------------------


def of_bands(rounds: Sequence[Round], values: Sequence[Tensor]) -> dict[str, float | None]:
    """The explained variance of all states, and of those with so many tokens."""
    said, rewards = torch.cat(list(values)), torch.cat([r.rewards for r in rounds])
    position = torch.cat([r.position for r in rounds])
    found = {"all": explained_variance(said, rewards)}
    for low, high in BANDS:
        here = (position >= low) & (position < high)
        found[f"{low}-{high - 1}"] = explained_variance(said[here], rewards[here])
    return found


def show(found: dict[str, dict[str, float | None]]) -> str:
    return "\n".join(
        f"{name}: " + ", ".join(f"{band}: {0.0 if x is None else x:.2f}" for band, x in of.items())
        for name, of in found.items()
    )


if __name__ == "__main__":
    run_benchmark(main)
