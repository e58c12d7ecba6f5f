"""A generator is not replaced if its new machine has room but cannot receive files."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import NodeDiedError

from grpo_trainable.cluster import trial_actors
from grpo_trainable.cluster.shipping import ShippingError
from grpo_trainable.cluster.trial_actors import TrialActors
from grpo_trainable.config import GRPOConfig


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> TrialActors:
    """Return a learner and a generator whose bundle has room on another machine."""
    monkeypatch.setattr(trial_actors, "has_room", lambda bundle, patience_s: True)
    monkeypatch.setattr(trial_actors, "places_of_bundles", lambda: {2: "far"})
    config = GRPOConfig.from_dict({"placement": "disaggregated"})
    found = TrialActors(config, runtime=None, files="files")  # type: ignore[arg-type]
    found._actors = [SimpleNamespace(name=name) for name in ("learner", "generator-0")]  # type: ignore[misc]
    return found


@pytest.mark.parametrize(
    "error",
    [
        ShippingError("node 10.0.0.2 of the cluster could not receive the files (the node died)"),
        NodeDiedError("the node died"),
    ],
)
def test_no_generator_starts_on_a_machine_that_takes_no_files(
    actors: TrialActors,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def ship(files: Any, nodes: list[str]) -> None:
        assert (files, nodes) == ("files", ["far"])
        raise error

    monkeypatch.setattr(trial_actors, "ship", ship)
    before = list(actors)
    with caplog.at_level(logging.WARNING):
        assert actors.replace("generator-0", 0.0) is None
    assert list(actors) == before
    assert "generator-0 cannot start" in caplog.text
    assert "the node died" in caplog.text
