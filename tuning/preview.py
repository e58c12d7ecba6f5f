"""What a plan would run, as text: in what the trials differ first, what they share once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_trainable.command_line import align
from grpo_trainable.config import GRPOConfig, defaults_with, flatten
from grpo_trainable.text import plural

LABELS = ("arm", "seed")  # always in the table
WIDTH = 100
MOST_CHARACTERS = 1200  # of a prompt, or of a true answer, that are shown


def preview(trials: Sequence[GRPOConfig]) -> str:
    """A table with a line for each trial, in their order, and below it what all have in common."""
    flat = [trial.in_effect for trial in trials]
    columns = [*LABELS, *differing(trials)]
    rows = [[shown(settings.get(key, "-")) for key in columns] for settings in flat]
    return "\n".join([align([columns, *rows]), *_in_common(trials)])


def differing(trials: Sequence[GRPOConfig]) -> list[str]:
    """The keys in which the trials differ, beside arm and seed."""
    flat = [trial.in_effect for trial in trials]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    return [key for key in keys if key not in LABELS and not _is_shared(key, flat)]


def in_short(trials: Sequence[GRPOConfig]) -> str:
    """How many trials there are and in what they differ, in a line."""
    if len(trials) == 1:
        return f"1 trial: arm {trials[0].arm}, seed {trials[0].seed}"
    arms, seeds = ({trial[label] for trial in trials} for label in LABELS)
    several = {"arm": arms, "seed": seeds}
    counts = [plural(len(found), noun) for noun, found in several.items() if len(found) > 1]
    keys = [*(noun for noun, found in several.items() if len(found) > 1), *differing(trials)]
    of = f" ({' × '.join(counts)})" if len(counts) > 1 else ""
    differ = f", which differ in {', '.join(keys)}" if keys else ""
    return f"{plural(len(trials), 'trial')}{of}{differ}"


def example_lines(trial: GRPOConfig) -> Iterator[str]:
    """Yields the first training prompt of a trial as its model reads it, behind a bar, and its true
    answer. The trial's inputs were checked."""
    from grpo_trainable.control.spaces import spaces_of
    from grpo_trainable.models.directory import policy_tokenizer
    from grpo_trainable.tasks.prompts import Prompts, build_task

    prompts = Prompts(trial, build_task(trial), policy_tokenizer(trial.model))
    text, _, truth = prompts.told("train", 0)
    if trial.model.env is not None:
        group, spaces = trial.rollout.group_size, spaces_of(trial.model.env)
        yield f"\nthe policy sees {spaces.seen} and does {spaces.done} in {trial.model.env}"
        yield f"a group is {group} episodes that begin alike; the first from {text}"
        return
    yield f"\nthe first prompt of arm {trial.arm}, as the model reads it:"
    yield from (f"  | {line}" for line in shortened(text).split("\n"))
    what = "what its environment is told" if trial.env.plays else "its true answer"
    yield f"{what}: {shortened(truth if isinstance(truth, str) else json.dumps(truth))}"


def shortened(text: str) -> str:
    """The text; a long one without its middle, of which the length is told."""
    left_out = len(text) - MOST_CHARACTERS
    if left_out <= 0:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} [… {left_out:,} characters …] {text[-half:]}"


def shown(value: Any) -> str:
    """A value as `--set` takes it, whole."""
    if value is None or isinstance(value, str):
        return "none" if value is None else value
    if isinstance(value, float):
        value = float(f"{value:.12g}")  # 5 · 3e-4 is 0.0015
    return json.dumps(value, separators=(",", ":"))


def _is_shared(key: str, flat: Sequence[dict[str, Any]]) -> bool:
    first = flat[0]
    same = all(key in settings and settings[key] == first.get(key) for settings in flat)
    return same and key not in LABELS


def _in_common(trials: Sequence[GRPOConfig]) -> Iterator[str]:
    """The settings that all trials share and one reads at least: those that somebody chose, then
    those that are the defaults of every trial."""
    flat = [trial.in_effect for trial in trials]
    given = [flatten(trial.to_dict()) for trial in trials]
    defaults = [defaults_with(trial.task.name) for trial in trials]
    shared = [
        key
        for key in flat[0]
        if _is_shared(key, flat) and any(trial.reads(key) for trial in trials)
    ]
    chosen = [
        key
        for key in shared
        if not all(
            key in own and own[key] == settings[key]
            for own, settings in zip(defaults, given, strict=True)
        )
    ]
    for title, keys in (
        ("the same in every trial:", chosen),
        ("left at its default in every trial:", [key for key in shared if key not in chosen]),
    ):
        if keys:
            yield f"\n{title}"
            yield from wrapped([f"{key}={shown(flat[0][key])}" for key in keys])


def wrapped(items: Sequence[str]) -> Iterator[str]:
    """The items in lines of at most `WIDTH` characters; one is never broken."""
    line = ""
    for item in items:
        if line and len(line) + 2 + len(item) > WIDTH:
            yield line
            line = ""
        line += f"  {item}"
    yield line
