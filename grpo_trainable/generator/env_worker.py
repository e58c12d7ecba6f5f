"""The process in which the episodes of a group are played: `python -m … REFERENCE LIFELINE_FD`.

JSON lines on standard input and output, never pickle. First comes `{"ready": true}`, or
`{"error": …}` and the end when the class cannot be had. Then each request gets one reply:

    {"reset": PLACE, "spec": …}      {"text": …}
    {"step": PLACE, "action": …}     {"text", "reward", "done", "info"}
    {"close": true}                  {"closed": true}

or `{"error": …}`. A PLACE is a number; each has an environment of its own, which plays one episode
after the other. The process ends with its parent, as `score_worker` does. A copy of it that an
environment has forked and that comes back here ends, since two would answer one request.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from grpo_trainable.environments import Environment, as_text, as_turn
from grpo_trainable.generator.worker_side import die_with_parent, take_standard_streams
from grpo_trainable.plugins import PluginError, load, one_line

METHODS = ("reset", "step", "close")


class Environments:
    """The environments of one process, made when they are first asked."""

    def __init__(self, reference: str) -> None:
        """
        Raises:
            PluginError: the class cannot be had, or lacks a method.
        """
        self._class: Callable[[], Environment] = load("env.name", reference)
        self._made: dict[int, Environment] = {}
        lacking = [name for name in METHODS if not callable(getattr(self._class, name, None))]
        if lacking:
            raise PluginError(f"env.name={reference}: has no method {lacking[0]}")

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What an environment says; its exceptions are the caller's."""
        if "reset" in request:
            return {"text": as_text(self._at(request["reset"]).reset(request["spec"]))}
        if "step" in request:
            return asdict(as_turn(self._at(request["step"]).step(request["action"])))
        for made in self._made.values():
            made.close()
        self._made.clear()
        return {"closed": True}

    def _at(self, place: int) -> Environment:
        if place not in self._made:
            self._made[place] = self._class()
        return self._made[place]


def main(reference: str, lifeline_fd: int) -> None:
    die_with_parent(lifeline_fd)
    requests, replies = take_standard_streams()
    process = os.getpid()

    def send(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    # The user's code runs here, so nothing it raises may end the conversation without a word.
    try:
        places = Environments(reference)
    except ValueError as error:
        send({"error": str(error)})
        return
    send({"ready": True})
    for line in requests:
        try:
            reply = places.answer(json.loads(line))
        except (Exception, SystemExit) as error:
            reply = {"error": one_line(error)}
        if os.getpid() != process:
            os._exit(0)
        send(reply)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
