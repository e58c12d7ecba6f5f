"""Compare estimates of the advantage with its true value, on policies that PPO has trained.

The segments are the parts into which `vine.chunk_tokens` divides a response. The advantage A of a
segment is V(state after the segment) − V(state before it), where V is the expected reward. The true
V is computed from many completions (`TRUTH`) of each state. The estimates are:

  zero             0, whose mean squared error is the mean of A²
  return           the reward of the response
  group            the reward minus the mean reward of the group, as in GRPO
  gae              the reward minus the critic's V(before): generalised advantage estimation, λ = 1
  critic           the critic's V(after) − V(before)
  vine_k4, vine_k9 V(after) − V(before), with V from 4 or 9 completions of each state (VinePPO)

VinePPO gives all tokens of a segment the same advantage, and PPO gives each token its own. So the
estimates are compared at the first token of each segment, and each segment counts once.

For a given segment, everything that is sampled after it or beside it counts as random: the rest of
the response, the other responses of the group, and the completions. The mean squared error of an
estimate is the sum of its variance and its squared bias in this sense. A bias that depends only on
the state before the segment, like that of `return` and `gae`, acts as a baseline: it makes the
policy gradient noisier, but not wrong on average. But if the critic's V(after) is wrong, so is the
gradient on average.

The true values and the critic's values determine variance and bias, so no estimate is sampled. The
squared biases contain the noise of the true values. The variance of this noise is subtracted.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import policy_tokenizer
from grpo_trainable.protocol.messages import Scored
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.storage.checkpointing import (
    numbered_checkpoints,
    read_state,
    verified_digests,
)
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.transports.in_process import InProcess

TRUTH = 128  # number of completions per state that give the true value
PROMPTS = 32  # held-out prompts, the same for all seeds
KS = (4, 9)  # completions that VinePPO samples per state; 9 is the number in the paper


@dataclass(frozen=True)
class Segments:
    """The N segments of all responses. Each field is (N,), with one value per segment."""

    prompt: Tensor  # true value of the prompt
    before: Tensor  # true value of the state before the segment
    after: Tensor  # true value of the state after it; the reward after the last segment
    is_first: Tensor  # bool; True if the state before the segment is the prompt
    is_last: Tensor  # bool
    critic_before: Tensor  # the critic's value of the state before the segment
    critic_after: Tensor  # the same after the segment; the reward after the last segment


def segments(groups: Sequence[RolloutGroup], values: Sequence[Tensor]) -> Segments:
    """Divide the responses of groups into segments.

    Args:
        groups: The groups, with the true values of their states.
        values: The critic's values, (G, R) for each group.
    """
    rows: list[list[float]] = []
    for group, said in zip(groups, values, strict=True):
        mask, truth = group.response_mask, group.state_values
        assert truth is not None, "the generator did not estimate the values of states"
        for g in range(len(mask)):
            own, critic = truth[g][mask[g]], said[g][mask[g]]
            reward = float(group.rewards[g])
            starts = (~own.isnan()).nonzero().flatten().tolist()
            for start, end in zip(starts, [*starts[1:], len(own)], strict=True):
                is_last = end == len(own)
                after = [reward] * 2 if is_last else [float(own[end]), float(critic[end])]
                rows.append(
                    [
                        *(float(own[0]), float(own[start]), after[0]),
                        *(start == 0, is_last, float(critic[start]), after[1]),
                    ]
                )
    columns = torch.tensor(rows, dtype=torch.float64).T
    return Segments(*columns[:3], *columns[3:5].bool(), *columns[5:])


def errors(own: Segments, *, truth: int, group_size: int) -> dict[str, dict[str, float]]:
    """Return the variance, the squared bias and their sum for each estimate.

    The rewards are 0 or 1, so the reward of a completion of a state with value p has the variance
    p (1 − p). Without a discount, V(after) is the mean of the rewards that follow the segment.

    Args:
        own: The segments.
        truth: The number of completions from which the true values were computed.
        group_size: The number of responses in a group.
    """
    unbiased = truth / (truth - 1)
    of_prompt = own.prompt * (1 - own.prompt) * unbiased
    of_before = own.before * (1 - own.before) * unbiased
    of_after = (own.after * (1 - own.after) * unbiased).where(~own.is_last, 0.0)

    def squared(bias: Tensor, *, before: float, after: float = 0.0, prompt: float = 0.0) -> Tensor:
        """Return bias² without the part that comes from the noise of the true values.

        The other arguments are the factors by which the bias multiplies the true values.
        """
        at_first = torch.where(own.is_first, (before + prompt) ** 2, before**2)
        # For the first segment, the prompt is the state before the segment.
        at_prompt = of_prompt.where(~own.is_first, 0.0)
        noise = at_first * of_before + prompt**2 * at_prompt + after**2 * of_after
        return bias**2 - noise / truth

    others = (group_size - 1) / group_size  # the other responses' share in the group's mean
    of_group = own.before - own.after / group_size - others * own.prompt
    error_after = own.critic_after - own.after
    error_before = own.critic_before - own.before
    zero = torch.zeros_like(own.before)
    found = {
        "zero": (zero, squared(own.before - own.after, before=1, after=-1)),
        "return": (of_after, squared(own.before, before=1)),
        "group": (
            others**2 * of_after + others / group_size * of_prompt,
            squared(of_group, before=1, after=-1 / group_size, prompt=-others),
        ),
        "gae": (of_after, squared(error_before, before=1)),
        "critic": (zero, squared(error_after - error_before, before=1, after=-1)),
        **{f"vine_k{k}": ((of_before + of_after) / k, zero) for k in KS},
    }
    return {
        name: {
            "variance": float(variance.mean()),
            "squared_bias": float(bias.mean()),
            "squared_error": float((variance + bias).mean()),
        }
        for name, (variance, bias) in found.items()
    }


def tokens_per_response(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the mean number of tokens sampled for a response and for its states' completions.

    On average, a completion is as long as the rest of the response. The responses of a group share
    the completions of the prompt.
    """
    lengths = rest = 0.0
    for group in groups:
        assert group.state_values is not None
        for mask, truth in zip(group.response_mask, group.state_values, strict=True):
            starts = (~truth[mask].isnan()).nonzero().flatten()
            length = int(mask.sum())
            lengths += length
            rest += length / len(group.rewards)
            rest += float((length - starts[1:]).sum())
    responses = sum(len(group.rewards) for group in groups)
    plain = lengths / responses
    with_completions = {f"vine_k{k}": plain + k * rest / responses for k in KS}
    return {**dict.fromkeys(("return", "group", "gae", "critic"), plain), **with_completions}


