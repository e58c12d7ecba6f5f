"""Convert settings to fields of TRL's config classes, and report mistakes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from grpo_trainable.text import did_you_mean

TRL_MAX_LENGTH = 1024  # TRL's default
SHARE_LOGGED, SHARE_MEASURED = 0.01, 0.1  # intervals, as shares of all steps
CHECKPOINTS_KEPT = 2

# Fields that the command sets, or that have no effect on it, each with the reason.
REFUSED = {
    "output_dir": "use --out",
    "seed": "use --seed",
    "resume_from_checkpoint": "the command continues from the newest checkpoint without it",
    "save_only_model": "an interrupted run could not continue",
    "trust_remote_code": "code that comes with a model is never run",
    "dataset_text_field": "the column is always called text",
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict", "disable_tqdm", "run_name", "project", "local_rank"),
        "has no effect here",
    ),
}
ONLINE = ("hub_", "push_to_hub", "trackio_")  # fields for online services start with one of these


def split_assignments(assignments: Sequence[str]) -> dict[str, str]:
    """Return a mapping from each key to the text of its value.

    Args:
        assignments: Texts of the form KEY=VALUE.

    Raises:
        ValueError: If a text has another form, or if a key is given twice or is not allowed. The
            message is one line.
    """
    found: dict[str, str] = {}
    for text in assignments:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not (key and equals):
            raise ValueError(f"--set {text}: must have the form KEY=VALUE")
        if key in found:
            raise ValueError(f"--set {key}: is given twice")
        if key in REFUSED:
            raise ValueError(f"--set {key}: {REFUSED[key]}")
        if key.startswith(ONLINE):
            raise ValueError(f"--set {key}: the command works offline")
        found[key] = value
    return found


def converted(config_class: Any, texts: Mapping[str, str]) -> dict[str, Any]:
    """Convert the text of each value to the type of the field.

    `none` means None. Commas separate the items of a list.

    Args:
        config_class: A config class of TRL.
        texts: Mapping from the name of each field to the text of its value.

    Raises:
        ValueError: If there is no such field, or the field cannot have the value. The message is
            one line that names the option.
    """
    from transformers import HfArgumentParser

    names = {field.name for field in fields(config_class) if field.init}
    for key in texts.keys() - names:
        near = did_you_mean(key, names)
        suggestion = f"; {near}" if near else ""
        raise ValueError(
            f"--set {key}: {config_class.__name__} of TRL has no such field{suggestion}"
        )
    parser = HfArgumentParser(config_class, add_help=False, exit_on_error=False)
    hints = get_type_hints(config_class)
    found = {}
    for key, text in texts.items():
        if text.lower() == "none" and type(None) in get_args(hints[key]):
            found[key] = None
            continue
        is_list = any(action.dest == key and action.nargs == "+" for action in parser._actions)
        words = [f"--{key}", *text.split(",")] if is_list else [f"--{key}={text}"]
        try:
            found[key] = getattr(parser.parse_known_args(words)[0], key)
        except argparse.ArgumentError as error:
            raise ValueError(f"--set {key}={text}: {error.message}") from None
    return found


def refuse_beyond_context(settings: Mapping[str, Any], context: int | None) -> None:
    """Check that the longest sequence fits into the context of the model.

    Raises:
        ValueError: If `max_length` exceeds the context. The message is one line.
    """
    length = settings.get("max_length")
    if length is not None and context is not None and length > context:
        raise ValueError(f"--set max_length={length}: the model has a context of {context} tokens")


def own_defaults(settings: Mapping[str, Any], context: int | None, *, gpu: bool) -> dict[str, Any]:
    """Return the fields whose defaults differ from TRL's.

    Args:
        settings: The fields that the user has set.
        context: Context length of the model, in tokens.
        gpu: True if the model is trained on a GPU.
    """
    defaults: dict[str, Any] = {
        "max_length": min(TRL_MAX_LENGTH, context or TRL_MAX_LENGTH),
        "report_to": "tensorboard",
        "logging_steps": SHARE_LOGGED,
        "logging_nan_inf_filter": False,  # a loss that is not a number must be visible
        "eval_strategy": "steps",
        "eval_steps": SHARE_MEASURED,
        "eval_on_start": True,
        "save_steps": SHARE_MEASURED,
        "save_total_limit": CHECKPOINTS_KEPT,
    }
    if not gpu:
        defaults |= {"bf16": False, "dataloader_pin_memory": False}
        if "gradient_checkpointing" not in settings:
            defaults["activation_checkpointing"] = False
    return {**defaults, **settings}
