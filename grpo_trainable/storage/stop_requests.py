"""Requests to stop trials, and the trials' answers, in Ray's key-value store.

While `step()` runs, the process of a trial cannot answer a call from the driver. So the driver
writes a request to the key-value store, and the trial reads it there while it waits for its actors.
The keys contain the id of the Ray job (the process that runs Tune), so jobs on the same cluster do
not see each other's entries.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import ray

from grpo_trainable.protocol.stopping import Finishing, Stopped
from grpo_trainable.storage.ray_private import (
    _internal_kv_del,
    _internal_kv_exists,
    _internal_kv_get,
    _internal_kv_put,
)

NAMESPACE = "grpo_trainable"
LOOK_S = 0.2  # pause between two checks by a trial that waits for its experiment to end
ANSWERS = {"Finishing": Finishing, "Stopped": Stopped}


class TuneStopRequest:
    """A request to stop one trial of this Ray job."""

    def __init__(self, trial_id: str) -> None:
        """Refer to a trial without making a request yet."""
        self._prefix = f"{_job()}{trial_id}/"

    # ---- In the driver -----------------------------------------------------------------------

    def make(self) -> None:
        """Ask the trial to stop."""
        self._put("made", "yes")

    def answer(self) -> Finishing | Stopped | None:
        """Return the trial's latest answer, or None if there is none."""
        content = _internal_kv_get(f"{self._prefix}answer", namespace=NAMESPACE)
        if content is None:
            return None
        kind, values = json.loads(content)
        return ANSWERS[kind](**values)

    def release(self) -> None:
        """Let a stopped trial return from `step()`. Call this when Tune no longer reads rows."""
        self._put("released", "yes")

    # ---- In the trial's process --------------------------------------------------------------

    @property
    def made(self) -> bool:
        """True once the trial must stop."""
        return self._has("made")

    def say(self, answer: Finishing | Stopped) -> None:
        """Replace the trial's answer."""
        self._put("answer", json.dumps([type(answer).__name__, asdict(answer)]))

    def wait_until_released(self) -> None:
        """Wait until the driver has called `release`."""
        while not self._has("released"):
            time.sleep(LOOK_S)

    def _put(self, name: str, content: str) -> None:
        _internal_kv_put(f"{self._prefix}{name}", content, namespace=NAMESPACE)

    def _has(self, name: str) -> bool:
        return _internal_kv_exists(f"{self._prefix}{name}", namespace=NAMESPACE)


def forget_all() -> None:
    """Remove the requests and answers of all trials of this Ray job."""
    _internal_kv_del(_job(), del_by_prefix=True, namespace=NAMESPACE)


def _job() -> str:
    return f"stop/{ray.get_runtime_context().get_job_id()}/"