def of_checkpoint(config: GRPOConfig, directory: Path) -> dict[str, Any]:
    """Measure the errors of the estimates at a checkpoint.

    The responses answer held-out prompts and are sampled by the checkpoint's policy.
    """
    assert config.loss.gamma == config.loss.gae_lambda == 1, "`gae` is the reward minus a value"
    transport = InProcess()
    learner = Learner(config, transport)
    digests = verified_digests(directory)
    state, _ = read_state(directory, digests)
    learner.read_state(str(directory), digests, state["learner"])
    with tempfile.TemporaryDirectory() as folder:
        groups = sampled(held_out(config, Path(folder)), learner.publish().handle, transport)
    found = segments(groups, learner._batches.values(groups))
    return {
        "round": state["learner"]["round"],
        "reward": float(torch.cat([group.rewards for group in groups]).mean()),
        "segments": len(found.before),
        "errors": errors(found, truth=TRUTH, group_size=config.rollout.group_size),
        "tokens_per_response": tokens_per_response(groups),
    }


def held_out(config: GRPOConfig, directory: Path) -> GRPOConfig:
    """Return a config that samples groups and completions for the held-out prompts of a trial.

    A generator samples completions only for training prompts. So the held-out prompts are written
    to a file in `directory`, and this config uses them as training prompts.
    """
    file = directory / "prompts.jsonl"
    examples = build_task(config).eval_examples(PROMPTS)
    rows = [{"prompt": one.prompt, "keywords": one.ground_truth} for one in examples]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = {"task.train_file": str(file), "task.eval_file": str(file)}
    vine = {"loss.advantage": "vine", "vine.samples": TRUTH, "critic.lr": None}
    few = {"eval.prompts": PROMPTS, "eval.final_prompts": None}
    return changed(config, {**files, **vine, **few})


def sampled(config: GRPOConfig, handle: Any, transport: InProcess) -> list[RolloutGroup]:
    """Return one group for each held-out prompt, with the values of its states.

    Args:
        config: The config that `held_out` returns.
        handle: The published weights.
        transport: Where they were published.
    """
    generator = Generator(config, transport)
    try:
        generator.load(handle)
        prompts = Prompts(config, build_task(config), policy_tokenizer(config.model))
        scored = generator.generate([prompts.request("train", i) for i in range(PROMPTS)])
    finally:
        generator.close()
    assert isinstance(scored, Scored), "the reward of this task is computed at once"
    return scored.groups


def changed(config: GRPOConfig, changes: Mapping[str, Any]) -> GRPOConfig:
    """Return a copy of a config, with other values for some settings."""
    data = config.to_dict()
    for key, value in changes.items():
        section, _, name = key.partition(".")
        data[section][name] = value
    return GRPOConfig.from_dict(data)


def of_trial(config: GRPOConfig, directory: Path) -> list[dict[str, Any]]:
    """Measure the errors of the estimates at every checkpoint of a trial."""
    return [of_checkpoint(config, path) for path in numbered_checkpoints(directory)]
