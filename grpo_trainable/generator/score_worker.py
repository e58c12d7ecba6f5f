"""The process that computes slow rewards: `python -m … REFERENCE LIFELINE_FD [TASK]`.

REFERENCE names a reward function in any of the accepted forms
(`grpo_trainable/tasks/reward_function.py`). TASK is a JSON object with `settings` and `seed`. If
TASK is given, REFERENCE names a task instead: a built-in task or a user's class. In that case, the
function is the task's method `reward`.

Standard input and output carry JSON lines, never pickle. The first line of output is
`{"ready": true, …}` with all fields of `RewardFunction` except `score`. If the function cannot be
used, the first line is `{"error": …}` instead, and the process ends. After the first line, each
request gets one reply. A request is an object with the fields of `Responses` that the
function reads. The reply is a list with one entry per response. An entry is
`{"reward", "format_reward", …}` with the fields of a `Score`, or `{"message", …}` with the fields
of a `RewardError`.

The process ends when its parent ends. An idle process sees the end of standard input. A busy
process gets SIGIO when the parent's end of the LIFELINE_FD pipe closes. The signal ends the process
even if the reward function never returns.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict
from typing import Any

from grpo_trainable.config import TaskSettings
from grpo_trainable.generator.worker_side import die_with_parent, take_standard_streams
from grpo_trainable.plugins import PluginError, load, one_line
from grpo_trainable.tasks import REWARDS, RewardError, Score, as_score
from grpo_trainable.tasks.custom import CustomTask
from grpo_trainable.tasks.reward_function import Responses, RewardFunction, as_reward, is_reward

# Limit on the address space of a process that computes a built-in reward. Without this limit, an
# answer that stands for a huge number could use up the machine's memory.
MEMORY_BYTES = 2 << 30


def reward_function(reference: str, task: str | None) -> RewardFunction:
    """Return the function that computes rewards.

    Args:
        reference: The name of a function or a task.
        task: The task's settings and seed as JSON. None: `reference` names a function.

    Raises:
        ValueError: The function cannot be loaded or has no accepted form. The message is one line.
    """
    if task is None:
        found = load("task.reward", reference, fits=is_reward)
        try:
            return as_reward(found)
        except ValueError as error:
            raise PluginError(f"task.reward={reference}: {error}") from None
    made_of = json.loads(task)
    if reference in REWARDS:
        return as_reward(_built_in(reference, made_of["settings"]))
    return as_reward(CustomTask(reference, made_of["settings"], made_of["seed"]).reward)


def _built_in(name: str, settings: dict[str, Any]) -> Any:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    reward = REWARDS[name](TaskSettings(**settings))
    reward.warm_up()
    return reward.reward


def answers(reward: RewardFunction, given: Responses) -> list[Score | RewardError]:
    """Return a `Score` or a `RewardError` for each response.

    If the reward function raises an exception, no response gets a score. If one of its results is
    invalid, only the response with that result gets no score.
    """
    try:
        results = reward.score(given)
    except (Exception, SystemExit) as error:
        return [_failure(error)] * len(given.texts)
    return [_answer(result) for result in results]


def _answer(result: Any) -> Score | RewardError:
    if result is None:
        return RewardError("the reward function returned None", is_failure=False)
    try:
        return as_score(result)
    except (Exception, SystemExit) as error:  # conversion to a number may run user code
        return _failure(error)


def _failure(error: BaseException) -> RewardError:
    return RewardError(one_line(error), repeats=not _may_pass(error))


def _may_pass(error: BaseException) -> bool:
    """Return True if a failed call may succeed later, because a service or a file may come back.

    This is the case for an OSError, and for an error whose class is not built in, such as the
    errors that a service's client library raises. The errors that led to `error` are checked too.
    """
    reached: list[BaseException] = [error]
    for one in reached:  # the loop extends the list
        if isinstance(one, OSError) or type(one).__module__ != "builtins":
            return True
        # An exception group lists its errors in `exceptions`.
        causes = (one.__cause__, one.__context__, *getattr(one, "exceptions", ()))
        reached += [
            cause
            for cause in causes
            if cause is not None and not any(cause is other for other in reached)
        ]
    return False


def main(reference: str, lifeline_fd: int, task: str | None = None) -> None:
    """Answer requests until standard input ends."""
    die_with_parent(lifeline_fd)
    requests, replies = take_standard_streams()

    def send(reply: Any) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    try:
        reward = reward_function(reference, task)
    except ValueError as error:
        send({"error": str(error)})
        return
    send(
        {
            "ready": True,
            "scores_groups": reward.scores_groups,
            "columns": sorted(reward.columns),
            "reads": sorted(reward.reads),
            "parts": reward.parts,
        }
    )
    for line in requests:
        send([asdict(answer) for answer in answers(reward, Responses(**json.loads(line)))])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
