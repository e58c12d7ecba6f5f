"""The process that computes slow rewards: `python -m … REFERENCE LIFELINE_FD [TASK]`.

REFERENCE names a function `f(response, ground_truth)`. TASK is a JSON object with `settings` and
`seed`. If TASK is given, REFERENCE names a task instead: a built-in one or a user's class. In that
case, the function is the task's method `reward`.

Standard input and output carry JSON lines, never pickle. The first line of output is
`{"ready": true}`. If the function cannot be imported, the first line is `{"error": …}` instead, and
the process ends. After the first line, each request, `{"response", "ground_truth"}`, gets one
reply: `{"error"}` or `{"reward", "format_reward", "answer_reward"}`.

The process ends when its parent does. An idle process sees the end of standard input. A busy
process gets SIGIO when the parent's end of the LIFELINE_FD pipe closes. The signal ends the process
even if a function never returns.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from grpo_trainable.config import TaskSettings
from grpo_trainable.generator.worker_side import die_with_parent, take_standard_streams
from grpo_trainable.plugins import load, one_line
from grpo_trainable.tasks import REWARDS, as_score
from grpo_trainable.tasks.custom import CustomTask

# Limit on the address space of a process with a built-in reward. A number in an answer can be too
# large for any memory.
MEMORY_BYTES = 2 << 30


def reward_function(reference: str, task: str | None) -> Callable[[str, Any], Any]:
    """Return the function that computes rewards.

    Args:
        reference: The name of a function or a task.
        task: The task's settings and seed as JSON. None: `reference` names a function.

    Raises:
        ValueError: The function cannot be loaded. The message is one line.
    """
    if task is None:
        return load("task.reward", reference)
    made_of = json.loads(task)
    if reference in REWARDS:
        return _built_in(reference, made_of["settings"])
    return CustomTask(reference, made_of["settings"], made_of["seed"]).reward


def _built_in(name: str, settings: dict[str, Any]) -> Callable[[str, Any], Any]:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    reward = REWARDS[name](TaskSettings(**settings))
    reward.warm_up()
    return reward.reward


def main(reference: str, lifeline_fd: int, task: str | None = None) -> None:
    """Answer requests until standard input ends."""
    die_with_parent(lifeline_fd)
    requests, replies = take_standard_streams()

    def send(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    # User code runs below. An exception in it must not end the conversation silently.
    try:
        function = reward_function(reference, task)
    except ValueError as error:
        send({"error": str(error)})
        return
    send({"ready": True})
    for line in requests:
        request = json.loads(line)
        try:
            reply = asdict(as_score(function(request["response"], request["ground_truth"])))
        except (Exception, SystemExit) as error:
            reply = {"error": one_line(error)}
        send(reply)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
