"""A checkpoint on disk: a directory of safetensors and JSON files, with a manifest written last.

No pickle is written or read. A file appears under its name only when it is complete. A directory is
a valid checkpoint only if it has a manifest and every file has the SHA-256 in the manifest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from grpo_trainable.storage.atomic import replacing
from grpo_trainable.storage.tensor_files import (
    HashedFile,
    Readable,
    TensorFileError,
    file_pieces,
    joined_pieces,
    read_tensors,
)

# Functions that read or write tensors import torch in their bodies. So torch is not loaded by a
# command that only looks for the checkpoint from which a trial continues.
if TYPE_CHECKING:
    from torch import Tensor

    from grpo_trainable.protocol.rollout import RolloutGroup
    from grpo_trainable.storage.object_store import AnyPath, StoredPath

FORMAT_VERSION = 5
CHECKPOINT = re.compile(r"checkpoint_(\d+)")  # Tune's names for the directories of checkpoints
# Names of directories for a trial's earlier files. A trial that has no intact checkpoint moves its
# files to such a directory before it restarts from round 0.
ASIDE = re.compile(r"set-aside-(\d+)")
MANIFEST = "manifest.json"
STATE = "state.json"
# Parts that have one file per learner. Each file contains either some of the part's tensors, or the
# learner's rows of the tensors.
OF_LEARNERS = ("policy", "optimizer")
BUFFER = "buffer"
PART = re.compile(rf"({'|'.join(OF_LEARNERS)}|{BUFFER})-\d{{5}}-of-\d{{5}}\.safetensors")
MOST_LEARNERS = 99_999
# While a file is being written, it is synced each time this number of bytes has been added. On a
# slow disk, a single sync at the end could take longer than `resources.deadline_s`, and the learner
# shows no progress during a sync.
SYNC_BYTES = 64 << 20
MESSAGE_BYTES = 16 << 20  # size of the messages in which a learner on another machine sends files

Tick = Callable[[], object]  # called after each piece of a file has been written or read
Part = TypeVar("Part")
Directory = TypeVar("Directory", bound="Path | StoredPath")


SHOWN = 8  # maximum number of trials that an error names


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be used. The message names the file."""


class DamagedCheckpoint(CheckpointError):
    """Raised if it is certain that a directory holds no intact checkpoint.

    A file is missing, does not belong to a checkpoint, or has the wrong checksum or format.
    """


class ForeignCheckpoint(DamagedCheckpoint):
    """Raised if a directory contains a file that does not belong to a checkpoint.

    The directory may also contain the files of a checkpoint.
    """


class UnreadableCheckpoint(CheckpointError):
    """Raised if a disk or a store does not return a file. The file may nevertheless be intact."""


@dataclass(frozen=True, kw_only=True)
class TrialState:
    """Everything that a trial needs to continue."""

    state: dict[str, Any]  # plain data: counters, prompt indices, versions, config
    policy: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    groups: Sequence[RolloutGroup]  # the scored groups in the replay buffer


def part_file(part: str, number: int = 1, of: int = 1) -> str:
    """Return the name of the file that learner `number` (of `of` learners) writes for a part."""
    return f"{part}-{number:05d}-of-{of:05d}.safetensors"


def _listed_files(learners: int) -> set[str]:
    """Return the names of all files that a manifest lists."""
    numbers = range(1, learners + 1)
    of_learners = {part_file(part, n, learners) for part in OF_LEARNERS for n in numbers}
    return {STATE, part_file(BUFFER), *of_learners}


# ---- Writing -----------------------------------------------------------------------------------


def no_tick() -> None:
    """Do nothing. Only actors have to show progress."""


@dataclass(frozen=True, kw_only=True)
class LearnerFiles:
    """Files that one learner has written for a checkpoint."""

    counters: dict[str, Any]
    digests: dict[str, str]  # file -> SHA-256
    # False if the learner cannot see the directory, for example because the directory is on
    # another machine. In that case, `learner_messages` yields the files.
    written: bool = True
    error: tuple[int | None, str] | None = None  # errno and text if the directory is not writable


