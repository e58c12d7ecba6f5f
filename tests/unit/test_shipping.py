"""Files of the user's on the machines of a cluster."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from grpo_trainable.shipping import ShippingError, contents, lacking, lay_down

CAT = hashlib.sha256(b"cat\n").hexdigest()


def test_a_machine_gets_the_files_that_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "words.txt"
    assert lacking({str(path): CAT}) == [str(path)]
    lay_down({str(path): b"cat\n"})
    assert path.read_bytes() == b"cat\n"
    assert lacking({str(path): CAT}) == []
    lay_down({str(path): b"cat\n"})


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(b"of somebody else")
    with pytest.raises(ShippingError, match=r"^has another file at .*words\.txt; remove it there"):
        lay_down({str(path): b"cat\n"})
    with pytest.raises(ShippingError, match=r"^has another file at"):
        lacking({str(path): CAT})
    assert path.read_bytes() == b"of somebody else"


def test_a_path_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ShippingError, match=r"^cannot have .*words\.txt \(File exists\)$"):
        lay_down({str(tmp_path / "file" / "words.txt"): b"cat\n"})


def test_a_file_that_changes_while_the_experiment_starts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(b"cat\n")
    assert contents([str(path)], {str(path): CAT}) == {str(path): b"cat\n"}
    path.write_bytes(b"dog\n")
    with pytest.raises(ShippingError, match=r"words\.txt has changed while"):
        contents([str(path)], {str(path): CAT})
