"""A file is replaced completely or not at all, and no other file is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from write_points import killed_at

from grpo_trainable.storage.atomic import new_directory, replacing


def content_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def put(path: Path, content: bytes, *, durable: bool = False) -> None:
    with replacing(path, durable=durable) as file:
        file.write(content)


def test_a_file_is_made_and_replaced(tmp_path):
    for content in (b"one", b"two"):
        put(tmp_path / "file", content)
        assert content_of(tmp_path) == {"file": content}


def test_an_error_while_writing_leaves_the_old_content_alone(tmp_path):
    put(tmp_path / "file", b"old")
    with pytest.raises(TypeError), replacing(tmp_path / "file") as file:
        file.writelines([b"half of the new", None])  # type: ignore[list-item]
    assert content_of(tmp_path) == {"file": b"old"}


def test_a_failing_rename_is_told_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="file"):
        put(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
@pytest.mark.parametrize("durable", [False, True])
def test_killed_at_any_point_the_content_is_the_old_or_the_new(tmp_path, durable):
    path, seen = tmp_path / "file", []
    for event in range(1, 10):
        put(path, b"old")
        if not killed_at(event, lambda: put(path, b"new", durable=durable), tmp_path):
            break
        seen.append(path.read_bytes())
        assert {name[:6] for name in content_of(tmp_path)} <= {"file", ".file."}
    # The events are: open, rename and, if durable, open the directory after the rename.
    assert seen == [b"old", b"old", *([b"new"] if durable else [])]
    assert path.read_bytes() == b"new"


def test_durable_content_and_its_directory_are_flushed_to_the_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}")))
    put(tmp_path / "file", b"new")
    assert flushed == []
    put(tmp_path / "file", b"newer", durable=True)
    assert [Path(name).parent for name in flushed[:1]] == [tmp_path]
    assert flushed[1:] == [str(tmp_path)]


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "target").write_bytes(b"of somebody else")
    (tmp_path / "file").symlink_to(tmp_path / "target")
    put(tmp_path / "file", b"mine")
    assert not (tmp_path / "file").is_symlink()
    assert content_of(tmp_path) == {"file": b"mine", "target": b"of somebody else"}


# ---- Directories -----------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [False, True])
def test_a_directory_appears_when_it_is_whole(tmp_path, exists):
    out = tmp_path / "some" / "where"
    if exists:
        out.mkdir(parents=True)
    with new_directory(out) as directory:
        (directory / "file").write_bytes(b"new")
        (directory / "file").chmod(0o600)
        assert not out.exists() or not any(out.iterdir())
    assert content_of(out) == {"file": b"new"}
    assert (out / "file").stat().st_mode & 0o444 == out.stat().st_mode & 0o444
    assert [path.name for path in out.parent.iterdir()] == ["where"]


def test_a_directory_that_cannot_be_filled_leaves_nothing_behind(tmp_path):
    with pytest.raises(TypeError), new_directory(tmp_path / "out") as directory:
        (directory / "file").write_bytes(None)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_already_is_left_alone(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"old")
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.iterdir())
    for name in ("full", "file", "link", "dangling"):
        with pytest.raises(FileExistsError, match=name), new_directory(tmp_path / name):
            raise AssertionError("entered")
    assert sorted(tmp_path.iterdir()) == before
    assert content_of(tmp_path / "full") == {"file": b"old"}
