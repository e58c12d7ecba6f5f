"""Shipping of user files to the machines of a cluster."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from grpo_trainable.cluster import shipping
from grpo_trainable.cluster.shipping import SHIP_S, ShippingError, contents, lacking, lay_down, ship


class Cluster:
    """A stand-in for Ray: three machines that each take `seconds` to answer.

    A call takes at most its timeout. `clock` returns the time.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.time = seconds, 0.0
        self.timeouts: list[float] = []

    def nodes(self) -> list[dict[str, str]]:
        return [{"NodeID": name, "NodeManagerAddress": f"10.0.0.{name}"} for name in "123"]

    def remote(self, **options: Any) -> Any:
        return lambda function: SimpleNamespace(remote=lambda argument: None)

    def get(self, ref: Any, timeout: float) -> list[str]:
        self.timeouts.append(timeout)
        self.time += min(self.seconds, timeout)
        if self.seconds > timeout:
            raise GetTimeoutError("no answer")
        return []

    def clock(self) -> float:
        return self.time


def test_all_machines_together_have_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(seconds=250.0)
    monkeypatch.setattr(shipping, "ray", cluster)
    monkeypatch.setattr(shipping, "monotonic", cluster.clock, raising=False)
    monkeypatch.setattr(shipping, "NodeAffinitySchedulingStrategy", lambda node, soft: node)
    wrong = r"^node 10\.0\.0\.3 of the cluster could not receive the files"
    with pytest.raises(ShippingError, match=wrong):
        ship("files", "123")
    assert cluster.timeouts == [SHIP_S, SHIP_S - 250, SHIP_S - 500]


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
    with pytest.raises(
        ShippingError, match=r"^has a different file at .*words\.txt; remove it there"
    ):
        lay_down({str(path): b"cat\n"})
    with pytest.raises(ShippingError, match=r"^has a different file at"):
        lacking({str(path): CAT})
    assert path.read_bytes() == b"of somebody else"


def test_a_path_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ShippingError, match=r"^cannot write .*words\.txt \(File exists\)$"):
        lay_down({str(tmp_path / "file" / "words.txt"): b"cat\n"})


def test_a_file_that_changes_while_the_experiment_starts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(b"cat\n")
    assert contents([str(path)], {str(path): CAT}) == {str(path): b"cat\n"}
    path.write_bytes(b"dog\n")
    with pytest.raises(ShippingError, match=r"words\.txt changed while"):
        contents([str(path)], {str(path): CAT})
