"""Directories in an object store: `s3://bucket/path`.

A file in a store is written completely or not at all, and cannot be appended to. Writing may take
a long time or fail. So every request has a deadline. A request that misses its deadline raises an
OSError, like a write to a full disk.
Credentials come only from the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile,
or the role of the machine), and are never written to a file.
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

# Time limits in seconds for connecting to the store, and for waiting while it sends nothing. A
# request is tried three times.
CONNECT_S, SILENCE_S = 3.0, 5.0
REQUEST_BYTES = 16 << 20  # bytes per request for a file that is read in pieces

URI = re.compile(r"s3://(?P<bucket>[^/@?#]+)(?P<path>/[^?#]*)?")


@dataclass(frozen=True)
class StoredPath:
    """A file or a directory in a store, with an interface like that of `pathlib.Path`."""

    filesystem: pafs.FileSystem
    path: str  # path within the file system: bucket/a/b
    scheme: str = "s3"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    def __truediv__(self, name: str) -> StoredPath:
        return StoredPath(self.filesystem, f"{self.path}/{name}", self.scheme)

    @property
    def name(self) -> str:
        """Last part of the path."""
        return PurePosixPath(self.path).name

    def exists(self) -> bool:
        """Return True if there is a file or a directory at this path."""
        return self._type() != pafs.FileType.NotFound

    def is_dir(self) -> bool:
        """Return True if there is a directory at this path."""
        return self._type() == pafs.FileType.Directory

    def _type(self) -> pafs.FileType:
        return self.filesystem.get_file_info(self.path).type

    def names(self) -> list[str]:
        """Return the sorted names in the directory. A missing directory has none."""
        selector = pafs.FileSelector(self.path, allow_not_found=True)
        return sorted(info.base_name for info in self.filesystem.get_file_info(selector))

    def read_bytes(self) -> bytes:
        """Return the whole content of the file."""
        with self.filesystem.open_input_stream(self.path) as file:
            return file.read()

    def opened(self) -> pa.NativeFile:
        """Open the file to read it in pieces. Each request to the store fetches `REQUEST_BYTES`."""
        return self.filesystem.open_input_stream(self.path, buffer_size=REQUEST_BYTES)

    def read_end(self, most_bytes: int) -> bytes:
        """Return the last `most_bytes` of the file, or all of it if it is shorter."""
        with self.filesystem.open_input_file(self.path) as file:
            file.seek(max(0, file.size() - most_bytes))
            return file.read()

    def write_bytes(self, content: bytes) -> None:
        """Write the whole file, replacing an earlier one. Missing directories are created."""
        try:
            self._write(content)
        except FileNotFoundError:
            self.filesystem.create_dir(self.path.rpartition("/")[0], recursive=True)
            self._write(content)

    def _write(self, content: bytes) -> None:
        with self.filesystem.open_output_stream(self.path) as file:
            file.write(content)

    def unlink(self) -> None:
        """Remove the file."""
        self.filesystem.delete_file(self.path)

    def move(self, target: StoredPath) -> None:
        """Move the file or directory. Everything is copied before anything is removed."""
        files = self.filesystem
        pafs.copy_files(self.path, target.path, files, files)
        self.remove_tree() if self.is_dir() else self.unlink()

    def remove_tree(self) -> None:
        """Remove the directory and everything in it."""
        self.filesystem.delete_dir(self.path)

    def files(self) -> dict[str, int]:
        """Return the size in bytes of every file below the directory, keyed by relative path.

        Raises:
            OSError: A file's key contains a part such as `..`. A copy of this file would be written
                outside the target directory.
        """
        selector = pafs.FileSelector(self.path, allow_not_found=True, recursive=True)
        found = {}
        for info in self.filesystem.get_file_info(selector):
            if info.type != pafs.FileType.File:
                continue
            relative = info.path.removeprefix(self.path + "/")
            if any(part in ("", ".", "..") for part in relative.split("/")):
                raise OSError(f"{self}: contains the key {relative!r}, which leads out of the path")
            found[relative] = info.size
        return found


# A directory or a file on this machine, or in a store.
AnyPath: TypeAlias = Path | StoredPath


def stored_path(uri: str, environment: Mapping[str, str] | None = None) -> StoredPath:
    """Return the directory that a URI names, without a request to the store.

    AWS_ENDPOINT_URL_S3, or AWS_ENDPOINT_URL, names a server that speaks the S3 protocol, such as
    `http://127.0.0.1:9000`. The default is Amazon's server. If the environment names neither a
    server nor a region, this function asks Amazon for the region of the bucket.

    Raises:
        ValueError: `uri` is not a URI of a store. The message is one line that shows the correct
            form.
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
        with suppress(OSError):  # `refusal` will say what is wrong
            region = pafs.resolve_s3_region(found["bucket"])
    filesystem = pafs.S3FileSystem(
        endpoint_override=endpoint,
        region=region,
        connect_timeout=CONNECT_S,
        request_timeout=SILENCE_S,
        # With background writes, `copy_files` would deadlock, because background writes use the
        # same thread pool.
        background_writes=False,
        allow_delayed_open=True,  # a small file is written with one request instead of three
    )
    parts = [found["bucket"], *PurePosixPath(found["path"] or "/").parts[1:]]
    return StoredPath(filesystem, "/".join(parts))


def refusal(directory: StoredPath) -> str | None:
    """Return a one-line reason why a directory cannot store experiments, or None if it can.

    The check writes an empty file in the directory and removes it.
    """
    bucket, _, _ = directory.path.partition("/")
    probe = directory / f".may-be-written-{os.getpid()}"
    try:
        if not StoredPath(directory.filesystem, bucket).is_dir():
            return f"there is no bucket {bucket}; create it first"
        probe.write_bytes(b"")
        with suppress(OSError):  # permission to write does not imply permission to remove
            probe.unlink()
    except OSError as error:
        return reason(error)
    return None


def reason(error: OSError) -> str:
    """Return a one-line reason for a failed operation on a file or a store."""
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
    """Fetch a temporary copy of a directory in a store. The copy has the same name.

    Args:
        directory: The directory.
        wanted: Returns True if the file at this relative path must be fetched. By default, all
            files are fetched.

    Raises:
        OSError: A file cannot be fetched.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-fetched-") as temporary:
        copy = Path(temporary) / directory.name
        for relative in directory.files():
            if wanted(relative):
                target = copy / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((directory / relative).read_bytes())
        yield copy
