"""The header of a safetensors file, read without the tensors."""

from __future__ import annotations

import json
from pathlib import Path

LENGTH_BYTES = 8  # size of the number that precedes the header and gives the header's length


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return, by name, the shapes of a file's tensors.

    Raises:
        ValueError: The file is not in the safetensors format, or is shorter or longer than its
            header says. The message is one line.
    """
    try:
        with path.open("rb") as file:
            held = path.stat().st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if LENGTH_BYTES + length > held:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [entry["data_offsets"][1] for entry in tensors.values()]
        shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        whole = LENGTH_BYTES + length + max(ends, default=0)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
    if whole != held:
        raise ValueError(
            f"{path}: has {held:,} bytes but should have {whole:,}; copy or download it again"
        )
    return shapes
