"""Read a trial's Parquet files: lags, uses, held-out responses, versions and gradient steps.

A trial has a directory for each kind of record, such as `rollouts`. Each file in this directory is
called a *part*, and contains the records that the trial wrote after one round.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_trainable.protocol.round_records import SCHEMAS
from grpo_trainable.text import shown_truth
from reports import experiment_files
from reports.experiment_files import content_of, one_line
from reports.records import MAX_NUMBER, TrialRecord

EXAMPLES = 4  # number of held-out prompts whose responses are shown

MAX_SECONDS = 1 << 40  # seconds since 1970; a larger number is not a time

# Columns that older versions did not write, or that only some trials have.
OPTIONAL = frozenset({"turns", "ground_truth", "format_reward", "answer_reward", "parts"})

# The columns to read from each kind of part. The parts have other columns too.
READ = {
    "rollouts": ("round", "cursor", "lag", "first_use"),
    "evaluations": tuple(n for n in SCHEMAS["evaluations"].names if n != "task"),
    "steps": ("round", "step", "clip_fraction", "kl_behaviour_nats"),
    "versions": ("at", "side", "actor", "version"),
}


def read_parts(trial: TrialRecord, kind: str) -> tuple[pa.Table, list[str]]:
    """Read the parts of one kind of record, up to the last round with a row in result.json.

    Returns:
        One table of all parts, and a line for each damaged part.
    """
    schema, tables, damaged = pa.schema(map(SCHEMAS[kind].field, READ[kind])), [], []
    root = trial.root
    try:
        names = list(experiment_files.entries(root, *trial.path, kind))
    except FileNotFoundError:
        names = []
    except OSError as error:
        names, damaged = [], [f"{trial.name}/{kind} cannot be read ({error.strerror})"]
    for name in names:
        number = re.fullmatch(r"part-(\d+)\.parquet", name)
        if number is None or int(number[1]) > trial.round:
            continue  # not a part, or from a round without a row; a resume repeats that round
        content = content_of(root, (*trial.path, kind, name), damaged)
        if content is None:
            continue
        try:
            # `read_table` would add a column `a` for a directory called `a=b` in the path.
            file = pq.ParquetFile(pa.BufferReader(content))
            table = file.read(columns=schema.names, use_threads=False)
            for lacking in OPTIONAL.intersection(schema.names).difference(table.column_names):
                nulls = pa.nulls(len(table), schema.field(lacking).type)
                table = table.append_column(lacking, nulls)
            table = table.select(schema.names).cast(schema)
            table.validate(full=True)  # without this check, text that is not UTF-8 would fail later
            tables.append(table)
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            reason = one_line(error)
            reason = reason if len(reason) <= 120 else reason[:119] + "…"
            damaged.append(f"{trial.name}/{kind}/{name} is damaged and was skipped ({reason})")
    return pa.concat_tables(tables) if tables else schema.empty_table(), damaged


@dataclass(frozen=True, kw_only=True)
class Example:
    """Held-out prompt with one response before training and one at the latest evaluation."""

    prompt: str
    truth: str | None  # the ground truth in readable form; None if it was not kept
    before: str
    before_scores: str
    after: str
    after_scores: str


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Held-out prompts with their responses."""

    round: int  # round of the latest evaluation
    pairs: Sequence[Example]


@dataclass(frozen=True, kw_only=True)
class VersionPoint:
    """Time at which one actor changed to another policy version."""

    second: float  # seconds since the trial's first change
    side: str  # "learner" or "generator"
    actor: str
    version: int


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """Figures of one gradient step of a round: medians over the rounds, or None if unknown."""

    clip_fraction: float | None
    kl_sampler_nats: float | None  # KL(sampler || policy), the negated kl/behaviour_nats


