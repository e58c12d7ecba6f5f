"""The process that computes slow rewards: `python -m … REFERENCE LIFELINE_FD [TASK [check]]`.

REFERENCE is a value of `task.reward` (`grpo_trainable/config/reward_kinds.py`). TASK is a JSON
object with `settings` and `seed`, or `null`. If TASK is an object, REFERENCE names a task instead:
a built-in task or a user's class. In that case, the function is the task's method `reward`. With
`check`, the process is not prepared for requests, so a reward model is checked but not loaded.

Standard input and output carry JSON lines, never pickle. The first line of output is
`{"ready": true, …}` with the properties of the reward. If the reward cannot be used, the first line
is `{"error": …}` instead, and the process ends. After the first line, each request gets one reply.
A request is a list with one object per prompt. An object has the fields of `Responses` that the
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
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_trainable.config import TaskSettings
from grpo_trainable.config.reward_kinds import FUNCTION, JUDGE, MODEL, Reward, rewards_of
from grpo_trainable.generator.worker_side import die_with_parent, take_standard_streams
from grpo_trainable.models.hf.directory import refuse_other_than_reward_model
from grpo_trainable.plugins import PluginError, load, one_line, users_line
from grpo_trainable.tasks import REWARDS, RewardError, Score, as_score
from grpo_trainable.tasks.custom import CustomTask
from grpo_trainable.tasks.messages import as_messages
from grpo_trainable.tasks.reward_function import (
    Responses,
    RewardFunction,
    as_reward,
    is_reward,
    sum_of,
)

# Limit on the address space of a process that computes a built-in reward. Without this limit, an
# answer that stands for a huge number could use up the machine's memory.
MEMORY_BYTES = 2 << 30


def reward_function(reference: str, task: Mapping[str, Any] | None) -> RewardFunction:
    """Return the function that computes rewards.

    Args:
        reference: A value of `task.reward`, or the name of a task.
        task: The task's settings and seed. None: `reference` is a value of `task.reward`.

    Raises:
        ValueError: The reward cannot be loaded or has an unsupported form. The message is one line.
    """
    if task is not None:
        if reference in REWARDS:
            return as_reward(_built_in(reference, task["settings"]))
        return as_reward(CustomTask(reference, task["settings"], task["seed"]).reward)
    named = _rewards_named(reference)
    fits = is_reward if len(named) == 1 else callable  # a list contains no other lists
    rewards = [KINDS[reward.kind](reward, fits) for reward in named]
    if len(rewards) == 1:
        return rewards[0]
    try:
        return sum_of(rewards)
    except ValueError as error:
        raise PluginError(f"task.reward={reference}: {error}") from None


def _rewards_named(reference: str) -> list[Reward]:
    try:
        return rewards_of(reference)
    except (TypeError, ValueError):  # `load` reports the mistake later
        return [Reward(FUNCTION, reference)]


def _of_function(reward: Reward, fits: Callable[[Any], bool]) -> RewardFunction:
    found = load("task.reward", reward.source, fits=fits)
    try:
        return as_reward(found)
    except ValueError as error:
        raise PluginError(f"task.reward={reward.text}: {error}") from None


def _of_model(reward: Reward, fits: Callable[[Any], bool]) -> RewardFunction:
    directory = Path(reward.source)
    try:
        refuse_other_than_reward_model(directory)
        # Importing torch and transformers takes seconds, and other rewards do not need them.
        from grpo_trainable.models.hf.reward_model import RewardModel

        model = RewardModel(directory)
    except ValueError as error:
        raise PluginError(f"task.reward={MODEL}:{error}") from None

    def score(given: Responses) -> list[float]:
        if model.has_chat_template:
            return model.scores(as_messages(given.prompt), given.texts)
        if not isinstance(given.prompt, str):
            raise ValueError(
                "the prompt is a list of messages, but the tokenizer of the reward model has no "
                "chat template"
            )
        return model.scores(given.prompt, given.texts)

    def start() -> None:
        try:
            model.load()
        except ValueError as error:
            raise PluginError(f"task.reward={MODEL}:{error}") from None

    return RewardFunction(
        score=score,
        scores_groups=True,
        reads=frozenset({"prompt"}),
        name=directory.name,
        takes_messages=model.has_chat_template,
        start=start,
        has_spare=False,
        may_die_of_responses=False,
    )


def _of_judge(reward: Reward, fits: Callable[[Any], bool]) -> RewardFunction:
    # Other rewards need no HTTP client.
    from grpo_trainable.tasks.judge.reward import judge_reward

    try:
        return judge_reward(reward.source)
    except ValueError as error:
        raise PluginError(f"task.reward={reward.text}: {error}") from None


# Kind of a reward -> the function that loads it.
KINDS = {FUNCTION: _of_function, JUDGE: _of_judge, MODEL: _of_model}


def _built_in(name: str, settings: dict[str, Any]) -> Any:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    reward = REWARDS[name](TaskSettings(**settings))
    reward.warm_up()
    return reward.reward


def answers(reward: RewardFunction, *batch: Responses) -> list[Score | RewardError]:
    """Return a `Score` or a `RewardError` for each response to the prompts of a batch.

    If the reward function raises an exception, no response of the call gets a score. If one of its
    results is invalid, only the response with that result gets no score.
    """
    try:
        if reward.score_batch is None:
            results = [result for given in batch for result in reward.score(given)]
        else:
            results = [result for own in reward.score_batch(batch) for result in own]
    except (Exception, SystemExit) as error:
        return [_failure(error)] * sum(len(given.texts) for given in batch)
    return [_answer(result) for result in results]


def _answer(result: Any) -> Score | RewardError:
    if isinstance(result, RewardError):
        return result
    if result is None:
        return RewardError("the reward function returned None", is_failure=False)
    try:
        return as_score(result)
    except (Exception, SystemExit) as error:  # conversion to a number may run user code
        return _failure(error)


def _failure(error: BaseException) -> RewardError:
    return RewardError(f"{one_line(error)}{users_line(error)}", repeats=not _may_pass(error))


def _may_pass(error: BaseException) -> bool:
    """Return True if a failed call may succeed later, once a service or a file is back.

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


def main(reference: str, lifeline_fd: int, task: str = "null", check: str = "") -> None:
    """Answer requests until standard input ends."""
    die_with_parent(lifeline_fd)
    requests, replies = take_standard_streams()

    def send(reply: Any) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    try:
        reward = reward_function(reference, json.loads(task))
        if not check:
            reward.start()
    except ValueError as error:
        send({"error": str(error)})
        return
    send({"ready": True, **_description(reward)})
    for line in requests:
        batch = [Responses(**given) for given in json.loads(line)]
        send([asdict(answer) for answer in answers(reward, *batch)])


def _description(reward: RewardFunction) -> dict[str, Any]:
    """Return those properties of a reward that the parent process needs to know."""
    return {
        "scores_batches": reward.score_batch is not None,
        "scores_groups": reward.scores_groups,
        "columns": sorted(reward.columns),
        "reads": sorted(reward.reads),
        "parts": reward.parts,
        "takes_messages": reward.takes_messages,
        "has_spare": reward.has_spare,
        "may_die_of_responses": reward.may_die_of_responses,
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
