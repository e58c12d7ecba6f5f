"""The process that plays the episodes of a group: `python -m … REFERENCE LIFELINE_FD`.

REFERENCE names the environment's class. Standard input and output carry JSON lines, never pickle.
The first line of output is `{"ready": true}`. If the class cannot be loaded, the first line is
`{"error": …}` instead, and the process ends. After the first line, each request gets one reply:

    {"reset": PLACE, "spec": …}      {"text": …}
    {"step": PLACE, "action": …}     {"text", "reward", "done", "info"}
    {"close": true}                  {"closed": true}

If a request fails, its reply is `{"error": …}`. A PLACE is the number of an episode in its group.
Each place has a separate environment, which plays one episode after another. The process ends when
its parent ends; `score_worker` describes how. If an environment forks and the child process returns
to this code, the child ends. Otherwise, two processes would answer the same request.
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
from grpo_trainable.plugins import PluginError, load, one_line, users_line

METHODS = ("reset", "step", "close")


class Environments:
    """The environments of one process. Each environment is created when it is first used."""

    def __init__(self, reference: str) -> None:
        """Load the class of the environments.

        Raises:
            PluginError: The class cannot be loaded or lacks a method.
        """
        self._class: Callable[[], Environment] = load("env.name", reference)
        self._made: dict[int, Environment] = {}
        lacking = [name for name in METHODS if not callable(getattr(self._class, name, None))]
        if lacking:
            raise PluginError(f"env.name={reference}: has no method {lacking[0]}")

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request, and return the reply to it.

        Exceptions that the environment raises are not caught.
        """
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
    """Answer requests until standard input ends."""
    die_with_parent(lifeline_fd)
    requests, replies = take_standard_streams()
    process = os.getpid()

    def send(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    # User code runs below. If user code raises an exception, the parent must still get a reply.
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
            reply = {"error": f"{one_line(error)}{users_line(error)}"}
        if os.getpid() != process:
            os._exit(0)
        send(reply)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
