"""How far from the truth are the advantages of a critic and those by completions, at equal samples?

The shipped story policy answers prompts of the keyword task and is not trained. States of its
responses, a chunk of tokens apart, are valued in three ways: by many completions, which stands for
the truth; by the K completions of `loss.advantage=vine`; and by a critic that was trained on as
many responses of the same policy as vine has sampled in all. The advantage of a chunk is what its
end is worth less its beginning. Reports for each estimator the variance and the mean square of its
distance from the true advantage, over the chunks, and the correlation with it. λ of generalised
advantage estimation counts by chunk; λ by token to the power of the chunk's tokens is the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from measure import parser_of, provenance, run_benchmark, write
from torch import Tensor

from grpo_trainable.actors.learner import Learner
from grpo_trainable.actors.state_values import Completer, state_values
from grpo_trainable.algo import at_the_end, gae
from grpo_trainable.command_line import number
from grpo_trainable.config import GRPOConfig, VineSettings, schedule
from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.models.store import build_policy
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.prompts import Prompts, build_task
from grpo_trainable.rollout import RolloutGroup
from grpo_trainable.transports.in_process import InProcess

AT_ONCE = 32  # completions of a state in one call, which the memory of the cache allows
TRUTH_SEED = 1_000_003  # added to the seed, and once more for each call
TOKEN_LAMBDA = 0.95


def main() -> None:
    counts = {
        "seeds": (3, "of prompts and draws"),
        "prompts": (16, "with a group of responses each"),
        "samples": (4, "K, completions of a state by vine"),
        "chunk-tokens": (16, "tokens between two states"),
        "truth": (256, f"completions of a state that stand for the truth, in {AT_ONCE}s"),
        "k": (4, "gradient steps of the critic on each rollout batch"),
    }
    parser = parser_of(__doc__, "token_advantages.json", seed="the first", counts=counts)
    parser.add_argument(
        "--critic-lr",
        type=number(float, 0),
        default=1e-3,
        help="learning rate of the critic (1e-3)",
    )
    args = parser.parse_args()
    runs = []
    for seed in range(args.seed, args.seed + args.seeds):
        runs.append({"seed": seed, **compare(seed, args)})
        print(show(runs[-1]), flush=True)
    names = ("prompts", "samples", "chunk_tokens", "truth", "k", "critic_lr")
    workload = {"task": "keyword", **{name: getattr(args, name) for name in names}}
    write(args.out, {**provenance(args), "workload": workload, "runs": runs})


def compare(seed: int, args: Any) -> dict[str, Any]:
    sampler = Sampler(seed, args.k, args.critic_lr)
    groups = sampler.groups(range(args.prompts))
    chunk = args.chunk_tokens
    by_vine, completions = sampler.valued(groups, args.samples, chunk, seed)
    calls = -(-args.truth // AT_ONCE)
    truth = [
        sampler.valued(groups, AT_ONCE, chunk, seed + TRUTH_SEED * (call + 1))[0]
        for call in range(calls)
    ]
    true_values = [torch.stack(values).mean(dim=0) for values in zip(*truth, strict=True)]
    budget = completions + sum(len(group.rewards) for group in groups)
    by_critic, explained = sampler.critic_values(groups, budget)
    true = advantages(groups, true_values, chunk, 0.0)
    estimates = {
        "vine": advantages(groups, by_vine, chunk, 0.0),
        **{
            f"gae, {name}": advantages(groups, by_critic, chunk, lam)
            for name, lam in (
                ("lambda 1", 1.0),
                ("lambda 0.95 a chunk", TOKEN_LAMBDA),
                ("lambda 0.95 a token", TOKEN_LAMBDA**chunk),
                ("lambda 0", 0.0),
            )
        },
    }
    return {
        "states": int(sum(int((~v.isnan()).sum()) for v in true_values)),
        "chunks": len(true),
        "responses": budget,  # sampled by vine, and trained on by the critic
        "critic_explained_variance": explained,
        "true_variance": float(true.var()),
        "estimators": {name: distance(found, true) for name, found in estimates.items()},
    }


def distance(found: np.ndarray, true: np.ndarray) -> dict[str, float]:
    errors = found - true
    return {
        "error_variance": float(errors.var()),
        "mean_square_error": float((errors**2).mean()),
        "correlation": float(np.corrcoef(found, true)[0, 1]),
    }


def advantages(
    groups: Sequence[RolloutGroup], values: Sequence[Tensor], chunk: int, lam: float
) -> np.ndarray:
    """The advantage of every chunk of every response, from values (G, R) at its first token."""
    found: list[float] = []
    for group, of_group in zip(groups, values, strict=True):
        mask = group.response_mask[:, ::chunk]
        rewards = at_the_end(group.rewards, mask)
        chunks = gae(rewards, of_group[:, ::chunk], mask, gamma=1.0, lam=lam)
        found += chunks[mask].tolist()
    return np.array(found)


class Sampler:
    """The shipped policy, and a critic of it."""

    def __init__(self, seed: int, k: int, critic_lr: float) -> None:
        self.config = GRPOConfig.from_dict(
            {
                "seed": seed,
                "k": k,
                "rounds": 10**6,
                "loss": {"type": "ppo", "advantage": "gae", "gae_lambda": 1.0, "kl_monitor": False},
                "critic": {"lr": critic_lr},
                "optim": {"lr": 0.0},
            }
        )
        policy, self._tokenizer = build_policy(self.config.model, seed)
        assert isinstance(policy, TransformerLM)
        self._policy = policy
        self._task = build_task(self.config)
        self._prompts = Prompts(self.config, self._task, self._tokenizer)
        self._limits = self._prompts.request("train", 0).limits

    def _reward(self, prompt_index: int, text: str) -> float:
        return self._task.reward(text, self._prompts.ground_truth("train", prompt_index)).reward

    def groups(self, prompt_indices: Sequence[int]) -> list[RolloutGroup]:
        """Scored responses to these prompts."""
        engine = TorchEngine(self._policy, self._tokenizer, seed=self.config.seed)
        requests = [self._prompts.request("train", index) for index in prompt_indices]
        return [self._scored(group) for group in engine.generate(requests, lambda: None)]

    def _scored(self, group: RolloutGroup) -> RolloutGroup:
        texts = (
            self._tokenizer.decode(ids[mask].tolist())
            for ids, mask in zip(group.response_ids, group.response_mask, strict=True)
        )
        rewards = [self._reward(group.prompt_index, text) for text in texts]
        return replace(group, rewards=torch.tensor(rewards), uses=1)

    def valued(
        self, groups: Sequence[RolloutGroup], samples: int, chunk: int, seed: int
    ) -> tuple[list[Tensor], int]:
        """Values of the states of these groups, and how many completions were sampled for them."""
        engine = TorchEngine(self._policy, self._tokenizer, seed=seed)
        sample: Callable = lambda requests: engine.generate(requests, lambda: None)  # noqa: E731
        settings = VineSettings(samples=samples, chunk_tokens=chunk)
        completer = Completer(settings, self._tokenizer.decode, sample)
        completions = completer.completions(groups, self._limits)
        values = [
            state_values(group, found, [self._reward(group.prompt_index, t) for t in found.texts])
            for group, found in zip(groups, completions, strict=True)
        ]
        return values, sum(len(found.texts) for found in completions)

    def critic_values(
        self, groups: Sequence[RolloutGroup], responses: int
    ) -> tuple[list[Tensor], float]:
        """What a critic says of the states after training on so many responses to other prompts,
        and how much of the returns it explained in the last quarter of its rounds."""
        learner = Learner(self.config, InProcess())
        prompts, explained = self.config.rollout.prompts, []
        begin = 10**6
        for _ in range(max(1, responses // schedule.responses_per_round(self.config))):
            updated = learner.update([self.groups(range(begin, begin + prompts))])
            begin += prompts
            assert updated.critic is not None
            explained.append(updated.critic.explained_variance or 0.0)
        batches: Any = learner._batches
        return batches.values(groups), statistics.mean(explained[-(-3 * len(explained) // 4) - 1 :])


def show(run: dict[str, Any]) -> str:
    told = ", ".join(
        f"{name}: variance {found['error_variance']:.4f}, "
        f"mean square {found['mean_square_error']:.4f}"
        for name, found in run["estimators"].items()
    )
    return (
        f"seed {run['seed']}: {run['chunks']} chunks, {run['responses']} responses, critic "
        f"explains {run['critic_explained_variance']:.2f}; distance from the true advantage: {told}"
    )


if __name__ == "__main__":
    run_benchmark(main)
