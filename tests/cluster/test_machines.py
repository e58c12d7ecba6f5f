"""Simulated machines, made of namespaces: their network and their separate disks."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Machine, machines, missing

REACHES = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 0.5)"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    why = missing()
    if why is not None:
        pytest.skip(f"no machines here: {why}")
    with machines(2, tmp_path / "disk") as (first, second):
        yield first, second


def reaches(machine: Machine, address: tuple[str, int]) -> bool:
    host, port = address
    status, _ = machine.run([sys.executable, "-c", REACHES, host, str(port)], {})
    return status == 0


def test_a_server_of_this_process_is_reached_from_another_machine_until_a_link_is_cut(two):
    first, second = two
    with second.listen() as listener:
        assert listener.getsockname()[0] == second.address
        assert reaches(first, listener.getsockname())
        first.cut()
        assert not reaches(first, listener.getsockname())
        first.connect()
        assert reaches(first, listener.getsockname())


@pytest.mark.skipif(shutil.which("nft") is None, reason="nft missing (nftables)")
def test_nothing_arrives_where_every_packet_is_lost(two):
    first, second = two
    with second.listen() as listener:
        second.lose(100.0)
        assert not reaches(first, listener.getsockname())


def test_what_a_machine_has_on_its_own_disk_is_seen_from_outside(two, tmp_path):
    first, second = two
    path = tmp_path / "disk" / "a"
    first.run(["sh", "-c", f"echo b > {path}"], {})
    assert first.seen(path).read_text() == "b\n"
    assert not second.seen(path).exists()
    assert not path.exists()
