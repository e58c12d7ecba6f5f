"""Text about the trials that a plan would run: their differences, then their shared settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpo_trainable.command_line import align
from grpo_trainable.config import GRPOConfig, defaults_with, explained_defaults, flatten
from grpo_trainable.text import plural, shown_truth

LABELS = ("arm", "seed")  # columns that every table has
WIDTH = 100
CPUS = (
    "an actor that reserves 0.95 CPUs uses one core, and an actor that reserves 1.9 CPUs uses two; "
    "the trial's own process reserves 0.1"
)
MOST_CHARACTERS = 1200  # longest prompt or ground truth that is shown in full


def preview(trials: Sequence[GRPOConfig]) -> str:
    """Return a table with one line per trial, followed by the settings that all trials share.

    If the trials differ in the CPUs of an actor, a line below the table explains these numbers.
    """
    flat = [trial.in_effect for trial in trials]
    columns = [*LABELS, *differing(trials)]
    rows = [[shown(settings.get(key, "-")) for key in columns] for settings in flat]
    cpus = [CPUS] if any(key.endswith("_cpus") for key in columns) else []
    titles = ("the same in every trial", "left at their defaults in every trial")
    return "\n".join([align([columns, *rows]), *cpus, *_in_common(trials, titles)])


def settings_of(trial: GRPOConfig, listed: Callable[[str], bool]) -> str:
    """Return those settings of a trial that `listed` accepts, in the form of `preview`."""
    titles = ("not at their defaults", "left at their defaults")
    return "\n".join(_in_common([trial], titles, listed)).lstrip("\n")


def differing(trials: Sequence[GRPOConfig]) -> list[str]:
    """Return the keys in which the trials differ, besides arm and seed."""
    flat = [trial.in_effect for trial in trials]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    return [key for key in keys if key not in LABELS and not _is_shared(key, flat)]


def in_short(trials: Sequence[GRPOConfig]) -> str:
    """Return one line with the number of trials and the keys in which they differ."""
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
    """Yield a trial's first training prompt as the model reads it, and the prompt's ground truth.

    The caller has checked the trial's inputs.
    """
    from grpo_trainable.control.spaces import spaces_of
    from grpo_trainable.models.directory import policy_tokenizer
    from grpo_trainable.tasks.prompts import Prompts, build_task

    prompts = Prompts(trial, build_task(trial), policy_tokenizer(trial.model))
    text, _, truth = prompts.told("train", 0)
    if trial.model.env is not None:
        group, spaces = trial.rollout.group_size, spaces_of(trial.model.env)
        yield f"\nin {trial.model.env} the policy sees {spaces.seen} and takes {spaces.done}"
        yield f"a group is {group} episodes with the same start; the first group starts from {text}"
        return
    yield f"\nthe first prompt of arm {trial.arm}, as the model reads it:"
    yield from (f"  | {line}" for line in shortened(text).split("\n"))
    what = "the specification for its environment" if trial.env.plays else "its ground truth"
    yield f"{what}: {shortened(shown_truth(truth))}"


def shortened(text: str) -> str:
    """Return the text; in a long text, the number of omitted characters replaces the middle."""
    left_out = len(text) - MOST_CHARACTERS
    if left_out <= 0:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} [… {left_out:,} characters …] {text[-half:]}"


def shown(value: Any) -> str:
    """Return a value in full, as one would write it for `--set`."""
    if value is None or isinstance(value, str):
        return "none" if value is None else value
    if isinstance(value, float):
        value = float(f"{value:.12g}")  # so that 5 · 3e-4 is shown as 0.0015
    return json.dumps(value, separators=(",", ":"))


def _is_shared(key: str, flat: Sequence[dict[str, Any]]) -> bool:
    first = flat[0]
    same = all(key in settings and settings[key] == first.get(key) for settings in flat)
    return same and key not in LABELS


def _in_common(
    trials: Sequence[GRPOConfig],
    titles: tuple[str, str],
    listed: Callable[[str], bool] = lambda key: True,
) -> Iterator[str]:
    """Yield the settings that all trials share, if at least one trial reads them.

    Chosen settings come first, then settings that follow from the model or the device, with the
    reason. Settings that have their default in every trial come last.

    Args:
        trials: The trials.
        titles: Titles for the chosen settings and for the settings that have their defaults.
        listed: Returns True for the keys to show.
    """
    flat = [trial.in_effect for trial in trials]
    given = [flatten(trial.to_dict()) for trial in trials]
    defaults = [defaults_with(trial.task.name) for trial in trials]
    explained = {
        key: reason
        for trial in trials
        for key, reason in explained_defaults(trial).items()
        if listed(key)
    }
    shared = [
        key
        for key in flat[0]
        if _is_shared(key, flat) and listed(key) and any(trial.reads(key) for trial in trials)
    ]
    chosen = [
        key
        for key in shared
        if key not in explained
        and not all(
            key in own and own[key] == settings[key]
            for own, settings in zip(defaults, given, strict=True)
        )
    ]
    by_default = [key for key in shared if key not in chosen and key not in explained]
    assigned = {key: f"{key}={shown(flat[0][key])}" for key in shared}
    if chosen:
        yield f"\n{titles[0]}:"
        yield from wrapped([assigned[key] for key in chosen])
    if explained:
        yield "\ndefaults that follow from the model or the device:"
        yield from (f"  {assigned.get(key, key)} ({reason})" for key, reason in explained.items())
    if by_default:
        yield f"\n{titles[1]}:"
        yield from wrapped([assigned[key] for key in by_default])


def wrapped(items: Sequence[str]) -> Iterator[str]:
    """Yield the items in lines of at most `WIDTH` characters, without breaking an item."""
    line = ""
    for item in items:
        if line and len(line) + 2 + len(item) > WIDTH:
            yield line
            line = ""
        line += f"  {item}"
    yield line
