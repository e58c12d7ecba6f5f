"""Pretrain a policy as a starting point for GRPO, and write its model card."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch

from grpo_trainable.models.model_config import PRESETS, ModelConfig
from grpo_trainable.models.store import load_policy, save_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.tools.pretraining.arithmetic_corpus import arithmetic_corpus
from grpo_trainable.tools.pretraining.corpus import Corpus, Measurements, check_prompts, encode
from grpo_trainable.tools.pretraining.file_corpus import file_corpus
from grpo_trainable.tools.pretraining.games_corpus import games_corpus
from grpo_trainable.tools.pretraining.recipe import Recipe
from grpo_trainable.tools.pretraining.story_corpus import story_corpus
from grpo_trainable.tools.pretraining.training import train

CORPORA: dict[str, Callable[[Any], Corpus]] = {
    "stories": story_corpus,
    "arithmetic": arithmetic_corpus,
    "games": games_corpus,
}


def make_corpus(name: str, recipe: Recipe) -> Corpus:
    """Generate the corpus that `CORPORA` lists as `name`, or read a corpus from the file `name`.

    Raises:
        ValueError: If the file cannot be used. The message is one line.
    """
    make = CORPORA.get(name)
    return file_corpus(name, recipe) if make is None else make(recipe)


def pretrain(out: Path, recipe: Recipe, corpus: Corpus, command: str) -> Measurements:
    """Train a policy, write it and its model card to `out`, and return the measurements.

    Raises:
        ValueError: If the corpus cannot be used or the loss diverges. The message is one line.
    """
    preset = PRESETS[recipe.preset]
    tokenizer = Tokenizer.train(
        corpus.tokenizer_texts, preset.vocab_size, digits_alone=corpus.digits_alone
    )
    check_prompts(corpus, tokenizer, preset.context_length)
    config = replace(preset, vocab_size=tokenizer.vocab_size)
    rows = [encode(tokenizer, document, config.context_length) for document in corpus.documents]

    model = TransformerLM(config, recipe.seed)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{len(rows):,} documents, a vocabulary of {tokenizer.vocab_size} tokens, "
        f"{parameters:,} parameters"
    )
    started = time.process_time()
    counts = train(model, rows, recipe, tokenizer.pad_id, shuffle=corpus.shuffle)
    train_cpu_s = time.process_time() - started
    for name in ("card.json", "card.md"):  # an old model card would describe another policy
        (out / name).unlink(missing_ok=True)
    save_policy(out, model, tokenizer)
    for name, content in corpus.files.items():
        (out / name).write_text(content, "utf-8")
    # Measure the written policy, because its weights were rounded to float16.
    measured = corpus.measure(*load_policy(out), recipe.seed)
    trained = {
        "documents": len(rows),
        "parameters": parameters,
        **counts,
        "train_cpu_s": round(train_cpu_s, 1),
    }
    card = make_card(command, recipe, config, trained, measured)
    (out / "card.json").write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", "utf-8")
    (out / "card.md").write_text(card_text(card, measured), "utf-8")
    return measured


# ---- The model card: recipe and quality of the policy --------------------------------------------


def make_card(
    command: str,
    recipe: Recipe,
    config: ModelConfig,
    counts: dict[str, Any],
    measured: Measurements,
) -> dict[str, Any]:
    """Return all facts about a policy. `counts` holds what training counted."""
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
    """Format the model card as readable Markdown."""
    lines = [
        "# The pretrained policy",
        "",
        f"Made by `{card['command']}` (seed {card['seed']}): {card['parameters']:,} parameters, "
        f"{card['tokens_seen']:,} tokens seen, {card['response_tokens_seen']:,} of them response "
        f"tokens, in {card['train_cpu_s']:.0f} CPU-seconds on {card['machine']['threads']} "
        f"thread(s). The file card.json contains all facts.",
        "",
        "| measurement | value | how it was measured |",
        "|---|---|---|",
        *(f"| {what} | {value} | {measured.how[name]} |" for what, value, name in measured.rows),
        "",
        f"## {len(card['samples'])} samples",
        "",
        f"These are the first held-out prompts ({measured.sampling}), without any selection. `[…]` "
        "marks a response that was cut off.",
        "",
    ]
    for item in card["samples"]:
        response = item["response"] + ("" if item["finished"] else " […]")
        lines += [f"**{item['prompt'].strip()}**", "", "> " + response.replace("\n", "\n> "), ""]
    return "\n".join(lines)
