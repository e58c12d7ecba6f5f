"""Rows of JSONL files, Parquet files, and directories that `datasets` saved."""

from __future__ import annotations

import datetime
import json
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from grpo_trainable.config import GRPOConfig
from grpo_trainable.tasks import MathTask
from grpo_trainable.tasks.input_files import input_digests, input_files
from grpo_trainable.tasks.math import unmarked_answers
from grpo_trainable.tasks.prompts import build_task
from grpo_trainable.tasks.row_files import rows_in

SUMS: list[dict[str, Any]] = [
    {"question": f"{i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(60)
]


def write_jsonl(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def table_of(rows: Sequence[Any]) -> pa.Table:
    """Return a table in which missing keys are nulls, as in tables of `datasets`."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def write_parquet(path: Path, rows: Sequence[Any]) -> str:
    parquet.write_table(table_of(rows), path, row_group_size=7)
    return str(path)


def write_dataset(directory: Path, rows: Sequence[Any], shards: int = 2) -> str:
    """Write the files that `datasets.Dataset.save_to_disk` writes."""
    directory.mkdir(parents=True)
    table, names = table_of(rows), []
    size = -(-len(table) // shards)
    for shard in range(shards):
        names.append(f"data-{shard:05d}-of-{shards:05d}.arrow")
        part = table.slice(shard * size, size)
        with ipc.new_stream(str(directory / names[-1]), table.schema) as writer:
            writer.write_table(part, max_chunksize=4)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0123456789abcdef",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return str(directory)


WRITERS = [write_jsonl, write_parquet, write_dataset]


def read(path: str | Path) -> list[Any]:
    return [row() for _, row in rows_in("train_file", path)]


@pytest.fixture(params=WRITERS, ids=lambda writer: writer.__name__.removeprefix("write_"))
def written(request, tmp_path):
    """Return a function that writes rows in one of the formats and returns the path."""
    return lambda rows, name="data": request.param(tmp_path / name, rows)


# ---- The same rows in every format -----------------------------------------------------------


def test_every_format_gives_the_same_rows_in_order(written):
    assert read(written(SUMS)) == SUMS


def test_a_missing_key_is_missing_in_every_format(written):
    messages = [{"role": "user", "content": "Hello"}]
    rows = [
        {"prompt": messages, "keywords": ["a", "b"]},
        {"prompt": [*messages, {"role": "user", "content": "x", "name": "y"}], "answer": "c"},
    ]
    assert read(written(rows)) == rows


def test_values_of_other_types_become_text(tmp_path):
    day = datetime.date(2026, 1, 2)
    rows = [{"prompt": "p", "day": day, "price": Decimal("1.50"), "share": 0.5, "few": [1, None]}]
    for writer in (write_parquet, write_dataset):
        (row,) = read(writer(tmp_path / writer.__name__, rows))
        assert json.loads(json.dumps(row)) == {
            "prompt": "p",
            "day": "2026-01-02",
            "price": "1.50",
            "share": 0.5,
            "few": [1, None],
        }


def test_entries_of_a_map_column_are_lists_of_a_key_and_a_value(tmp_path):
    kind = pa.map_(pa.string(), pa.int64())
    table = pa.table({"prompt": ["p"], "limits": pa.array([[("low", 1), ("high", 9)]], kind)})
    parquet.write_table(table, tmp_path / "data")
    assert read(tmp_path / "data") == [{"prompt": "p", "limits": [["low", 1], ["high", 9]]}]


def test_a_task_is_the_same_from_every_format(written, tmp_path):
    settings = {"name": "math", "equality": "exact"}
    tasks = []
    for path in (written(SUMS), write_jsonl(tmp_path / "plain.jsonl", SUMS)):
        files = {"train_file": path, "eval_file": path}
        tasks.append(build_task(GRPOConfig.from_dict({"task": {**settings, **files}})))
        assert isinstance(tasks[-1], MathTask)
    one, other = tasks
    assert [one.train_example(i) for i in range(99)] == [other.train_example(i) for i in range(99)]
    assert one.eval_examples(60) == other.eval_examples(60)


def test_a_bad_row_is_named_by_its_place(written, caplog):
    path = written([*SUMS[:3], {"question": "?"}, *SUMS[3:]])
    task = {"name": "math", "equality": "exact", "train_file": path, "eval_file": path}
    with caplog.at_level(logging.WARNING):
        build_task(GRPOConfig.from_dict({"task": task}))
    place = "line 4" if Path(path).is_file() and Path(path).read_bytes()[:1] == b"{" else "row 4"
    assert f"{path}: {place}: the field `answer` or `solution` must be" in caplog.text
    with pytest.raises(ValueError, match=f"{re.escape(path)}: {place}: the field `answer`"):
        build_task(GRPOConfig.from_dict({"task": {**task, "strict": True}}))


def test_unmarked_answers_are_found_in_every_format(written):
    path = written([*SUMS, {"question": "?", "answer": "no mark"}])
    note = unmarked_answers("train_file", path)
    assert note is not None
    assert "61 has no #### before its answer" in note


# ---- Files -----------------------------------------------------------------------------------


def test_every_file_of_a_directory_is_an_input(tmp_path):
    path = write_dataset(tmp_path / "data", SUMS)
    config = GRPOConfig.from_dict({"task": {"train_file": path, "eval_file": path}})
    names = ("state.json", "data-00000-of-00002.arrow", "data-00001-of-00002.arrow")
    expected = {
        f"task.{key}/{name}": tmp_path / "data" / name
        for key in ("train_file", "eval_file")
        for name in names
    }
    found = input_files(config)
    assert {key: file for key, file in found.items() if key.startswith("task.")} == expected
    assert input_digests(config).keys() == found.keys()


@pytest.mark.slow
def test_jsonl_needs_no_pyarrow(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", SUMS)
    code = (
        "import sys; from grpo_trainable.tasks.row_files import rows_in\n"
        f"assert len(list(rows_in('train_file', {path!r}))) == 60\n"
        "assert 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


# ---- Mistakes --------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=f"^{re.escape(f'task.train_file={path}')}") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_directory_of_another_kind_is_one_line(tmp_path):
    assert "no state.json here, so `datasets` did not save this directory; valid: a JSONL" in (
        refusal(tmp_path)
    )


def test_a_directory_of_splits_names_them(tmp_path):
    for split in ("train", "test"):
        write_dataset(tmp_path / split, SUMS)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    expected = f"is a DatasetDict; choose a split: {tmp_path}/train or {tmp_path}/test"
    assert refusal(tmp_path).endswith(expected)
    assert len(read(tmp_path / "train")) == 60


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("{", "state.json: cannot be read: not JSON"),
        ("[]", "state.json: cannot be read: must be a JSON object, got list"),
        ("{}", "state.json: cannot be read: lists no _data_files"),
        ('{"_data_files": [{"name": 1}]}', "state.json: cannot be read: lists no _data_files"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "gone.arrow, which state.json lists, is"),
        ('{"_data_files": [{"filename": "../a.arrow"}]}', "../a.arrow, which state.json lists, is"),
    ],
)
def test_a_bad_state_is_one_line(tmp_path, state, said):
    (tmp_path / "a.arrow").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "state.json").write_text(state)
    assert said in refusal(tmp_path / "sub")


def test_a_torn_file_is_one_line(tmp_path):
    file = Path(write_parquet(tmp_path / "torn.parquet", SUMS))
    file.write_bytes(file.read_bytes()[:-9])
    assert "cannot be read: ArrowInvalid: " in refusal(file)
    directory = Path(write_dataset(tmp_path / "data", SUMS))
    arrow = directory / "data-00001-of-00002.arrow"
    arrow.write_bytes(arrow.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"^task.train_file={re.escape(str(arrow))}: cannot be"):
        read(directory)
