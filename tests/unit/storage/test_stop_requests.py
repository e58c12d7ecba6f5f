"""Requests to stop in a key-value store: what the driver writes, and what the trial reads."""

from __future__ import annotations

import threading

import pytest

from grpo_trainable.protocol.stopping import Finishing, Stopped
from grpo_trainable.storage import stop_requests
from grpo_trainable.storage.stop_requests import TuneStopRequest, forget_all


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replace Ray's store with a dictionary."""
    entries: dict[str, str] = {"stop/another job/a/made": "yes"}

    def delete(prefix: str, *, del_by_prefix: bool, namespace: str) -> None:
        assert del_by_prefix
        for key in [key for key in entries if key.startswith(prefix)]:
            del entries[key]

    monkeypatch.setattr(stop_requests, "_job", lambda: "stop/this job/")
    monkeypatch.setattr(stop_requests, "_internal_kv_get", lambda key, namespace: entries.get(key))
    monkeypatch.setattr(stop_requests, "_internal_kv_exists", lambda key, namespace: key in entries)
    monkeypatch.setattr(
        stop_requests,
        "_internal_kv_put",
        lambda key, value, namespace: entries.update({key: value}),
    )
    monkeypatch.setattr(stop_requests, "_internal_kv_del", delete)
    return entries


def test_only_the_trial_that_was_asked_sees_the_request():
    TuneStopRequest("a").make()
    assert TuneStopRequest("a").made
    assert not TuneStopRequest("b").made
    assert not TuneStopRequest("aa").made


@pytest.mark.parametrize(
    "answer",
    [
        Finishing(round=7, left_s=12.5),
        Finishing(round=1, left_s=None),
        Stopped(round=6, saved=True, lost_s=48.0, checkpoint="/storage/c", notes=["a note"]),
        Stopped(round=0, saved=False, lost_s=0.0),
    ],
)
def test_the_driver_gets_the_trials_answer(answer):
    assert TuneStopRequest("a").answer() is None
    TuneStopRequest("a").say(answer)
    assert TuneStopRequest("a").answer() == answer
    assert TuneStopRequest("b").answer() is None


def test_the_trials_last_answer_counts():
    request = TuneStopRequest("a")
    request.say(Finishing(round=7, left_s=None))
    request.say(Stopped(round=7, saved=True, lost_s=0.0))
    assert request.answer() == Stopped(round=7, saved=True, lost_s=0.0)


def test_a_trial_waits_until_it_is_released(monkeypatch):
    monkeypatch.setattr(stop_requests, "LOOK_S", 0.001)
    waits = threading.Thread(target=TuneStopRequest("a").wait_until_released, daemon=True)
    waits.start()
    waits.join(timeout=0.05)
    assert waits.is_alive()
    TuneStopRequest("a").release()
    waits.join()


def test_only_entries_of_this_job_are_forgotten(store):
    TuneStopRequest("a").make()
    TuneStopRequest("b").say(Finishing(round=1, left_s=None))
    forget_all()
    assert store == {"stop/another job/a/made": "yes"}
