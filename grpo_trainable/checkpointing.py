"""A checkpoint on disk: a directory of safetensors and JSON whose manifest is written last.

No pickle is written or read. Each file appears under its name only when it is whole, and a
directory counts only when its manifest is there and every file has the SHA-256 it names.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from grpo_trainable.atomic import replacing
from grpo_trainable.rollout import RolloutGroup

if TYPE_CHECKING:
    from grpo_trainable.storage import Place, StoredPath

FORMAT_VERSION = 4
READABLE = (2, 3, FORMAT_VERSION)  # they differ in the ledger (pipeline/ledger_formats.py)
WORLD_SIZE = 1  # learners that write
CHECKPOINT = re.compile(r"checkpoint_(\d+)")  # how Tune names their directories
MANIFEST = "manifest.json"
STATE = "state.json"
PARTS = ("policy", "optimizer", "buffer")
STORED_AS = {"prompt_index": "cursor"}  # fields of a group under another key in a checkpoint


Directory = TypeVar("Directory", bound="Path | StoredPath")


class CheckpointError(RuntimeError):
    """Raised where a directory holds no checkpoint that can be trusted; it names the file."""


@dataclass(frozen=True, kw_only=True)
class TrialState:
    """Everything that a trial needs to go on."""

    state: dict[str, Any]  # plain data: counters, prompt indices, versions, config
    policy: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    groups: Sequence[RolloutGroup]  # scored and not yet trained on


def part_file(part: str) -> str:
    """The file of a part. One learner writes everything; the name has room for shards."""
    return f"{part}-00001-of-00001.safetensors"


def _listed_files() -> set[str]:
    """Every file that a manifest vouches for."""
    return {STATE, *(part_file(part) for part in PARTS)}


def write_checkpoint(directory: str | Path, trial: TrialState) -> None:
    """Writes the files and then the manifest. OSError when the directory cannot be written."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    buffer_tensors, buffer_rows = _pack_groups(trial.groups)
    files = {
        part_file("policy"): save(_contiguous(trial.policy)),
        part_file("optimizer"): save(_contiguous(trial.optimizer)),
        part_file("buffer"): save(buffer_tensors),
        STATE: _json({**trial.state, "buffer": buffer_rows}),
    }
    # An old manifest must never vouch for a mixture of old and new files.
    (directory / MANIFEST).unlink(missing_ok=True)
    for name, content in files.items():
        _write(directory / name, content)
    manifest = {
        "format_version": FORMAT_VERSION,
        "world_size": WORLD_SIZE,
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    _write(directory / MANIFEST, _json(manifest))


def read_checkpoint(directory: str | Path) -> TrialState:
    """The verified content of a checkpoint.

    Raises:
        CheckpointError: missing, damaged, foreign or of a newer format.
    """
    directory = Path(directory)
    contents = _verified(directory)
    state = _parse(directory / STATE, contents[STATE])
    with _named_errors(directory):
        tensors = {part: load(contents[part_file(part)]) for part in PARTS}
        return TrialState(
            policy=tensors["policy"],
            optimizer=tensors["optimizer"],
            groups=_unpack_groups(tensors["buffer"], state.pop("buffer")),
            state=state,
        )


def checkpoint_round(directory: str | Place) -> int:
    """Rounds trained when the checkpoint was taken, once all of it is verified.

    Raises:
        CheckpointError: as `read_checkpoint`.
    """
    directory = Path(directory) if isinstance(directory, str) else directory
    return _round(_parse(directory / STATE, _verified(directory)[STATE]), directory)


def newest_whole(directory: Directory, last: float = math.inf) -> tuple[Directory, int] | None:
    """The last whole checkpoint that was written to a trial's directory, of round `last` or an
    earlier one, and its rounds. OSError when a store cannot list the directory."""
    for path in reversed(numbered_checkpoints(directory)):
        try:
            round_ = checkpoint_round(path)
        except CheckpointError:
            continue
        if round_ <= last:
            return path, round_
    return None


def remove_older(directory: Place, keep: int, shared_rounds: Collection[int]) -> None:
    """Leaves the newest `keep` checkpoints of a trial's directory and those of `shared_rounds`.

    Raises:
        CheckpointError: the newest is not whole; nothing was removed.
        OSError: one cannot be removed.
    """
    paths = numbered_checkpoints(directory)
    older = [path for path in paths[:-keep] if _unverified_round(path) not in shared_rounds]
    if older:
        checkpoint_round(paths[-1])
    for path in older:
        if isinstance(path, Path):
            _remove_at_once(path)
        else:
            path.remove_tree()


def _remove_at_once(path: Path) -> None:
    """A rename hides it at once: half a checkpoint would look like a damaged one."""
    removed = path.with_name(".removed")
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def numbered_checkpoints(directory: Directory) -> list[Directory]:
    """The checkpoints that Tune has copied, or begun to copy, in order."""
    names = filter(CHECKPOINT.fullmatch, _names(directory))
    return [cast(Directory, directory / name) for name in names]


def _names(directory: Place) -> list[str]:
    """What a directory holds, sorted; nothing where there is none."""
    if isinstance(directory, Path):
        return sorted(path.name for path in directory.glob("*"))
    return directory.names()


def _unverified_round(directory: Place) -> int | None:
    """None when the checkpoint does not say."""
    try:
        return _round(_parse(directory / STATE, _read(directory / STATE)), directory)
    except CheckpointError:
        return None


def _round(state: Mapping[str, Any], directory: Place) -> int:
    with _named_errors(directory):
        return int(state["pipeline"]["learner_round"])


@contextmanager
def _named_errors(directory: Place) -> Iterator[None]:
    """Refuses a path that leaves the directory: a manifest does not tell who wrote it."""
    try:
        yield
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{directory}: not a grpo_trainable checkpoint ({type(error).__name__}: {error})"
        ) from error