def write_learner_files(
    directory: str,
    seen_by: str,
    tensors: Mapping[str, Mapping[str, Tensor]],
    counters: dict[str, Any],
    *,
    number: int = 1,
    of: int = 1,
    tick: Tick = no_tick,
) -> LearnerFiles:
    """Write the files of one learner for a checkpoint.

    Args:
        directory: Directory of the checkpoint.
        seen_by: Name of a file in the directory. If this process does not find the file, the
            process cannot see the directory.
        tensors: Name of a part -> the learner's live tensors, by name.
        counters: Plain data of the learner, returned unchanged.
        number: Number of the learner, counted from 1.
        of: Number of learners.
        tick: Called after each piece has been written.
    """
    if not os.path.exists(os.path.join(directory, seen_by)):
        return LearnerFiles(counters=counters, digests={}, written=False)
    try:
        digests = {
            name: _write(Path(directory, name), file_pieces(held), tick)
            for name, held in _learner_files(tensors, number, of)
        }
    except OSError as error:  # the trial decides how to react to the error
        found = error.errno, error.strerror or str(error)
        return LearnerFiles(counters=counters, digests={}, error=found)
    return LearnerFiles(counters=counters, digests=digests)


def _learner_files(
    tensors: Mapping[str, Mapping[str, Tensor]], number: int, of: int
) -> list[tuple[str, Mapping[str, Tensor]]]:
    return [(part_file(part, number, of), held) for part, held in tensors.items()]


def learner_messages(
    tensors: Mapping[str, Mapping[str, Tensor]], *, number: int = 1, of: int = 1
) -> Iterator[tuple[str, bytes]]:
    """Yield the files that `write_learner_files` would write, as (name, piece of content).

    The tensors must not change before the last message, because each message reads its tensors only
    when the message is requested.
    """
    for name, held in _learner_files(tensors, number, of):
        for message in joined_pieces(file_pieces(held), MESSAGE_BYTES):
            yield name, message


def write_messages(directory: str | Path, messages: Iterable[tuple[str, bytes]]) -> dict[str, str]:
    """Write the files of `learner_messages`, and return file -> SHA-256.

    Raises:
        OSError: The directory cannot be written.
    """
    return {
        name: _write(Path(directory, name), (content for _, content in of_file))
        for name, of_file in groupby(messages, key=lambda message: message[0])
    }


