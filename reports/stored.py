"""Fetch an experiment from an object store for a report, and upload the report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from reports.experiment import REPORT_FILES
from reports.report import ReportError

if TYPE_CHECKING:
    from grpo_trainable.storage.object_store import AnyPath, StoredPath

# A report needs no checkpoints, no .pkl files of Tune, and no earlier report.
NOT_READ = re.compile(r"(.*/)?checkpoint_\d+/.*|.*\.pkl|(report\.html|report\.json|plots/.*)")


@contextmanager
def at_hand(place: AnyPath) -> Iterator[Path]:
    """Yield the directory of an experiment, or a local copy if the experiment is in a store.

    When the `with` block ends, upload the report from the copy to the store.

    Raises:
        ReportError: The store cannot be read or written. A ReportError from inside the `with` block
            is raised again with the store's path instead of the copy's.
    """
    if isinstance(place, Path):
        yield place
        return
    from grpo_trainable.storage.object_store import fetched

    with ExitStack() as stack:
        with _naming(place):
            if not place.is_dir():
                raise ReportError(f"{place}: does not exist")
            wanted = fetched(place, lambda name: not NOT_READ.fullmatch(name))
            copy = stack.enter_context(wanted)
        try:
            yield copy
        except ReportError as error:
            raise ReportError(_naming_the_store(str(error), copy, place)) from None
        with _naming(place):
            _upload(copy, place)


@contextmanager
def _naming(place: StoredPath) -> Iterator[None]:
    """Turn an OSError from the store into a ReportError that names the experiment's path."""
    from grpo_trainable.storage.object_store import reason

    try:
        yield
    except OSError as error:
        raise ReportError(f"{place}: {reason(error)}") from None


def _naming_the_store(text: str, copy: Path, place: StoredPath) -> str:
    """Return the text with the local copy's path replaced by the path in the store."""
    above = str(place).removesuffix(f"/{place.name}")
    return text.replace(str(copy.parent), above)


def _upload(copy: Path, place: StoredPath) -> None:
    """Upload the report to the store, and remove plots that only an earlier report had."""
    found = [path for name in REPORT_FILES for path in (copy / name, *(copy / name).glob("*"))]
    written = {path.relative_to(copy).as_posix(): path for path in found if path.is_file()}
    if not written:
        return
    earlier = (place / "plots").names()
    for name, path in written.items():
        content = path.read_bytes()
        if path.suffix in (".html", ".json"):  # these files contain the experiment's path
            content = _naming_the_store(content.decode(), copy, place).encode()
        (place / name).write_bytes(content)
    for name in earlier:
        if f"plots/{name}" not in written:
            (place / "plots" / name).unlink()
