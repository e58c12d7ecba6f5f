"""An experiment as it stands on disk: what its trials were, what they measured, what is missing.

Nothing here imports Ray or torch, and nothing is unpickled: an experiment of anybody can be read,
while it runs as well as after it was killed.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_trainable.config import ConfigError, GRPOConfig, flatten, shown
from reports import EXPERIMENT_FILE, experiment_files
from search_spaces import SPACES

EXAMPLES = 4  # held-out prompts that are shown before and after

REPORT_FILES = ("report.html", "report.json", "plots")  # writing them refuses links

MAX_ROUND = 1 << 31
MAX_SECONDS = 1 << 40  # since 1970; above it is no time

# What is read of each kind of part; parts hold more columns than these.
SCHEMAS = {
    "rollouts": pa.schema(
        {"round": pa.int32(), "cursor": pa.int64(), "lag": pa.int32(), "first_use": pa.bool_()}
    ),
    "evaluations": pa.schema(
        {
            "round": pa.int32(),
            "cursor": pa.int64(),
            "response_index": pa.int32(),
            "prompt": pa.string(),
            "response": pa.string(),
            "reward": pa.float32(),
            "finished": pa.bool_(),
            "tokens": pa.int32(),
        }
    ),
    "steps": pa.schema(
        {
            "round": pa.int32(),
            "step": pa.int32(),
            "clip_fraction": pa.float32(),
            "kl_behaviour_nats": pa.float32(),
        }
    ),
    "versions": pa.schema(
        {"at": pa.float64(), "side": pa.string(), "actor": pa.string(), "version": pa.int32()}
    ),
}


class ExperimentError(ValueError):
    """There is no experiment where one was looked for, in one line."""


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    name: str
    directory: Path
    params: Mapping[str, Any]  # params.json as it was written
    config: GRPOConfig
    arm: str  # the config's, and what else tells it apart where trials of one arm differ
    rows: Sequence[Mapping[str, float]]  # one a round, in order, finite numbers only
    done: bool
    error: str | None  # the last line of error.txt; a retried trial may be done all the same
    error_at: float | None  # seconds since 1970
    has_trace: bool
    problems: Sequence[str]  # what could not be read, in one line each

    @property
    def round(self) -> int:
        """Rounds trained so far."""
        return int(self.rows[-1]["training_iteration"]) if self.rows else 0

    @property
    def complete(self) -> bool:
        """Whether it has run all its rounds."""
        return self.round >= self.config.rounds

    @property
    def failed(self) -> bool:
        """Whether its last failure is the last that was heard of it: Tune keeps the error of a
        trial that it has started again."""
        if self.done or self.error is None:
            return False
        reported = self.last("timestamp")
        return reported is None or self.error_at is None or reported <= self.error_at

    @property
    def status(self) -> str:
        reached = f"round {self.round} of {self.config.rounds}"
        if self.done:
            if self.complete:
                return "finished"
            limit = self.config.callbacks.kl_stop
            drifted = limit is not None and (self.last("kl/reference_nats") or 0.0) > limit
            by = f"callbacks.kl_stop={limit:g}" if drifted else "the scheduler"
            return f"stopped by {by} after {reached}"
        if self.failed:
            return f"failed after {reached}: {self.error}"
        before = f"; it had failed: {self.error}" if self.error is not None else ""
        return f"still running or interrupted: {reached}{before}" if self.rows else "no round yet"

    def column(self, name: str) -> list[float]:
        """A metric's values in the order of rounds, those rounds left out that lack it."""
        return [row[name] for row in self.rows if name in row]

    def last(self, name: str) -> float | None:
        """A metric in the last row."""
        return self.rows[-1].get(name) if self.rows else None

    def late_mean(self, name: str) -> float | None:
        """Over the last rounds, an eighth of all that the trial is to have, so that arms of few and
        large rounds are judged by as many samples as the others: 8 rounds of 64, 1 of 8."""
        late = self.round - max(1, self.config.rounds // 8)
        values = [
            row[name] for row in self.rows if row["training_iteration"] > late and name in row
        ]
        return statistics.fmean(values) if values else None

    def evaluated(self) -> Iterator[tuple[int, float, Mapping[str, float]]]:
        """(round, held-out reward, row) where it was measured; round 0 has an empty row.

        A row carries the latest evaluation, so most rows repeat one.
        """
        first = self.last("reward/eval_first")
        if first is not None:
            yield 0, first, {}
        for row in self.rows:
            if row.get("eval/round") == row["training_iteration"] and "reward/eval_mean" in row:
                yield int(row["training_iteration"]), row["reward/eval_mean"], row


@dataclass(frozen=True, kw_only=True)
class ExperimentRecord:
    directory: Path
    description: Mapping[str, Any]  # experiment.json; empty when it is missing
    trials: Sequence[TrialRecord]  # in the order of the space's arms, then of seeds
    problems: Sequence[str]

    @property
    def arms(self) -> dict[str, list[TrialRecord]]:
        """The trials of each arm that have a row."""
        arms: dict[str, list[TrialRecord]] = {}
        for trial in self.trials:
            if trial.rows:
                arms.setdefault(trial.arm, []).append(trial)
        return arms

    @property
    def complete_arms(self) -> dict[str, list[TrialRecord]]:
        """The same arms with the complete trials alone. Their samples are equal only where the
        arms' rounds were made so (`--samples`)."""
        return {arm: [t for t in trials if t.complete] for arm, trials in self.arms.items()}


def read_experiment(directory: Path) -> ExperimentRecord:
    """Everything but the Parquet parts, which `read_parts` reads.

    Raises:
        ExperimentError: the directory does not exist, or holds no experiment.
    """
    if not directory.exists():
        raise ExperimentError(f"{directory}: does not exist")
    if not directory.is_dir():
        raise ExperimentError(f"{directory}: is not a directory")
    try:
        entries = experiment_files.entries(directory)
    except OSError as error:
        raise ExperimentError(f"{directory}: cannot be read ({error.strerror})") from None
    if not entries:
        raise ExperimentError(f"{directory}: is empty")
    problems: list[str] = []
    description = _read_object(directory, (EXPERIMENT_FILE,), problems)
    trials = []
    for name, kind in entries.items():
        if kind == "directory":
            trial = _read_trial(directory / name, problems)
            if trial is not None:
                trials.append(trial)
        elif kind == "link" and name not in (EXPERIMENT_FILE, *REPORT_FILES):
            problems.append(f"{directory.name}/{name} is a link; not followed")
    if EXPERIMENT_FILE not in entries and not trials:
        raise ExperimentError(
            f"{directory}: is no experiment: it has neither {EXPERIMENT_FILE} nor a trial"
        )
    space = SPACES.get(str(description.get("space")))
    order = {arm: place for place, arm in enumerate(space.arms)} if space else {}
    trials.sort(key=lambda t: (order.get(t.config.arm, len(order)), t.config.arm, t.config.seed))
    return ExperimentRecord(
        directory=directory, description=description, trials=told_apart(trials), problems=problems
    )


def told_apart(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Trials of one arm are seeds of one system. Where their settings differ, as in a grid that was
    searched without arms, the arm's label says in what."""
    settings: dict[str, list[dict[str, Any]]] = {}
    for trial in trials:
        settings.setdefault(trial.config.arm, []).append(flatten(trial.config.to_dict()))
    labelled = []
    for trial in trials:
        same_arm = settings[trial.config.arm]
        differing = [
            f"{key}={f'{value:.3g}' if isinstance(value, float) else shown(value)}"
            for key, value in flatten(trial.config.to_dict()).items()
            if key != "seed" and any(other[key] != value for other in same_arm)
        ]
        label = f"{trial.config.arm} ({', '.join(differing)})" if differing else trial.config.arm
        labelled.append(replace(trial, arm=label))
    return labelled


def _read_trial(directory: Path, problems: list[str]) -> TrialRecord | None:
    """None when it is no trial's directory, or when it is not known what was run."""
    own: list[str] = []
    try:
        entries = experiment_files.entries(directory.parent, directory.name)
    except OSError as error:
        problems.append(f"{directory.name} cannot be read ({error.strerror})")
        return None
    if not {"params.json", "result.json"} & entries.keys():
        return None
    params = _read_object(directory.parent, (directory.name, "params.json"), own)
    try:
        if own:
            raise ConfigError(own[0])
        config = GRPOConfig.from_dict(params)
    except ConfigError as error:
        problems.append(f"{directory.name}: left out, its config cannot be used ({error})")
        return None
    rows, done = _read_rows(directory, own)
    content = _content(directory.parent, (directory.name, "error.txt"), own)
    error = None if content is None else content.decode("utf-8", errors="replace")
    if entries.get("trace.json") == "link":
        own.append(f"{directory.name}/trace.json is a link; not followed")
    return TrialRecord(
        name=directory.name,
        directory=directory,
        params=params,
        config=config,
        arm=config.arm,
        rows=rows,
        done=done,
        error=None if error is None else _last_line(error),
        error_at=None if error is None else _last_failure(error),
        has_trace=entries.get("trace.json") == "file",
        problems=own,
    )


def _content(
    root: Path, names: Sequence[str], problems: list[str], *, needed: bool = False
) -> bytes | None:
    """A file's; None when it cannot be had, which is a problem unless it need not be there."""
    try:
        return experiment_files.read(root, *names)
    except FileNotFoundError:
        problems += [f"{_where(root, names)} is missing"] if needed else []
    except OSError as error:
        problems.append(f"{_where(root, names)} cannot be read ({error.strerror})")
    return None


def _where(root: Path, names: Sequence[str]) -> str:
    """As a problem names a file: without the experiment where its trial says enough."""
    return "/".join(names if len(names) > 1 else [root.name, *names])


def _read_object(root: Path, names: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """A JSON object; empty, and a problem named, when there is none."""
    content = _content(root, names, problems, needed=True)
    if content is None:
        return {}
    where = _where(root, names)
    try:
        text = content.decode("utf-8")
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        problems.append(f"{where} cannot be read ({_one_line(error)})")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{where} holds no JSON object")
        return {}
    return value


def _finite(text: str) -> float:
    """Python reads `NaN`, `Infinity` and 1e999, none of which a report could write."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _read_rows(directory: Path, problems: list[str]) -> tuple[list[dict[str, float]], bool]:
    """The rows of result.json, and whether the last one ends the trial.

    A trial that was retried or resumed goes back to its last checkpoint and appends: a row
    replaces the rows before it of its own and of later rounds.
    """
    where = f"{directory.name}/result.json"
    content = _content(directory.parent, (directory.name, "result.json"), problems)
    lines = [] if content is None else content.splitlines()
    rows: list[dict[str, float]] = []
    not_finite: dict[str, str] = {}
    done = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            round_ = values["training_iteration"]
            if type(round_) is not int or not 1 <= round_ < MAX_ROUND:
                raise ValueError
            numbers = {
                name: float(value)
                for name, value in values.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            cut = "half-written" if number == len(lines) else "damaged"
            problems.append(f"{where}: line {number} of {len(lines)} is {cut}, skipped")
            continue
        for name, value in numbers.items():
            if not math.isfinite(value):
                text = f"{where}: {name} is {value}, first in round {round_}"
                not_finite.setdefault(name, text)
        while rows and rows[-1]["training_iteration"] >= round_:
            rows.pop()
        rows.append({name: value for name, value in numbers.items() if math.isfinite(value)})
        done = values.get("done") is True
    problems += not_finite.values()
    return rows, done


def _last_line(error: str) -> str:
    lines = error.strip().splitlines()
    return lines[-1].strip() if lines else "(error.txt is empty)"


def _last_failure(error: str) -> float | None:
    """When Tune says that the last failure occurred."""
    times = re.findall(r"^Failure # \d+ \(occurred at ([\d_-]+)\)", error, re.MULTILINE)
    try:
        return time.mktime(time.strptime(times[-1], "%Y-%m-%d_%H-%M-%S"))
    except (ValueError, IndexError, OverflowError):
        return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# ---- Parquet parts ---------------------------------------------------------------------------


def read_parts(trial: TrialRecord, kind: str) -> tuple[pa.Table, list[str]]:
    """The parts of one kind up to the trial's last row as one table, and what was damaged."""
    schema, tables, damaged = SCHEMAS[kind], [], []
    root = trial.directory.parent
    try:
        names = list(experiment_files.entries(root, trial.name, kind))
    except FileNotFoundError:
        names = []
    except OSError as error:
        names, damaged = [], [f"{trial.name}/{kind} cannot be read ({error.strerror})"]
    for name in names:
        number = re.fullmatch(r"part-(\d+)\.parquet", name)
        if number is None or int(number[1]) > trial.round:
            continue  # of a round that was cut off, or that a resumed trial has yet to repeat
        content = _content(root, (trial.name, kind, name), damaged)
        if content is None:
            continue
        try:
            # Not `read_table`: it takes a directory called `a=b` for a column.
            file = pq.ParquetFile(pa.BufferReader(content))
            table = file.read(columns=schema.names, use_threads=False)
            table = table.select(schema.names).cast(schema)
            table.validate(full=True)  # texts that are no UTF-8 would raise only when looked at
            tables.append(table)
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            reason = _one_line(error)
            reason = reason if len(reason) <= 120 else reason[:119] + "…"
            damaged.append(f"{trial.name}/{kind}/{name} is damaged, skipped ({reason})")
    return pa.concat_tables(tables) if tables else schema.empty_table(), damaged


@dataclass(frozen=True, kw_only=True)
class Example:
    """One held-out prompt, answered before training and by the latest policy."""

    prompt: str
    before: str
    before_reward: float
    after: str
    after_reward: float


@dataclass(frozen=True, kw_only=True)
class Examples:
    round: int  # of the latest evaluation
    pairs: Sequence[Example]


@dataclass(frozen=True, kw_only=True)
class VersionPoint:
    second: float  # since the trial's first
    side: str  # "learner" or "generator"
    actor: str
    version: int


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """What a gradient step of a round saw, medians over the rounds; None where nothing is known."""

    clip_fraction: float | None
    kl_sampler_nats: float | None  # KL(sampler || policy): what the rows call behaviour, negated


@dataclass(frozen=True, kw_only=True)
class TrialFiles:
    """What a trial's Parquet parts say."""

    lags: Counter[int]  # groups by the lag of their first training
    uses: float | None  # how often a group was trained on, the mean over groups
    held_out: Mapping[str, float]  # prompt -> mean reward of its responses, in the last evaluation
    examples: Examples
    changes: Sequence[VersionPoint]
    steps: Mapping[int, StepPoint]  # by the step of the round, from 1
    damaged: Sequence[str]


def read_files(trial: TrialRecord) -> TrialFiles:
    rollouts, damaged = read_parts(trial, "rollouts")
    evaluations, damaged_evaluations = read_parts(trial, "evaluations")
    versions, damaged_versions = read_parts(trial, "versions")
    steps, damaged_steps = read_parts(trial, "steps")
    answered = evaluations.to_pylist()
    return TrialFiles(
        lags=_lags(rollouts),
        uses=_uses(rollouts),
        held_out=_held_out(answered),
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
        return None if value is None else 0.0 - value  # no negative zero

    return {
        step: StepPoint(
            clip_fraction=middle(by_step[step], "clip_fraction"),
            kl_sampler_nats=negated(middle(by_step[step], "kl_behaviour_nats")),
        )
        for step in sorted(by_step)
    }


def _lags(rollouts: pa.Table) -> Counter[int]:
    """A row is a response: a group is counted once."""
    first = rollouts.filter(pc.field("first_use") & pc.field("lag").is_valid())
    groups = first.group_by(["round", "cursor"]).aggregate([("lag", "max")])
    return Counter(groups.column("lag_max").to_pylist())


def _uses(rollouts: pa.Table) -> float | None:
    """A group has rows in every round that trained on it."""
    trained = rollouts.group_by(["round", "cursor"]).aggregate([]).num_rows
    groups = rollouts.group_by("cursor").aggregate([]).num_rows
    return trained / groups if groups else None


def _held_out(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By the prompt's text: an evaluation of more prompts than there are repeats some."""
    last = max((row["round"] for row in rows if row["round"] is not None), default=0)
    rewards: dict[str, list[float]] = {}
    for row in rows:
        prompt, reward = row["prompt"], row["reward"]
        if row["round"] == last and None not in (prompt, reward) and math.isfinite(reward):
            rewards.setdefault(prompt, []).append(reward)
    return {prompt: statistics.fmean(own) for prompt, own in rewards.items()}


def _examples(rows: Sequence[Mapping[str, Any]], number: int) -> Examples:
    """The first prompts of the held-out set, not the best: the first response to each."""
    by_round: dict[int, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        if any(value is None for value in row.values()):
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
                before=before[cursor]["response"],
                before_reward=before[cursor]["reward"],
                after=after[cursor]["response"],
                after_reward=after[cursor]["reward"],
            )
            for cursor in sorted(before.keys() & after.keys())[:number]
        ],
    )


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
