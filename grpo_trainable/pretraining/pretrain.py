"""Makes a policy to start GRPO from, and its card."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_trainable.models.store import load_policy, save_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import PRESETS, TransformerLM
from grpo_trainable.pretraining.card import card_text, make_card
from grpo_trainable.pretraining.corpus import (
    check_prompts,
    encode,
    read_corpus,
    split_corpus,
    story_corpus,
)
from grpo_trainable.pretraining.measuring import measure
from grpo_trainable.pretraining.recipe import Recipe
from grpo_trainable.pretraining.training import train

TOKENIZER_DOCUMENTS = 20_000  # they train as good a tokenizer as all documents, and sooner
TOKENIZER_STORIES = 2000


def pretrain(out: Path, recipe: Recipe, corpus: str | None, command: str) -> dict[str, Any]:
    """Makes the policy, writes it and its card to `out`, and returns the card.

    Raises:
        ValueError: the corpus cannot be used or the loss diverges, in one line.
    """
    preset = PRESETS[recipe.preset]
    if corpus is None:
        documents, held_out = story_corpus(recipe)
        lines = {}
        # Prompts name every noun equally often: many of them and few stories make more nouns one
        # token, and a noun that is one token is easier to copy.
        texts = [d.prompt for d in documents[:TOKENIZER_DOCUMENTS]]
        texts += [d.response for d in documents[:TOKENIZER_STORIES]]
    else:
        lines = read_corpus(corpus)
        documents, held_out = split_corpus(list(lines.values()), recipe.seed)
        texts = [d.prompt + d.response for d in documents[:TOKENIZER_DOCUMENTS]]
    tokenizer = Tokenizer.train(texts, preset.vocab_size)
    check_prompts(tokenizer, lines, preset.context_length)
    config = replace(preset, vocab_size=tokenizer.vocab_size)
    rows = [encode(tokenizer, document, config.context_length) for document in documents]

    model = TransformerLM(config, recipe.seed)
    print(
        f"{len(documents):,} documents, {tokenizer.vocab_size} tokens, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters"
    )
    started = time.process_time()
    counts = train(model, rows, recipe, tokenizer.pad_id, shuffle=corpus is not None)
    train_cpu_s = time.process_time() - started
    for name in ("card.json", "card.md"):  # an older card would belong to another policy
        (out / name).unlink(missing_ok=True)
    save_policy(out, model, tokenizer)
    # The written policy is measured, whose weights have been rounded to float16.
    stored, stored_tokenizer = load_policy(out)
    facts: dict[str, Any] = {
        "documents": len(documents),
        "parameters": sum(p.numel() for p in model.parameters()),
        **counts,
        "train_cpu_s": round(train_cpu_s, 1),
        **measure(stored, stored_tokenizer, held_out, recipe.seed),
    }
    card = make_card(command, recipe, config, facts, corpus)
    (out / "card.json").write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", "utf-8")
    (out / "card.md").write_text(card_text(card), "utf-8")
    return card
