"""Write the files of an evaluation to its directory, and read them again.

`evaluation.json` is written last. A directory without this file does not count as an evaluation.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_trainable.storage.atomic import replacing
from grpo_trainable.tools.evaluation.generation import Generation
from reports import experiment_files
from reports.evaluations.categories import categories_page
from reports.evaluations.changes import SECTIONS, changes
from reports.evaluations.measures import measures
from reports.evaluations.page import render_page
from reports.evaluations.pairs import Difference
from reports.evaluations.record import EvaluationRecord
from reports.experiment_files import one_line
from reports.intervals import LEVEL

HERE = Path(__file__).resolve().parent
FORMAT = 1
DATA = "evaluation.json"
PARQUET = "generations.parquet"
PAGE = "evaluation.html"
ORIGIN = (
    *("created", "command", "seconds", "files", "grpo_trainable", "commit", "packages", "machine"),
)

GENERATIONS = pa.schema(
    {
        "prompt_index": pa.int64(),
        "response_index": pa.int32(),
        "prompt": pa.string(),
        "response": pa.string(),
        "ground_truth": pa.string(),  # JSON
        "answer": pa.string(),
        "reward": pa.float64(),
        "format_reward": pa.float64(),
        "answer_reward": pa.float64(),
        "finished": pa.bool_(),
        "tokens": pa.int32(),
        "log_prob": pa.float64(),
        "error": pa.string(),
        "category": pa.string(),
    }
)


class EvaluationError(ValueError):
    """A directory has no evaluation in it, or cannot store one; the message is one line."""


def prepare_directory(out: Path) -> None:
    """Make the directory of an evaluation.

    Raises:
        EvaluationError: The directory cannot be made, or it is not empty.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise EvaluationError(f"{out}: is not empty; choose another directory")
    except OSError as error:
        raise EvaluationError(f"{out}: cannot be used ({error.strerror})") from None


def write_evaluation(
    out: Path,
    record: EvaluationRecord,
    against: EvaluationRecord | None = None,
    paired: Sequence[Difference] = (),
) -> None:
    """Write all files of an evaluation.

    Args:
        out: The directory.
        record: The evaluation.
        against: The evaluation to compare with.
        paired: The `differences` between the two evaluations.

    Raises:
        OSError: The directory cannot be written to.
    """
    rows = [asdict(own) | {"category": own.category} for own in record.generations]
    data = evaluation_data(record, against, paired)
    _write_parquet(out / PARQUET, rows)
    _write_text(out / "generations.jsonl", "".join(_json_line(row) for row in rows))
    if record.categories is not None:
        _write_text(out / "categories.md", categories_page(record))
    _write_text(out / PAGE, render_page(record, against, paired))
    _write_text(out / DATA, json.dumps(data, indent=1, allow_nan=False) + "\n")


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    stored = [{**row, "ground_truth": json.dumps(row["ground_truth"])} for row in rows]
    with replacing(path) as file:
        pq.write_table(pa.Table.from_pylist(stored, GENERATIONS), file, compression="zstd")


def _json_line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors="replace"))


# ---- Reading ---------------------------------------------------------------------------------


def read_evaluation(directory: Path) -> EvaluationRecord:
    """Read an evaluation without following links, because anyone may have written its directory.

    Raises:
        EvaluationError: There is no evaluation, or it is damaged or has a different format.
    """
    data = _read_data(directory)
    try:
        config = dict(data["config"])
        sections = {section: dict(config.get(section, {})) for section in SECTIONS}
        origin = {key: data[key] for key in ORIGIN if key in data}
        if "files" in origin:
            origin["files"] = dict(origin["files"])
        return EvaluationRecord(
            name=directory.name,
            policy=dict(data["policy"]),
            config={**config, **sections},
            generations=_read_generations(directory),
            origin=origin,
        )
    except EvaluationError:
        raise
    except (LookupError, TypeError, ValueError, pa.ArrowException) as error:
        raise _damaged(directory, one_line(error)) from None


def _read_data(directory: Path) -> dict[str, Any]:
    content = _content(directory, DATA)
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _damaged(directory, f"{DATA}: {one_line(error)}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise _damaged(
            directory, f"{DATA} has format {found}, but this program reads format {FORMAT}"
        )
    return data


def _read_generations(directory: Path) -> list[Generation]:
    table = pq.ParquetFile(pa.BufferReader(_content(directory, PARQUET))).read()
    table = table.select(GENERATIONS.names).cast(GENERATIONS)
    table.validate(full=True)
    rows = table.drop_columns(["category"]).to_pylist()
    if not rows:
        raise ValueError(f"{PARQUET} has no row")
    return [Generation(**{**row, "ground_truth": json.loads(row["ground_truth"])}) for row in rows]


def _content(directory: Path, name: str) -> bytes:
    try:
        return experiment_files.read(directory, name)
    except OSError as error:
        raise EvaluationError(
            f"{directory}: contains no evaluation: {name} cannot be read ({error.strerror})"
        ) from None


def _damaged(directory: Path, reason: str) -> EvaluationError:
    return EvaluationError(f"{directory}: contains no readable evaluation: {reason}")


# ---- The content of evaluation.json; docs/evaluation.md lists its keys ---------------------------


def evaluation_data(
    record: EvaluationRecord, against: EvaluationRecord | None, paired: Sequence[Difference]
) -> dict[str, Any]:
    """Return the figures as JSON data, leaving out figures that the evaluation does not have.

    Args:
        record: The evaluation.
        against: The evaluation to compare with.
        paired: The `differences` between the two evaluations.
    """
    return {
        "format": FORMAT,
        "policy": dict(record.policy),
        "prompts": len(record.by_prompt),
        "samples": record.samples,
        "responses": len(record.generations),
        "unscored": {
            "prompts": len(record.by_prompt) - len(record.scored),
            "responses": len(record.errors),
        },
        "level": LEVEL,
        "figures": {name: asdict(measure.figure()) for name, measure in measures(record).items()},
        **_categories(record),
        **({} if against is None else {"against": _against(record, against, paired)}),
        "problems": record.problems,
        "config": dict(record.config),
        **record.origin,
    }


def _categories(record: EvaluationRecord) -> dict[str, Any]:
    found = record.categories
    return {} if found is None else {"categories": {name: len(own) for name, own in found.items()}}


def _against(
    record: EvaluationRecord, against: EvaluationRecord, paired: Sequence[Difference]
) -> dict[str, Any]:
    return {
        "name": against.name,
        "policy": dict(against.policy),
        "changes": changes(record, against),
        "differences": {
            difference.name: {
                "own": difference.own,
                "other": difference.other,
                "value": difference.value,
                "low": difference.low,
                "high": difference.high,
                "prompts": difference.prompts,
                "told_apart": difference.told_apart,
            }
            for difference in paired
        },
    }


# ---- The commit that ran -------------------------------------------------------------------------


def running_commit() -> str | None:
    """Return the commit that is checked out, with "+" appended if files differ from the commit.

    Return None if this is not a checkout of the repository, for example in an installed package.
    """
    try:
        # The package may be installed inside another repository, which does not track this file.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = _git("status", "--porcelain", "--untracked-files=no")
        return _git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    command = ["git", "-C", str(HERE), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
