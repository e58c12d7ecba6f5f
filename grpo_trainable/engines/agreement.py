"""A start-up check that engine and learner assign the same log-probs to sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from grpo_trainable.engines.engine import Engine
from grpo_trainable.models.policy import Policy
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.protocol.rollout import Request, SamplingLimits, collate

# For each precision of the engine, the largest allowed difference between log-probs, in nats and
# averaged over tokens. Rounding causes differences of 1e-5 in float32 and of 0.01 in bfloat16. If
# the engine did not receive the weights, the difference is above 1.
ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 0.1}
TOKENS = 8  # tokens per response


def probes(limits: SamplingLimits, vocab_size: int, longest: int) -> list[Request]:
    """Return two requests. Their prompts differ in length, and the ids span the vocabulary.

    `longest` is the maximum number of tokens of a prompt plus its response.
    """
    new = min(TOKENS, longest // 2)
    limits = replace(
        limits,
        min_new_tokens=min(2, new),
        max_new_tokens=new,
        temperature=limits.temperature or 1.0,
        stop_strings=(),
    )
    ids = torch.linspace(0, vocab_size - 1, min(8, longest - new), dtype=torch.float64).long()
    prompts = [tuple(ids.tolist()), tuple(ids[: -(-len(ids) // 2)].tolist())]
    return [
        Request(stream="eval", prompt_index=index, prompt_ids=prompt, group_size=2, limits=limits)
        for index, prompt in enumerate(prompts)
    ]


@torch.no_grad()
def mean_difference(
    engine: Engine, policy: Policy, requests: Sequence[Request], pad_id: int
) -> float:
    """Return the mean absolute difference between the engine's and the policy's log-probs, in nats.

    The mean is taken over all sampled tokens. The engine and the policy must have the same weights.
    """
    groups = engine.generate(requests, lambda: None)
    limits = requests[0].limits
    no_advantages = [torch.zeros(len(group.rewards)) for group in groups]
    batch = collate(groups, no_advantages, pad_id).to(policy.head_weight.device)
    log_probs, _ = response_log_probs(
        policy,
        batch.input_ids,
        batch.target_ids,
        batch.response_mask,
        temperature=limits.temperature,
        min_new_tokens=limits.min_new_tokens,
        end_ids=limits.end_ids,
    )
    difference = (log_probs - batch.behaviour_log_probs)[batch.response_mask]
    return float(difference.abs().mean())


def refuse_disagreement(
    engine: Engine,
    policy: Policy,
    requests: Sequence[Request],
    pad_id: int,
    *,
    precision: torch.dtype | None = None,
) -> None:
    """Check that the engine's log-probs for `requests` agree with the log-probs under `policy`.

    Args:
        engine: Engine that samples.
        policy: Policy that scores the tokens. Its weights are those of the engine.
        requests: Requests to sample.
        pad_id: Id of the padding token.
        precision: Precision of the engine. None means the precision of the policy.

    Raises:
        ValueError: The log-probs differ by more than rounding explains. The message is one line.
    """
    allowed = ALLOWED[precision or policy.head_weight.dtype]
    found = mean_difference(engine, policy, requests, pad_id)
    if not found <= allowed:
        raise ValueError(
            f"the engine's log-probs differ from the learner's by {found:.2g} nats per token, "
            f"although both have the same weights; rounding explains at most {allowed:g}; the "
            "probabilities in training would differ from those in sampling"
        )
