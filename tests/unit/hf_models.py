"""Small transformers models for tests: random weights and a trained tokenizer."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from grpo_trainable.models.tokenizer import END_OF_TEXT, PAD, Tokenizer

VOCAB_SIZE, CONTEXT_LENGTH = 320, 64  # 320: more than the tokenizer's vocabulary
# Each family, and True if its head is tied.
FAMILIES = [("llama", False), ("qwen2", True), ("qwen3", False), ("qwen3", True)]
TEXTS = ["Write a story that includes the word: fox\n", "The fox ran home. The old fox slept.\n"]


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS * 10, 290)


def write_json_files(directory: Path, config: dict[str, Any] | None = None, **others: Any) -> Path:
    """Write the files next to the weights: config.json, tokenizer.json, and `others` by name."""
    directory.mkdir(parents=True, exist_ok=True)
    base = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "eos_token_id": tokenizer().eos_id,
    }
    contents = {"config": {**base, **(config or {})}, **others}
    for name, content in contents.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    tokenizer().save(directory / "tokenizer.json")
    return directory


def write_reward_model(
    directory: Path, family: str = "llama", *, template: str | None = None, **config: Any
) -> str:
    """Write a classifier with one label, and return its path. `template` is its chat template."""
    settings = {"kind": "AutoModelForSequenceClassification", "num_labels": 1, **config}
    write_hf_model(directory, family, **settings)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return str(directory)


def write_hf_model(
    directory: Path,
    family: str = "llama",
    *,
    tied: bool = False,
    seed: int = 0,
    kind: str = "AutoModelForCausalLM",
    **config: Any,
) -> str:
    """Write a model that the class `kind` of transformers loads, and return its path."""
    import transformers

    kinds = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": functools.partial(transformers.Qwen3Config, head_dim=16),
    }
    shape = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer().eos_id,
        "pad_token_id": tokenizer().pad_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, kind).from_config(kinds[family](**shape | config))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2:
                    parameter.mul_(5)  # so that each token depends on the others
                elif name.endswith("bias"):
                    parameter.normal_()
    model.save_pretrained(directory)
    tokenizer().save(directory / "tokenizer.json")
    named = {"eos_token": END_OF_TEXT, "pad_token": PAD}
    named["tokenizer_class"] = "PreTrainedTokenizerFast"
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return str(directory)