@dataclass(frozen=True, kw_only=True)
class TrialFiles:
    """Figures from the Parquet files of a trial."""

    lags: Counter[int]  # lag of a group when it was first trained on -> number of groups
    uses: float | None  # number of rounds that trained on a group, mean over the groups
    held_out: Mapping[str, float]  # prompt -> mean reward of its responses in the last evaluation
    held_out_first: Mapping[str, float]  # prompt -> mean reward in the evaluation before training
    examples: Examples
    changes: Sequence[VersionPoint]
    steps: Mapping[int, StepPoint]  # position of the step in its round (from 1) -> its figures
    damaged: Sequence[str]  # a line for each damaged part


def read_all(trials: Sequence[TrialRecord]) -> dict[str, TrialFiles]:
    """Return the figures from the Parquet files of trials, by trial name."""
    return {trial.name: read_files(trial) for trial in trials}


def read_files(trial: TrialRecord) -> TrialFiles:
    """Read the figures from the Parquet files of a trial."""
    rollouts, damaged = read_parts(trial, "rollouts")
    evaluations, damaged_evaluations = read_parts(trial, "evaluations")
    versions, damaged_versions = read_parts(trial, "versions")
    steps, damaged_steps = read_parts(trial, "steps")
    answered = evaluations.to_pylist()
    return TrialFiles(
        lags=_lags(rollouts),
        uses=_uses(rollouts),
        held_out=_held_out(answered, max(_rounds(answered), default=0)),
        held_out_first=_held_out(answered, 0),
        examples=_examples(answered, EXAMPLES),
        changes=_changes(versions.to_pylist()),
        steps=_steps(steps.to_pylist()),
        damaged=[*damaged, *damaged_evaluations, *damaged_versions, *damaged_steps],
    )


