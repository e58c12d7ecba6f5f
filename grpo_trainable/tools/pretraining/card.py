"""The card of a policy, as JSON and as Markdown: how it was made and how good it is."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

import tokenizers
import torch

from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.tools.pretraining.corpus import Measurements
from grpo_trainable.tools.pretraining.recipe import Recipe


def make_card(
    command: str,
    recipe: Recipe,
    config: ModelConfig,
    counts: dict[str, Any],
    measured: Measurements,
) -> dict[str, Any]:
    """Everything there is to say about a policy; `counts` are those of its training."""
    return {
        "command": command,
        "seed": recipe.seed,
        "recipe": asdict(recipe),
        "model": config.to_dict(),
        **counts,
        **measured.facts,
        "measured_how": measured.how,
        "machine": {
            "threads": torch.get_num_threads(),
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


def card_text(card: dict[str, Any], measured: Measurements) -> str:
    """The card as Markdown, for a person."""
    lines = [
        "# The pretrained policy",
        "",
        f"Made by `{card['command']}` (seed {card['seed']}): {card['parameters']:,} parameters, "
        f"{card['tokens_seen']:,} tokens seen, {card['response_tokens_seen']:,} of them response "
        f"tokens, in {card['train_cpu_s']:.0f} CPU-seconds on {card['machine']['threads']} "
        f"thread(s). All of it is in card.json.",
        "",
        "| what | value | how it was measured |",
        "|---|---|---|",
        *(f"| {what} | {value} | {measured.how[name]} |" for what, value, name in measured.rows),
        "",
        f"## {len(card['samples'])} samples",
        "",
        f"The first held-out prompts, {measured.sampling}, nothing picked. `[…]` marks a response "
        "that was cut.",
        "",
    ]
    for item in card["samples"]:
        response = item["response"] + ("" if item["finished"] else " […]")
        lines += [f"**{item['prompt'].strip()}**", "", "> " + response.replace("\n", "\n> "), ""]
    return "\n".join(lines)
