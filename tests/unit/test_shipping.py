"""Files of the user's on the machines of a cluster."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from grpo_trainable.shipping import ShippingError, contents, lay_down


def test_a_machine_gets_the_files_that_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "words.txt"
    assert lay_down({str(path): b"cat\n"}) is None
    assert path.read_bytes() == b"cat\n"
    assert lay_down({str(path): b"cat\n"}) is None


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(b"of somebody else")
    wrong = lay_down({str(path): b"cat\n"})
    assert wrong == f"has another file at {path}; remove it there, or make it the same"
    assert path.read_bytes() == b"of somebody else"


def test_a_path_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    path = tmp_path / "file" / "words.txt"
    assert lay_down({str(path): b"cat\n"}) == f"cannot have {path} (File exists)"


def test_a_file_that_changes_while_the_experiment_starts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(b"cat\n")
    digest = hashlib.sha256(b"cat\n").hexdigest()
    assert contents({"task.keywords_file": str(path)}, {"task.keywords_file": digest}) == {
        str(path): b"cat\n"
    }
    path.write_bytes(b"dog\n")
    with pytest.raises(ShippingError, match=r"^task\.keywords_file: .* has changed while"):
        contents({"task.keywords_file": str(path)}, {"task.keywords_file": digest})
