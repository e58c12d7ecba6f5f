"""The card of a policy, as JSON and as Markdown: how it was made and how good it is."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

import tokenizers
import torch

from grpo_trainable.models.transformer import ModelConfig
from grpo_trainable.pretraining.measuring import LIMITS, RESPONSES_PER_KEYWORD
from grpo_trainable.pretraining.recipe import Recipe

MEASURED_HOW = {
    "held_out_loss_nats": (
        "mean negative log-likelihood per response token (end-of-text included, prompt excluded) "
        "over {held_out_documents} held-out documents: {held_out_source}"
    ),
    "held_out_inclusion_rate": (
        "share of {held_out_inclusion_responses} responses that hold their keyword as a whole "
        "word: {each} responses to each of {held_out_inclusion_keywords} nouns of nouns.txt that "
        "the keyword task holds out, {sampling}"
    ),
    "distinct_trigram_share": (
        "distinct / all word trigrams of {distinct_trigram_responses} responses to the prompts of "
        "held-out documents, {sampling}; for the corpus the same number of held-out documents, cut "
        "to the same number of tokens"
    ),
    "mean_length": (
        "means over those {held_out_inclusion_responses} responses, and over the "
        "{held_out_documents} held-out documents; tokens count end-of-text, sentences end where "
        "`grpo_trainable.pretraining.stories.count_sentences` says"
    ),
    "finished_share": "share of those {held_out_inclusion_responses} responses that end within "
    "the limit by themselves",
}


def make_card(
    command: str, recipe: Recipe, config: ModelConfig, facts: dict[str, Any], corpus: str | None
) -> dict[str, Any]:
    """Everything there is to say about a policy; `facts` were counted and measured."""
    values = facts | {
        "each": RESPONSES_PER_KEYWORD,
        "sampling": f"temperature {LIMITS.temperature}, {LIMITS.max_new_tokens} new tokens",
        "held_out_source": (
            f"lines of {corpus} that were not trained on"
            if corpus
            else "fresh documents of the same grammar under another seed, with the keyword share "
            "of the later part of the corpus"
        ),
    }
    return {
        "command": command,
        "seed": recipe.seed,
        "recipe": asdict(recipe),
        "model": config.to_dict(),
        **facts,
        "measured_how": {name: how.format(**values) for name, how in MEASURED_HOW.items()},
        "machine": {
            "threads": torch.get_num_threads(),
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


MEASURED_LENGTHS = {
    "all": "all",
    "with the keyword": "with_keyword",
    "without it": "without_keyword",
    "corpus": "corpus",
}


def lengths(card: dict[str, Any], unit: str) -> str:
    """One number for each of `MEASURED_LENGTHS`."""
    means = map(card["mean_length"].get, MEASURED_LENGTHS.values())
    return ", ".join("none" if mean is None else f"{mean[unit]:.1f}" for mean in means)


def card_text(card: dict[str, Any]) -> str:
    """The card as Markdown, for a person."""
    how = card["measured_how"]
    rows = [
        ("held-out loss", f"{card['held_out_loss_nats']:.3f} nats a token", "held_out_loss_nats"),
        (
            "held-out inclusion rate",
            f"{card['held_out_inclusion_rate']:.3f}",
            "held_out_inclusion_rate",
        ),
        *(
            (
                f"{unit} a response: {', '.join(MEASURED_LENGTHS)}",
                lengths(card, unit),
                "mean_length",
            )
            for unit in ("tokens", "sentences")
        ),
        (
            "distinct trigrams, policy / corpus",
            f"{card['distinct_trigram_share']:.3f} / {card['distinct_trigram_share_corpus']:.3f}",
            "distinct_trigram_share",
        ),
        ("responses that finish", f"{card['finished_share']:.3f}", "finished_share"),
    ]
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
        *(f"| {what} | {value} | {how[name]} |" for what, value, name in rows),
        "",
        f"## {len(card['samples'])} samples",
        "",
        f"The first held-out prompts, temperature {LIMITS.temperature}, {LIMITS.max_new_tokens} "
        "new tokens, nothing picked. `[…]` marks a response that was cut.",
        "",
    ]
    for item in card["samples"]:
        response = item["response"] + ("" if item["finished"] else " […]")
        lines += [f"**{item['prompt'].strip()}**", "", "> " + response.replace("\n", "\n> "), ""]
    return "\n".join(lines)
