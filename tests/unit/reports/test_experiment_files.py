"""Nothing outside the user's directory is read or written."""

from __future__ import annotations

import os
import socket
import stat

import pytest

from reports import experiment_files
from reports.experiment_files import entries, make_directory, read, remove, write


@pytest.fixture
def outside(tmp_path):
    """Return a directory with a secret in it."""
    path = tmp_path / "outside"
    path.mkdir()
    (path / "file").write_text("secret")
    return path


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "root"
    (path / "a" / "b").mkdir(parents=True)
    (path / "a" / "b" / "file").write_text("own")
    return path


def everything(directory):
    """Return the content of each path. The content of a link is its target."""
    return {
        path: os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in directory.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_files_inside_are_read_written_and_removed(root):
    assert read(root, "a", "b", "file") == b"own"
    make_directory(root, "plots")
    make_directory(root, "plots")
    write(root, "plots", "x.png", content=b"1")
    write(root, "plots", "x.png", content=b"2")

    assert everything(root / "plots") == {root / "plots" / "x.png": b"2"}
    assert entries(root) == {"a": "directory", "plots": "directory"}
    assert entries(root, "plots") == {"x.png": "file"}
    remove(root, "plots", "x.png")
    assert entries(root, "plots") == {}
    with pytest.raises(FileNotFoundError):
        read(root, "plots", "x.png")


def test_what_is_written_has_the_rights_of_any_new_file(root):
    write(root, "page", content=b"")
    (root / "other").write_bytes(b"")
    assert (root / "page").stat().st_mode == (root / "other").stat().st_mode


def test_the_users_own_directory_may_be_reached_through_links(root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    write(tmp_path / "link", "a", "page", content=b"1")

    assert read(tmp_path / "link", "a", "b", "file") == b"own"
    assert (root / "a" / "page").read_bytes() == b"1"


@pytest.mark.parametrize("absolute", [True, False])
def test_no_link_is_followed_wherever_it_stands(root, outside, absolute):
    target = outside if absolute else "../outside"
    (root / "dir").symlink_to(target)
    (root / "a" / "dir").symlink_to(outside)
    (root / "a" / "link").symlink_to(outside / "file")
    before = everything(outside)

    for names, named in (
        (("dir", "file"), "dir"),
        (("a", "dir", "file"), "dir"),
        (("a", "link"), "link"),
    ):
        for act in (read, lambda *names: write(*names, content=b"overwritten")):
            with pytest.raises(OSError, match=f"{named} is a link"):
                act(root, *names)
    for act in (lambda: entries(root, "dir"), lambda: make_directory(root, "dir")):
        with pytest.raises(OSError, match="dir is a link"):
            act()
    with pytest.raises(OSError, match="dir is a link"):
        remove(root, "dir", "file")
    assert everything(outside) == before
    assert entries(root, "a") == {"b": "directory", "dir": "link", "link": "link"}


def test_links_that_lead_nowhere_or_back_inside_are_refused_too(root, tmp_path):
    (root / "nowhere").symlink_to(tmp_path / "nothing")
    (root / "inside").symlink_to(root / "a" / "b" / "file")
    for name in ("nowhere", "inside"):
        with pytest.raises(OSError, match=f"{name} is a link"):
            read(root, name)
        with pytest.raises(OSError, match=f"{name} is a link"):
            write(root, name, content=b"")
    assert not (tmp_path / "nothing").exists()


def test_removing_a_link_leaves_what_it_leads_to(root, outside):
    (root / "link").symlink_to(outside / "file")
    remove(root, "link")
    assert not (root / "link").is_symlink()
    assert (outside / "file").read_text() == "secret"


def test_a_link_put_in_place_of_a_checked_file_is_not_followed(root, outside, monkeypatch):
    (root / "file").write_text("own")
    check = experiment_files._refuse_all_but_files

    def swapped(name, status):
        check(name, status)
        os.unlink(root / "file")
        os.symlink(outside / "file", root / "file")

    monkeypatch.setattr(experiment_files, "_refuse_all_but_files", swapped)
    with pytest.raises(OSError, match="symbolic links"):
        read(root, "file")
    (root / "file").unlink()
    (root / "file").write_text("own")
    write(root, "file", content=b"new")
    assert (root / "file").read_bytes() == b"new"
    assert (outside / "file").read_text() == "secret"


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(root):
    os.mkfifo(root / "fifo")
    place = os.getcwd()
    os.chdir(root)  # a socket's path is limited to about a hundred characters
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("socket")
    finally:
        os.chdir(place)
    for name in ("fifo", "socket", "a"):
        for act in (read, lambda *names: write(*names, content=b"")):
            with pytest.raises(OSError, match=f"{name} is not a regular file"):
                act(root, name)
    for act in (lambda: entries(root, "fifo"), lambda: make_directory(root, "fifo")):
        with pytest.raises(OSError, match="fifo is not a directory"):
            act()
    assert entries(root) == {"a": "directory", "fifo": "other", "socket": "other"}
    assert stat.S_ISFIFO((root / "fifo").stat().st_mode)


def test_a_file_beyond_the_limit_is_refused_and_one_at_the_limit_is_not(root, monkeypatch):
    monkeypatch.setattr(experiment_files, "MAX_BYTES", 1 << 20)
    with open(root / "large", "wb") as file:
        file.truncate(1 << 20)
    assert len(read(root, "large")) == 1 << 20
    with open(root / "large", "wb") as file:
        file.truncate((1 << 20) + 1)
    with pytest.raises(OSError, match="large is larger than 1 MiB"):
        read(root, "large")


def test_a_failed_write_leaves_the_old_file_and_no_other(root, monkeypatch):
    write(root, "page", content=b"old")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write(root, "page", content=b"new")
    assert everything(root)[root / "page"] == b"old"
    assert set(entries(root)) == {"a", "page"}


def test_no_descriptor_stays_open(root, outside):
    (root / "dir").symlink_to(outside)
    before = len(os.listdir("/dev/fd"))
    read(root, "a", "b", "file")
    entries(root, "a", "b")
    write(root, "a", "b", "page", content=b"")
    for names, why in ((("dir", "file"), "link"), (("a", "b"), "not a reg"), (("x",), "No such")):
        with pytest.raises(OSError, match=why):
            read(root, *names)
    assert len(os.listdir("/dev/fd")) == before