@contextmanager
def begun(directory: str | Path) -> Iterator[str]:
    """Create a directory for a checkpoint, and yield the name of a file in it.

    The name is the argument `seen_by` of `write_learner_files`. The file is removed when the block
    ends, before the checkpoint is finished.

    Raises:
        OSError: The directory cannot be written.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # An old manifest must never make a mixture of old and new files look valid.
    (directory / MANIFEST).unlink(missing_ok=True)
    proof = directory / f".{MANIFEST}.{uuid.uuid4().hex}"
    proof.touch()
    try:
        yield proof.name
    finally:
        proof.unlink(missing_ok=True)


def finish_checkpoint(
    directory: str | Path,
    learners: Sequence[LearnerFiles],
    state: Mapping[str, Any],
    groups: Sequence[RolloutGroup],
) -> None:
    """Write the remaining files of a checkpoint, and then its manifest.

    Args:
        directory: Directory of the checkpoint.
        learners: Results of all learners.
        state: Plain data of the trial.
        groups: Groups in the replay buffer.

    Raises:
        OSError: A learner or this process cannot write to the directory.
    """
    directory = Path(directory)
    for learner in learners:
        if learner.error is not None:
            raise OSError(*learner.error)
    buffer_tensors, buffer_rows = _pack_groups(groups)
    files = {
        part_file(BUFFER): file_pieces(buffer_tensors),
        STATE: [_json({**state, "buffer": buffer_rows})],
    }
    digests = {name: digest for each in learners for name, digest in each.digests.items()}
    digests |= {name: _write(directory / name, pieces) for name, pieces in files.items()}
    manifest = {
        "format_version": FORMAT_VERSION,
        "world_size": len(learners),
        "files": digests,
    }
    _write(directory / MANIFEST, [_json(manifest)])


# ---- Reading -----------------------------------------------------------------------------------


def read_checkpoint(directory: str | AnyPath) -> TrialState:
    """Return the verified content of a checkpoint.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, unreadable or in another format. Or its
            directory contains a file that does not belong to a checkpoint. Or the directory or a
            file is a link.
    """
    directory = Path(directory) if isinstance(directory, str) else directory
    digests = _manifest_digests(directory)
    state, groups = read_state(directory, digests)
    return TrialState(
        policy=read_part(directory, digests, "policy"),
        optimizer=read_part(directory, digests, "optimizer"),
        groups=groups,
        state=state,
    )


def read_state(
    directory: AnyPath, digests: Mapping[str, str]
) -> tuple[dict[str, Any], list[RolloutGroup]]:
    """Return a checkpoint's plain data and its groups.

    Args:
        directory: Directory of the checkpoint.
        digests: File -> SHA-256.

    Raises:
        CheckpointError: As for `read_checkpoint`.
    """
    state = _state(directory, digests)
    name = part_file(BUFFER)
    tensors = _verified(directory / name, digests[name], read_tensors)
    with _named_errors(directory):
        return state, _unpack_groups(tensors, state.pop("buffer"))


def read_part(
    directory: AnyPath, digests: Mapping[str, str], part: str, tick: Tick = no_tick
) -> dict[str, Tensor]:
    """Return the complete tensors of a part, joining the rows that several learners wrote.

    Args:
        directory: Directory of the checkpoint.
        digests: File -> SHA-256.
        part: Name of the part.
        tick: Called after each piece has been read.

    Raises:
        CheckpointError: As for `read_checkpoint`.
    """
    rows: dict[str, list[Tensor]] = {}
    for file in sorted(name for name in digests if name.startswith(f"{part}-")):
        for name, tensor in _verified(directory / file, digests[file], read_tensors, tick).items():
            rows.setdefault(name, []).append(tensor)
    with _named_errors(directory):
        # Rows are dropped as soon as they are joined, so memory never holds all tensors twice.
        return {name: _joined(rows.pop(name)) for name in list(rows)}


def _joined(rows: list[Tensor]) -> Tensor:
    import torch

    return rows[0] if len(rows) == 1 else torch.cat(rows)


def verified_digests(directory: str | AnyPath) -> dict[str, str]:
    """Read every file of a checkpoint, verify it, and return file -> SHA-256.

    Raises:
        CheckpointError: As for `read_checkpoint`.
    """
    directory = Path(directory) if isinstance(directory, str) else directory
    digests = _manifest_digests(directory)
    for name, digest in digests.items():
        _verified(directory / name, digest, HashedFile.sha256)
    return digests


def checkpoint_round(directory: str | AnyPath) -> int:
    """Verify a checkpoint, and return the number of rounds finished when it was taken.

    Raises:
        CheckpointError: As for `read_checkpoint`.
    """
    directory = Path(directory) if isinstance(directory, str) else directory
    return _round(_state(directory, verified_digests(directory)), directory)


def newest_whole(directory: Directory, last: float = math.inf) -> tuple[Directory, int] | None:
    """Return a trial's newest intact checkpoint and its round, or None if there is none.

    Args:
        directory: The trial's directory.
        last: Ignore checkpoints of rounds after this one.

    Raises:
        UnreadableCheckpoint: The directory cannot be read, or a checkpoint that may be newer than
            the newest intact one cannot be read.
    """
    for path in reversed(numbered_checkpoints(directory)):
        try:
            round_ = checkpoint_round(path)
        except DamagedCheckpoint:
            continue
        if round_ <= last:
            return path, round_
    return None


def newest_round(directory: AnyPath) -> int | None:
    """Return the round that the newest checkpoint states, or None.

    The checkpoint is not verified.
    """
    newest = newest_checkpoint(directory)
    return None if newest is None else unverified_round(newest)


def newest_checkpoint(directory: AnyPath) -> AnyPath | None:
    """Return the newest checkpoint that states its round, or None.

    The checkpoint is not verified.
    """
    found = reversed(numbered_checkpoints(directory))
    return next((path for path in found if unverified_round(path) is not None), None)


def remove_older(
    directory: AnyPath,
    keep: int,
    shared_rounds: Collection[int],
    confirmed: float = math.inf,
    verified: dict[str, int] | None = None,
) -> None:
    """Remove all but the newest `keep` checkpoints of a trial.

    Args:
        directory: The trial's directory.
        keep: Number of checkpoints to keep.
        shared_rounds: Rounds whose checkpoints are kept in addition.
        confirmed: Only intact checkpoints of this round or an earlier one count towards `keep`. All
            checkpoints that are newer than the oldest counted one are kept, too.
        verified: The rounds of the checkpoints that earlier calls found intact, keyed by the
            checkpoints' names. This call adds the checkpoints that it finds intact.

    Raises:
        CheckpointError: The newest checkpoint is not intact, or a checkpoint cannot be read.
            Nothing was removed.
        OSError: A checkpoint cannot be removed.
    """
    verified = {} if verified is None else verified
    paths = numbered_checkpoints(directory)
    if len(paths) <= keep:
        return
    older = list(paths)
    while older and keep > 0:
        round_ = _round_if_whole(older.pop(), verified)
        keep -= round_ is not None and round_ <= confirmed
    older = [path for path in older if unverified_round(path) not in shared_rounds]
    if older and paths[-1].name not in verified:
        raise DamagedCheckpoint(f"{paths[-1]}: is damaged or incomplete")
    for path in older:
        if isinstance(path, Path):
            _remove_at_once(path)
        else:
            path.remove_tree()


def _round_if_whole(path: AnyPath, verified: dict[str, int]) -> int | None:
    if path.name not in verified:
        with suppress(DamagedCheckpoint):
            verified[path.name] = checkpoint_round(path)
    return verified.get(path.name)


def _remove_at_once(path: Path) -> None:
    """Rename a checkpoint, then remove it. A half-removed checkpoint would look damaged."""
    removed = path.with_name(".removed")
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def numbered_checkpoints(directory: Directory) -> list[Directory]:
    """Return the checkpoints that Tune has copied or begun to copy, sorted by name."""
    names = filter(CHECKPOINT.fullmatch, _names(directory))
    return [cast(Directory, directory / name) for name in names]


def checkpoints_named(directory: Directory) -> list[Directory]:
    """Return the checkpoint at a path, or all checkpoints of the trial at the path, in order.

    Raises:
        CheckpointError: There is no checkpoint, or the directory cannot be read. The message is one
            line.
    """
    try:
        if (directory / MANIFEST).exists() or CHECKPOINT.fullmatch(directory.name):
            return [directory]
        found = numbered_checkpoints(directory)
        if not found:
            raise _no_checkpoint_in(directory)
    except OSError as error:
        raise _unread(directory, error) from error
    return found


def _no_checkpoint_in(directory: AnyPath) -> CheckpointError:
    """Return the error for a directory without checkpoints.

    If the directory is an experiment, the error lists trials of the experiment.
    """
    if not directory.is_dir():
        return CheckpointError(f"{directory}: is not a directory")
    trials = [name for name in _names(directory) if numbered_checkpoints(directory / name)]
    if not trials:
        return CheckpointError(
            f"{directory}: contains no checkpoint; name a checkpoint, or the directory of a trial "
            "that has one"
        )
    more = f" or one of {len(trials) - SHOWN} more" if len(trials) > SHOWN else ""
    named = ", ".join(str(directory / name) for name in trials[:SHOWN])
    return CheckpointError(f"{directory}: is an experiment; name one of its trials: {named}{more}")


def _names(directory: AnyPath) -> list[str]:
    """Return the sorted names in a directory. A missing directory has none."""
    try:
        if isinstance(directory, Path):
            return sorted(os.listdir(directory))
        return directory.names()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unread(directory, error) from error


def unverified_round(directory: AnyPath) -> int | None:
    """Return the round that a checkpoint states, or None. The checkpoint is not verified.

    Raises:
        UnreadableCheckpoint: The checkpoint cannot be read.
    """
    state = unverified_state(directory)
    try:
        return None if state is None else _round(state, directory)
    except DamagedCheckpoint:
        return None


def unverified_state(directory: AnyPath) -> dict[str, Any] | None:
    """Return the plain data of a checkpoint, or None. The checkpoint is not verified.

    Raises:
        UnreadableCheckpoint: The checkpoint cannot be read.
    """
    try:
        return _parse(directory / STATE, _read(directory / STATE))
    except DamagedCheckpoint:
        return None


def _round(state: Mapping[str, Any], directory: AnyPath) -> int:
    with _named_errors(directory):
        return int(state["pipeline"]["learner_round"])


@contextmanager
def _named_errors(directory: AnyPath) -> Iterator[None]:
    """Turn an error about the content of a checkpoint into a `DamagedCheckpoint`."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(
            f"{directory}: is not a grpo_trainable checkpoint ({type(error).__name__}: {error})"
        ) from error


