"""The process that runs a user's reward function: `python -m … SPEC LIFELINE_FD`.

JSON lines on standard input and output, never pickle. First comes `{"ready": true}`, or
`{"error": …}` and the end when the function cannot be imported. Then each request, `{"response",
"ground_truth"}`, gets one reply: `{"reward", "format_reward", "answer_reward"}` or `{"error"}`.

It ends with its parent: idle, by the end of standard input; busy, by SIGIO when the parent's end
of the LIFELINE_FD pipe closes. The signal needs no cooperation of a function that never returns.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from grpo_trainable.plugins import import_callable, one_line

FLOAT32_MAX = 3.4028234663852886e38  # rewards become float32 tensors


def as_reply(result: Any) -> dict[str, float]:
    """What a reward function returned, as a reply.

    A plain number is the reward. A mapping has `reward`; its `format_reward` is 1 and its
    `answer_reward` is the reward unless given. TypeError or ValueError for anything else, NaN and
    infinities included.
    """
    scores = result if isinstance(result, Mapping) else {"reward": result}
    if "reward" not in scores:
        raise ValueError(f"returned a dict without reward: keys {sorted(map(str, scores))}")
    reward = _finite("reward", scores["reward"])
    return {
        "reward": reward,
        "format_reward": _finite("format_reward", scores.get("format_reward", 1.0)),
        "answer_reward": _finite("answer_reward", scores.get("answer_reward", reward)),
    }


def _finite(name: str, value: Any) -> float:
    # Not float() alone: it would take the text "1".
    if not hasattr(type(value), "__float__"):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    number = float(value)
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"{name} must be a finite float32, got {number}")
    return number


def die_with_parent(lifeline_fd: int) -> None:
    """Let the kernel end this process, and all of its group, once the other end of the pipe is
    closed."""
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, os.O_ASYNC)
    # No signal comes for what was closed before; nothing is ever written, so readable is closed.
    if select.select([lifeline_fd], [], [], 0)[0]:
        sys.exit()


def take_standard_streams() -> tuple[TextIO, TextIO]:
    """The streams of the protocol; from here on the user's input is empty and prints are errors."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(1, "w", buffering=1)  # by the line: a killed process flushes nothing
    return requests, replies


def main(spec: str, lifeline_fd: int) -> None:
    die_with_parent(lifeline_fd)
    requests, replies = take_standard_streams()

    def send(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    # The user's code runs here, so nothing it raises may end the conversation without a word.
    try:
        function = import_callable(spec)
    except BaseException as error:
        send({"error": one_line(error)})
        return
    send({"ready": True})
    for line in requests:
        request = json.loads(line)
        try:
            reply = as_reply(function(request["response"], request["ground_truth"]))
        except (Exception, SystemExit) as error:
            reply = {"error": one_line(error)}
        send(reply)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