def _steps(rows: Sequence[Mapping[str, Any]]) -> dict[int, StepPoint]:
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["step"] is not None:
            by_step.setdefault(row["step"], []).append(row)

    def middle(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
        values = [row[name] for row in rows if row[name] is not None and math.isfinite(row[name])]
        return statistics.median(values) if values else None

    def negated(value: float | None) -> float | None:
        return None if value is None else 0.0 - value  # avoids a negative zero

    return {
        step: StepPoint(
            clip_fraction=middle(by_step[step], "clip_fraction"),
            kl_sampler_nats=negated(middle(by_step[step], "kl_behaviour_nats")),
        )
        for step in sorted(by_step)
    }


def _lags(rollouts: pa.Table) -> Counter[int]:
    """Return the number of groups at each lag. A row is one response of a group."""
    first = rollouts.filter(pc.field("first_use") & pc.field("lag").is_valid())
    groups = first.group_by(["round", "cursor"]).aggregate([("lag", "max")])
    return Counter(groups.column("lag_max").to_pylist())


def _uses(rollouts: pa.Table) -> float | None:
    """Return the mean number of rounds that trained on a group.

    A group has rows in each round that trained on it.
    """
    trained = rollouts.group_by(["round", "cursor"]).aggregate([]).num_rows
    groups = rollouts.group_by("cursor").aggregate([]).num_rows
    return trained / groups if groups else None


def _rounds(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return [row["round"] for row in rows if row["round"] is not None]


def _held_out(rows: Sequence[Mapping[str, Any]], round_: int) -> dict[str, float]:
    """Return the mean reward for each prompt. Prompts with equal texts count as one prompt.

    Args:
        rows: The responses of all evaluations.
        round_: The number of rounds before the evaluation.
    """
    rewards: dict[str, list[float]] = {}
    for row in rows:
        prompt, reward = row["prompt"], row["reward"]
        if row["round"] == round_ and None not in (prompt, reward) and math.isfinite(reward):
            rewards.setdefault(prompt, []).append(reward)
    return {prompt: statistics.fmean(own) for prompt, own in rewards.items()}


def _examples(rows: Sequence[Mapping[str, Any]], number: int) -> Examples:
    """Return the first response to each of the first held-out prompts, without selection."""
    by_round: dict[int, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        if not is_whole(row):
            continue
        prompts = by_round.setdefault(row["round"], {})
        known = prompts.get(row["cursor"])
        if known is None or row["response_index"] < known["response_index"]:
            prompts[row["cursor"]] = row
    latest = max(by_round, default=0)
    if latest == 0 or 0 not in by_round:
        return Examples(round=latest, pairs=())
    before, after = by_round[0], by_round[latest]
    return Examples(
        round=latest,
        pairs=[
            Example(
                prompt=before[cursor]["prompt"],
                truth=truth_text(before[cursor]),
                before=response_text(before[cursor]),
                before_scores=scores_text(before[cursor]),
                after=response_text(after[cursor]),
                after_scores=scores_text(after[cursor]),
            )
            for cursor in sorted(before.keys() & after.keys())[:number]
        ],
    )


def is_whole(row: Mapping[str, Any]) -> bool:
    """Return True if a row has a value in every column that is not optional."""
    return all(value is not None for name, value in row.items() if name not in OPTIONAL)


def response_text(row: Mapping[str, Any]) -> str:
    """Return a response in readable form. An episode is shown turn by turn, with rewards."""
    lines = [line for turn in _turns(row["turns"]) for line in _turn_lines(turn)]
    return "\n".join(lines) if lines else row["response"]


def _turns(stored: str | None) -> list[dict[str, Any]]:
    """Return the turns of an episode; empty if there are none or they are malformed."""
    try:
        turns = json.loads(stored or "[]")
    except (ValueError, RecursionError):
        return []
    return turns if isinstance(turns, list) and all(map(_is_turn, turns)) else []


def _is_turn(value: Any) -> bool:
    """Return True for a turn of a response: an action, its reward and the observation."""
    if not isinstance(value, dict) or not value.keys() >= {"action", "observation", "reward"}:
        return False
    action, observation, reward = value["action"], value["observation"], value["reward"]
    earned = isinstance(reward, int | float) and abs(reward) < MAX_NUMBER
    texts = isinstance(action, str) and isinstance(observation, str)
    return texts and (reward is None or earned)


def truth_text(row: Mapping[str, Any]) -> str | None:
    """Return the ground truth of a row in readable form, or None."""
    stored = row["ground_truth"]
    try:
        truth = json.loads(stored or "null")
        return None if truth is None else shown_truth(truth)
    except (ValueError, RecursionError):  # not JSON, so not written by this package
        return stored


def scores_text(row: Mapping[str, Any]) -> str:
    """Return `reward 0.50`, plus every part of the reward.

    The format reward and the answer reward are included if the row has both.
    """
    built_in = {"format": row["format_reward"], "answer": row["answer_reward"]}
    parts = ({} if None in built_in.values() else built_in) | _numbers(row["parts"])
    scores = [("reward", row["reward"]), *parts.items()]  # a part may also be named "reward"
    return ", ".join(f"{name} {value:.2f}" for name, value in scores)


def _numbers(stored: str | None) -> dict[str, float]:
    """Return the parts of a reward; empty if there are none or they are malformed."""
    try:
        parts = json.loads(stored or "{}")
    except (ValueError, RecursionError):
        return {}
    given = parts.items() if isinstance(parts, dict) else ()
    return {k: v for k, v in given if isinstance(v, int | float) and abs(v) < MAX_NUMBER}


def _turn_lines(turn: Mapping[str, Any]) -> Iterator[str]:
    reward = turn["reward"]
    earned = "cut off" if reward is None else f"reward {reward:g}"
    yield f"policy: {turn['action'].strip()} ({earned})"
    if turn["observation"]:
        yield f"environment: {turn['observation'].strip()}"


def _changes(rows: Sequence[Mapping[str, Any]]) -> list[VersionPoint]:
    known = [
        row
        for row in rows
        if None not in row.values() and math.isfinite(row["at"]) and 0 < row["at"] < MAX_SECONDS
    ]
    known.sort(key=lambda row: row["at"])
    return [
        VersionPoint(
            second=row["at"] - known[0]["at"],
            side=row["side"],
            actor=row["actor"],
            version=row["version"],
        )
        for row in known
    ]
