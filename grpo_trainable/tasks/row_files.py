"""Read rows from data files: JSONL, Parquet, and directories that `datasets` saved.

The content of a file, not its name, decides the format. pyarrow is imported only for
Parquet and Arrow files.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from grpo_trainable.plugins import one_line

if TYPE_CHECKING:
    import pyarrow as pa

Row: TypeAlias = Mapping[str, Any]

PARQUET = b"PAR1"  # first bytes of a Parquet file
# Files that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write next to the Arrow files.
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def numbered_lines(key: str, path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Return the lines of a file with their numbers, counted from 1.

    Args:
        key: Setting that names the file, without the prefix `task.`.
        path: The file.

    Raises:
        ValueError: If the file cannot be read.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise _unreadable(key, path, error.strerror) from None
    return enumerate(content.removeprefix(codecs.BOM_UTF8).splitlines(), start=1)


def rows_in(key: str, path: str | Path) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the place of each row, such as `line 3`, and a function that returns the row.

    The function raises a ValueError if the row is malformed. Blank lines are left out.

    Args:
        key: Setting that names the file or directory, without the prefix `task.`.
        path: The file or directory.

    Raises:
        ValueError: If the file cannot be read, or if the directory was not saved by `datasets`.
    """
    if Path(path).is_dir() or _is_parquet(path):
        rows = (row for batch in _batches(key, Path(path)) for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield f"row {number}", partial(_as_json, row)
        return
    for number, line in numbered_lines(key, path):
        if line.strip():
            yield f"line {number}", partial(_json_object, line)


def data_files(key: str, path: str | Path) -> dict[str, Path]:
    """Return the files in which the rows are stored, as a mapping from config key to file.

    Raises:
        ValueError: If the path is a directory that `datasets` did not save.
    """
    if not Path(path).is_dir():
        return {f"task.{key}": Path(path)}
    names = [STATE, *_arrow_files(key, Path(path))]
    return {f"task.{key}/{name}": Path(path) / name for name in names}


def _json_object(line: bytes) -> Row:
    """Parse a line of a JSONL file as a JSON object.

    Raises:
        ValueError: If the line is not a JSON object. The message states the mistake.
    """
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, got {type(row).__name__}")
    return row


# ---- Parquet and Arrow ---------------------------------------------------------------------------


def _is_parquet(path: str | Path) -> bool:
    try:
        with Path(path).open("rb") as file:
            return file.read(len(PARQUET)) == PARQUET
    except OSError:
        return False  # `numbered_lines` reports the error


def _batches(key: str, path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file, or of a directory that `datasets` saved, in batches."""
    import pyarrow as pa
    from pyarrow import ipc, parquet

    file = path
    try:
        if not path.is_dir():
            yield from parquet.ParquetFile(path).iter_batches()
            return
        for name in _arrow_files(key, path):
            file = path / name
            with pa.memory_map(str(file)) as source, ipc.open_stream(source) as reader:
                yield from reader
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(key, file, one_line(error)) from None


def _arrow_files(key: str, directory: Path) -> list[str]:
    """Return the names of the Arrow files in a directory that `Dataset.save_to_disk` wrote."""
    if (directory / SPLITS).is_file():
        splits = _read_json(key, directory / SPLITS).get("splits")
        listed = " or ".join(f"{directory}/{name}" for name in splits or ())
        raise ValueError(f"task.{key}={directory}: is a DatasetDict; choose a split: {listed}")
    if not (directory / STATE).is_file():
        raise ValueError(
            f"task.{key}={directory}: no {STATE} here, so `datasets` did not save this directory; "
            "valid: a JSONL file, a Parquet file, or a directory that Dataset.save_to_disk wrote"
        )
    listed = _read_json(key, directory / STATE).get("_data_files")
    try:
        names = [str(file["filename"]) for file in listed]  # pyright: ignore[reportOptionalIterable]
    except (TypeError, KeyError):
        raise _unreadable(key, directory / STATE, "lists no _data_files") from None
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise ValueError(f"task.{key}={directory}: {name}, which {STATE} lists, is missing")
    return names


def _read_json(key: str, path: Path) -> Row:
    try:
        return _json_object(path.read_bytes())
    except OSError as error:
        raise _unreadable(key, path, error.strerror) from None
    except ValueError as error:
        raise _unreadable(key, path, str(error)) from None


def _as_json(value: Any) -> Any:
    """Return a value of a column as a JSON value.

    Null entries of objects are dropped, because a column has a null wherever JSON would have no
    key. An entry of a map column becomes a list of two items, its key and its value. Values of
    other types, such as dates, become text.
    """
    if isinstance(value, dict):
        return {str(name): _as_json(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _unreadable(key: str, path: str | Path, reason: str | None) -> ValueError:
    return ValueError(f"task.{key}={path}: cannot be read: {reason}")