def _manifest_digests(directory: AnyPath) -> dict[str, str]:
    """Return file -> SHA-256 from the manifest, without reading any other file."""
    if isinstance(directory, Path) and directory.is_symlink():
        raise ForeignCheckpoint(f"{directory}: is a link, not a checkpoint")
    refuse_foreign_files(directory)
    manifest = _parse(directory / MANIFEST, _read(directory / MANIFEST))
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{directory / MANIFEST}: format version {version}, but this program reads version "
            f"{FORMAT_VERSION}"
        )
    learners = manifest.get("world_size")
    if type(learners) is not int or not 1 <= learners <= MOST_LEARNERS:
        raise DamagedCheckpoint(
            f"{directory / MANIFEST}: states an invalid number of learners, {learners}"
        )
    expected = _listed_files(learners)
    listed = manifest.get("files")
    if not isinstance(listed, dict) or set(listed) != expected:
        raise DamagedCheckpoint(f"{directory / MANIFEST}: does not list {sorted(expected)}")
    return listed


def _state(directory: AnyPath, digests: Mapping[str, str]) -> dict[str, Any]:
    content = _verified(directory / STATE, digests[STATE], HashedFile.content)
    return _parse(directory / STATE, content)


def _verified(
    path: AnyPath, digest: str, use: Callable[[HashedFile], Part], tick: Tick = no_tick
) -> Part:
    """Return the result of `use` for a file, after checking that its SHA-256 is `digest`.

    The file is read only once, so `use` gets the same bytes that are hashed. If the file changes
    after the check, the result is not affected.
    """
    with _reading(path) as opened:
        file = HashedFile(opened, tick)
        try:
            used = use(file)
        except TensorFileError as error:
            raise DamagedCheckpoint(f"{path}: damaged ({error})") from error
        if file.sha256() != digest:
            raise DamagedCheckpoint(f"{path}: damaged (its SHA-256 differs from the manifest)")
    return used


