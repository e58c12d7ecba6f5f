"""Write and read safetensors files in pieces, so that memory never holds a whole file.

The safetensors library either serialises to bytes, or copies every tensor to main memory before it
writes to a path. A file written here has the same bytes as one written by `safetensors.torch.save`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

# Functions that create tensors import torch in their bodies, so that verifying a file does not load
# torch.
if TYPE_CHECKING:
    from torch import Tensor

PIECE_BYTES = 1 << 20
LENGTH_BYTES = 8  # size of the number that precedes the header and gives its length
MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
# Tensor type in a file -> type in torch, in the order in which the safetensors library stores
# tensors.
DTYPES = {
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


# ---- Writing -----------------------------------------------------------------------------------


def file_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the content of a file with these tensors, in pieces of up to `PIECE_BYTES` of data.

    Tensors may be on any device, need not be contiguous, and may share memory.
    """
    codes = {f"torch.{dtype}": code for code, dtype in DTYPES.items()}
    order = {name: number for number, name in enumerate(codes)}
    stored = sorted(tensors.items(), key=lambda item: (order[str(item[1].dtype)], item[0]))
    entries, at = {}, 0
    for name, tensor in stored:
        entries[name] = {
            "dtype": codes[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    yield len(header).to_bytes(LENGTH_BYTES, "little") + header
    for _, tensor in stored:
        yield from _tensor_pieces(tensor.detach())


def _tensor_pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order. Only one piece is copied at a time."""
    if tensor.nbytes <= PIECE_BYTES:
        yield _bytes_of(tensor.cpu().contiguous())
        return
    rows = len(tensor) * PIECE_BYTES // tensor.nbytes
    for part in tensor.split(rows) if rows else tensor.unbind():
        yield from _tensor_pieces(part)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor in main memory."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data


def joined_pieces(pieces: Iterable[bytes | memoryview], most_bytes: int) -> Iterator[bytes]:
    """Join pieces into larger pieces of about `most_bytes`."""
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) >= most_bytes:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


# ---- Reading -----------------------------------------------------------------------------------


class TensorFileError(ValueError):
    """Raised if a file is not a complete safetensors file."""


class Readable(Protocol):
    """An open binary file."""

    def readinto(self, buffer: Any, /) -> int | None:
        """Read into the buffer, and return the number of bytes read."""
        ...


class HashedFile:
    """An open file whose bytes are hashed as they are read, at most `PIECE_BYTES` at a time."""

    def __init__(self, file: Readable, tick: Callable[[], object]) -> None:
        """Hash everything that is read from `file` from now on, and call `tick` for every piece."""
        self._file = file
        self._tick = tick
        self._digest = hashlib.sha256()

    def fill(self, buffer: memoryview) -> int:
        """Fill the buffer, or read up to the file's end. Return the number of bytes read."""
        filled = 0
        while filled < len(buffer):
            piece = buffer[filled : filled + PIECE_BYTES]
            count = self._file.readinto(piece) or 0
            self._digest.update(piece[:count])
            self._tick()
            if not count:
                break
            filled += count
        return filled

    def fill_whole(self, buffer: memoryview) -> None:
        """Fill the whole buffer.

        Raises:
            TensorFileError: The file ends before the buffer is full.
        """
        if self.fill(buffer) < len(buffer):
            raise TensorFileError("it is cut short")

    def content(self) -> bytes:
        """Return the rest of the file."""
        content, piece = bytearray(), memoryview(bytearray(PIECE_BYTES))
        while count := self.fill(piece):
            content += piece[:count]
        return bytes(content)

    def sha256(self) -> str:
        """Read the rest of the file, and return the digest of everything that was read."""
        piece = memoryview(bytearray(PIECE_BYTES))
        while self.fill(piece):
            pass
        return self._digest.hexdigest()


def read_tensors(file: HashedFile) -> dict[str, Tensor]:
    """Return the tensors of a file, each in separate memory.

    Raises:
        TensorFileError: The file is not a safetensors file, or is cut short.
    """
    import torch

    tensors = {}
    for name, dtype, shape in _read_header(file):
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        file.fill_whole(_bytes_of(tensors[name]))
    return tensors


def _read_header(file: HashedFile) -> list[tuple[str, str, list[int]]]:
    """Return the name, type and shape of each tensor, in the order of the data in the file."""
    import torch

    length_bytes = bytearray(LENGTH_BYTES)
    file.fill_whole(memoryview(length_bytes))
    length = int.from_bytes(length_bytes, "little")
    if length > MOST_HEADER_BYTES:
        raise TensorFileError("its header is too long")
    header = bytearray(length)
    file.fill_whole(memoryview(header))
    found, at = [], 0
    try:
        entries = {n: e for n, e in json.loads(header).items() if n != "__metadata__"}
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
            size = math.prod(shape) * getattr(torch, dtype).itemsize
            counted = all(type(length) is int and length >= 0 for length in shape)
            if not counted or entry["data_offsets"] != [at, at + size]:
                raise ValueError(f"the shape or the offsets of {name} are invalid")
            found.append((name, dtype, shape))
            at += size
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise TensorFileError(f"its header is invalid: {type(error).__name__}: {error}") from error
    return found
