"""Directories of an object store, beside those of this machine: `s3://bucket/path`.

A file in a store is written whole or not at all, cannot be appended to, and may take long or fail.
So every request has a deadline, after which it is an OSError like that of a full disk. Who may use
the store is for the environment to say (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or
the role of the machine): credentials are taken from nowhere else and written down nowhere.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import pyarrow as pa
import pyarrow.fs as pafs

# Seconds: for a connection, and without a byte of an answer. A request is tried three times.
CONNECT_S, SILENCE_S = 3.0, 5.0
REQUEST_BYTES = 16 << 20  # of a file that is read in pieces

URI = re.compile(r"s3://(?P<bucket>[^/@?#]+)(?P<path>/[^?#]*)?")


@dataclass(frozen=True)
class StoredPath:
    """A file or a directory in a store, with what is needed of `pathlib.Path`."""

    filesystem: pafs.FileSystem
    path: str  # the file system's own path: bucket/a/b
    scheme: str = "s3"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    def __truediv__(self, name: str) -> StoredPath:
        return StoredPath(self.filesystem, f"{self.path}/{name}", self.scheme)

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    def exists(self) -> bool:
        return self._type() != pafs.FileType.NotFound

    def is_dir(self) -> bool:
        return self._type() == pafs.FileType.Directory

    def _type(self) -> pafs.FileType:
        return self.filesystem.get_file_info(self.path).type

    def names(self) -> list[str]:
        """What the directory holds, sorted; nothing where there is none."""
        selector = pafs.FileSelector(self.path, allow_not_found=True)
        return sorted(info.base_name for info in self.filesystem.get_file_info(selector))

    def read_bytes(self) -> bytes:
        with self.filesystem.open_input_stream(self.path) as file:
            return file.read()

    def opened(self) -> pa.NativeFile:
        """Open the file to read it in pieces; a request to the store brings `REQUEST_BYTES`."""
        return self.filesystem.open_input_stream(self.path, buffer_size=REQUEST_BYTES)

    def read_end(self, most_bytes: int) -> bytes:
        """Return the last bytes of a file, or all of one that has fewer."""
        with self.filesystem.open_input_file(self.path) as file:
            file.seek(max(0, file.size() - most_bytes))
            return file.read()

    def write_bytes(self, content: bytes) -> None:
        """Replaces the file whole. Where the file system has directories, they are made."""
        try:
            self._write(content)
        except FileNotFoundError:
            self.filesystem.create_dir(self.path.rpartition("/")[0], recursive=True)
            self._write(content)

    def _write(self, content: bytes) -> None:
        with self.filesystem.open_output_stream(self.path) as file:
            file.write(content)

    def unlink(self) -> None:
        self.filesystem.delete_file(self.path)

    def move(self, target: StoredPath) -> None:
        """Move a file or a directory: all of it is copied before anything is removed."""
        files = self.filesystem
        pafs.copy_files(self.path, target.path, files, files)
        self.remove_tree() if self.is_dir() else self.unlink()

    def remove_tree(self) -> None:
        self.filesystem.delete_dir(self.path)

    def files(self) -> dict[str, int]:
        """Bytes of every file below the directory, by its path from here.

        Raises:
            OSError: a key has parts that would lead out of a directory it is copied to.
        """
        selector = pafs.FileSelector(self.path, allow_not_found=True, recursive=True)
        found = {}
        for info in self.filesystem.get_file_info(selector):
            if info.type != pafs.FileType.File:
                continue
            relative = info.path.removeprefix(self.path + "/")
            if any(part in ("", ".", "..") for part in relative.split("/")):
                raise OSError(f"{self}: holds the key {relative!r}, which leads out of it")
            found[relative] = info.size
        return found


# A directory of an experiment: on this machine, or in a store.
Place: TypeAlias = Path | StoredPath


def stored_path(uri: str, environment: Mapping[str, str] | None = None) -> StoredPath:
    """The directory that a URI names. The store itself is not asked yet; where the environment
    names neither a server nor a region, Amazon is asked for that of the bucket.

    AWS_ENDPOINT_URL_S3, or AWS_ENDPOINT_URL, names a server that speaks the protocol of S3, such as
    `http://127.0.0.1:9000`; without it that is Amazon's.

    Raises:
        ValueError: it is no URI of a store; in one line that says how one looks.
    """
    environment = os.environ if environment is None else environment
    found = URI.fullmatch(uri)
    if found is None:
        raise ValueError(
            "must be s3://BUCKET/PATH; set credentials and endpoint in the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
        )
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    if endpoint is None and region is None:
        with suppress(OSError):  # `refusal` says what is wrong
            region = pafs.resolve_s3_region(found["bucket"])
    filesystem = pafs.S3FileSystem(
        endpoint_override=endpoint,
        region=region,
        connect_timeout=CONNECT_S,
        request_timeout=SILENCE_S,
        # Threads of their own would share a pool with `copy_files`, which then waits for itself.
        background_writes=False,
        allow_delayed_open=True,  # one request for a small file, not three
    )
    parts = [found["bucket"], *PurePosixPath(found["path"] or "/").parts[1:]]
    return StoredPath(filesystem, "/".join(parts))


def refusal(directory: StoredPath) -> str | None:
    """Why experiments cannot be kept in a directory, in a line; None where they can. Writes an
    empty file there and removes it."""
    bucket, _, _ = directory.path.partition("/")
    probe = directory / f".may-be-written-{os.getpid()}"
    try:
        if not StoredPath(directory.filesystem, bucket).is_dir():
            return f"there is no bucket {bucket}; make it first"
        probe.write_bytes(b"")
        with suppress(OSError):  # who may write need not be allowed to remove
            probe.unlink()
    except OSError as error:
        return reason(error)
    return None


def reason(error: OSError) -> str:
    """What a store said, in one line."""
    if error.errno is not None:
        return os.strerror(error.errno)
    text = " ".join(str(error).split())
    said = re.search(r"AWS Error (?P<kind>\w+) during \w+ operation: (?P<text>.*)", text)
    if said is None:
        return text[:200]
    told = re.sub(r"\(Request ID: [^)]*\)|No response body\.|; Details: .*", "", said["text"])
    return f"{said['kind']}: {told.strip()}"[:200].rstrip(": ")


@contextmanager
def fetched(
    directory: StoredPath, wanted: Callable[[str], bool] = lambda relative: True
) -> Iterator[Path]:
    """A copy on this machine, of the same name, of the files that are `wanted`; it is gone
    afterwards.

    Raises:
        OSError: a file cannot be fetched.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-fetched-") as temporary:
        copy = Path(temporary) / directory.name
        for relative in directory.files():
            if wanted(relative):
                target = copy / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((directory / relative).read_bytes())
        yield copy