def refuse_foreign_files(directory: str | AnyPath) -> None:
    """Reject a directory that contains a file that does not belong to a checkpoint.

    Ray would unpickle a file with a certain name in the directory of a checkpoint.

    Raises:
        ForeignCheckpoint: The directory contains such a file.
    """
    directory = Path(directory) if isinstance(directory, str) else directory
    names = _names(directory)
    if inside := [name for name in names if name.startswith("checkpoint_")]:
        raise ForeignCheckpoint(
            f"{directory}: is not a checkpoint, but contains checkpoints, such as {max(inside)}; "
            "nothing was loaded"
        )
    for name in names:
        # A process that was killed while writing leaves a file `.NAME.RANDOM`.
        whole = name[1:].rpartition(".")[0] if name.startswith(".") else name
        if whole not in (MANIFEST, STATE) and not PART.fullmatch(whole):
            foreign = f"{directory / name}: does not belong to a checkpoint; nothing was loaded"
            raise ForeignCheckpoint(foreign)


def _pack_groups(
    groups: Sequence[RolloutGroup],
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the groups' tensors, keyed by `number/field`, and the other fields of each group."""
    from torch import Tensor

    tensors: dict[str, Tensor] = {}
    rows: list[dict[str, Any]] = []
    for i, group in enumerate(groups):
        rows.append({})
        for item in fields(group):
            value = getattr(group, item.name)
            if isinstance(value, Tensor):
                tensors[f"{i}/{item.name}"] = value.contiguous()
            elif value is not None:  # a field without an entry is read as None
                rows[-1][item.name] = value
    return tensors, rows


def _unpack_groups(
    tensors: Mapping[str, Tensor], rows: Sequence[Mapping[str, Any]]
) -> list[RolloutGroup]:
    from grpo_trainable.protocol.rollout import RolloutGroup

    groups = []
    for i, row in enumerate(rows):
        values: dict[str, Any] = dict(row)
        for item in fields(RolloutGroup):
            if (tensor := tensors.get(f"{i}/{item.name}")) is not None:
                values[item.name] = tensor
        groups.append(RolloutGroup(**values))
    return groups


def _json(data: Any) -> bytes:
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def _parse(path: AnyPath, content: bytes) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: not JSON ({error})") from error
    if not isinstance(data, dict):
        raise DamagedCheckpoint(f"{path}: not a JSON object")
    return data


def _read(path: AnyPath) -> bytes:
    with _reading(path) as file:
        return HashedFile(file, no_tick).content()


@contextmanager
def _reading(path: AnyPath) -> Iterator[Readable]:
    """Open a file, and turn an OSError from the block into a `CheckpointError`."""
    try:
        if not isinstance(path, Path):
            with path.opened() as file:
                yield file
            return
        # A link could lead out of the checkpoint's directory.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            yield file
    except OSError as error:
        raise _unread(path, error) from error


def _unread(path: AnyPath, error: OSError) -> CheckpointError:
    """Return the error for a file that could not be opened or read.

    A missing file, or a directory in its place, counts as damage, and a link counts as foreign.
    After any other error, the file may be intact, so it counts as unreadable.
    """
    from grpo_trainable.storage.object_store import reason  # loads pyarrow, which is slow

    if isinstance(error, FileNotFoundError):
        return DamagedCheckpoint(f"{path}: is missing")
    if isinstance(error, NotADirectoryError | IsADirectoryError):
        return DamagedCheckpoint(f"{path}: damaged ({reason(error)})")
    kind = ForeignCheckpoint if error.errno == errno.ELOOP else UnreadableCheckpoint
    return kind(f"{path}: cannot be read ({reason(error)})")


def _write(path: Path, pieces: Iterable[bytes | memoryview], tick: Tick = no_tick) -> str:
    """Write a file, and return its SHA-256."""
    digest, unsynced = hashlib.sha256(), 0
    with replacing(path, durable=True) as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            unsynced += len(piece)
            if unsynced >= SYNC_BYTES:
                file.flush()
                os.fsync(file.fileno())
                unsynced = 0
            tick()
    return digest.hexdigest()
