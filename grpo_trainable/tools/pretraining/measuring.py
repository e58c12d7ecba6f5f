"""Measurements for any policy: loss, sampled responses with their lengths, and variety."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.protocol.rollout import Request, SamplingLimits
from grpo_trainable.tools.pretraining.corpus import Document, Row
from grpo_trainable.tools.pretraining.training import collate, token_losses

PROMPTS_AT_ONCE = 32
CARD_SAMPLES = 20


@torch.no_grad()
def mean_loss(model: TransformerLM, rows: Sequence[Row], pad_id: int) -> float:
    """Return the mean loss in nats per response token of `rows`, end-of-text included."""
    losses = [
        token_losses(model, *collate(rows[i : i + PROMPTS_AT_ONCE], pad_id))
        for i in range(0, len(rows), PROMPTS_AT_ONCE)
    ]
    return torch.cat(losses).double().mean().item()


@dataclass(frozen=True, slots=True)
class Response:
    """A sampled response."""

    text: str
    tokens: int  # end-of-text included
    finished: bool  # True if the response ended with end-of-text within the token limit


def sample(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    each: int,
    limits: SamplingLimits,
    seed: int,
) -> list[list[Response]]:
    """Sample responses to prompts. A response ends with end-of-text or at a limit.

    Args:
        model: Policy to sample with.
        tokenizer: Tokenizer of the policy.
        prompts: The prompts as text.
        each: Number of responses to each prompt.
        limits: Sampling limits. The tokenizer's end ids replace the value of the field `end_ids`.
        seed: Seed of the random draws.
    """
    engine = TorchEngine(model, tokenizer, seed=seed)
    limits = replace(limits, end_ids=tokenizer.end_ids)
    requests = [
        Request(
            stream="eval",
            prompt_index=index,
            prompt_ids=tuple(tokenizer.encode(prompt)),
            group_size=each,
            limits=limits,
        )
        for index, prompt in enumerate(prompts)
    ]
    groups = []
    for i in tqdm(range(0, len(requests), PROMPTS_AT_ONCE), desc="sample", unit="batch"):
        groups += engine.generate(requests[i : i + PROMPTS_AT_ONCE], between_tokens=lambda: None)
    return [
        [
            Response(tokenizer.decode(ids[mask].tolist()), int(mask.sum()), bool(finished))
            for ids, mask, finished in zip(
                group.response_ids, group.response_mask, group.finished, strict=True
            )
        ]
        for group in groups
    ]


def distinct_trigram_share(texts: Sequence[str]) -> float:
    """Return the number of distinct word trigrams divided by the number of all word trigrams.

    Punctuation is ignored, but case is not. The share falls as the number of texts grows, so
    compare shares only between equal numbers of texts.
    """
    trigrams = []
    for text in texts:
        words = re.findall(r"[\w']+", text)
        trigrams += zip(words, words[1:], words[2:], strict=False)
    return len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def mean_length(
    responses: Sequence[Response], units: dict[str, Callable[[Response], int]]
) -> dict[str, float] | None:
    """Return the number of responses and their mean length in each unit.

    Return None if there are no responses.
    """
    if not responses:
        return None
    means = {name: statistics.mean(map(count, responses)) for name, count in units.items()}
    return {"responses": len(responses), **means}


def lengths(means: dict[str, Any], names: Sequence[str], unit: str) -> str:
    """Format the mean lengths of the categories `names`, in one unit, for a model card."""
    found = (means[name] for name in names)
    return ", ".join("none" if mean is None else f"{mean[unit]:.1f}" for mean in found)


def described(limits: SamplingLimits) -> str:
    """Describe sampling settings for a model card."""
    return f"temperature {limits.temperature}, {limits.max_new_tokens} new tokens"


def first_samples(
    documents: Sequence[Document], responses: Sequence[Response]
) -> list[dict[str, Any]]:
    """Return the responses to the first held-out prompts, for a model card."""
    return [
        {"prompt": document.prompt, "response": response.text, "finished": response.finished}
        for document, response in zip(documents[:CARD_SAMPLES], responses, strict=False)
    ]