def _verified(directory: Place) -> dict[str, bytes]:
    """Every file's content, as the manifest vouches for it."""
    if isinstance(directory, Path) and directory.is_symlink():
        raise CheckpointError(f"{directory}: is a link, not a checkpoint")
    refuse_foreign_files(directory)
    manifest = _parse(directory / MANIFEST, _read(directory / MANIFEST))
    version = manifest.get("format_version")
    if version not in READABLE:
        raise CheckpointError(
            f"{directory / MANIFEST}: format version {version}, this program reads "
            f"{', '.join(map(str, READABLE[:-1]))} and {READABLE[-1]}"
        )
    if manifest.get("world_size") != WORLD_SIZE:
        raise CheckpointError(
            f"{directory / MANIFEST}: written by {manifest.get('world_size')} learners, this "
            f"program reads what {WORLD_SIZE} wrote"
        )
    expected = _listed_files()
    listed = manifest.get("files")
    if not isinstance(listed, dict) or set(listed) != expected:
        raise CheckpointError(f"{directory / MANIFEST}: does not list {sorted(expected)}")
    contents = {}
    for name, digest in listed.items():
        contents[name] = _read(directory / name)
        if hashlib.sha256(contents[name]).hexdigest() != digest:
            raise CheckpointError(
                f"{directory / name}: damaged (its SHA-256 is not the manifest's)"
            )
    return contents


def refuse_foreign_files(directory: str | Place) -> None:
    """CheckpointError when `directory` holds a file that is not of a checkpoint.

    Ray unpickles a file of its own that it finds in a checkpoint's directory.
    """
    ours = {MANIFEST, *_listed_files()}
    # What a killed `write_checkpoint` leaves.
    unfinished = tuple(f".{name}." for name in ours)
    directory = Path(directory) if isinstance(directory, str) else directory
    for name in _names(directory):
        if name not in ours and not name.startswith(unfinished):
            raise CheckpointError(f"{directory / name}: is not of a checkpoint; nothing was loaded")


def _pack_groups(
    groups: Sequence[RolloutGroup],
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The groups' tensors by `number/field`, and a row of each group's other fields."""
    tensors: dict[str, Tensor] = {}
    rows: list[dict[str, Any]] = []
    for i, group in enumerate(groups):
        rows.append({})
        for item in fields(group):
            value = getattr(group, item.name)
            if isinstance(value, Tensor):
                tensors[f"{i}/{item.name}"] = value.contiguous()
            elif value is not None:  # what nobody asked for reads as None without an entry
                rows[-1][STORED_AS.get(item.name, item.name)] = value
    return tensors, rows


def _unpack_groups(
    tensors: Mapping[str, Tensor], rows: Sequence[Mapping[str, Any]]
) -> list[RolloutGroup]:
    groups = []
    names = {key: name for name, key in STORED_AS.items()}
    for i, row in enumerate(rows):
        values: dict[str, Any] = {names.get(key, key): value for key, value in row.items()}
        for item in fields(RolloutGroup):
            if (tensor := tensors.get(f"{i}/{item.name}")) is not None:
                values[item.name] = tensor
        groups.append(RolloutGroup(**values))
    return groups


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.detach().to(torch.device("cpu")).contiguous()
        for name, tensor in tensors.items()
    }


def _json(data: Any) -> bytes:
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def _parse(path: Place, content: bytes) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return data


def _read(path: Place) -> bytes:
    try:
        if not isinstance(path, Path):
            return path.read_bytes()
        # A link could lead out of the checkpoint's directory.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            return file.read()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error


def _write(path: Path, content: bytes) -> None:
    with replacing(path, durable=True) as file:
        file.write(content)
