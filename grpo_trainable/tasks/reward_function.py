"""One interface for all rewards, including a user's function in any accepted form.

The names of a function's parameters decide which of these forms it has:

- the form of this package, `f(response, ground_truth)`, which scores one response;
- the form of TRL, `f(completions, **kwargs)`, which scores all responses to a prompt in one call;
- the form of verl, `f(data_source, solution_str, ground_truth, extra_info)`, which scores one
  response.

A trial with several rewards uses the sum of their values.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_trainable.tasks.messages import Prompt
from grpo_trainable.tasks.task import JSONValue, RewardError, Score, as_score

FORMS = (
    "(response, ground_truth), TRL's (completions, **kwargs) with columns of the data by name, and "
    "verl's (data_source, solution_str, ground_truth, extra_info)"
)
VERL = {"data_source", "solution_str", "ground_truth", "extra_info"}
VERL_LIST = "solution_strs"  # parameter of functions for verl's reward manager `batch`
# The first set lists names that the first parameter of this package's form must not have. The
# second set lists names that the second parameter must not have.
NOT_THE_RESPONSE = {
    *("ground_truth", "truth", "gt", "gold", "reference", "target", "expected", "y_true"),
    *("ground_truths", "gts", "references", "targets", "prompt", "question"),
}
NOT_THE_TRUTH = {
    *("response", "completion", "generation", "prediction", "pred", "y_pred"),
    *("responses", "generations", "predictions", "preds", "prompt", "question"),
}
TRL_LISTS = {"prompts", "completions", "completion_ids"}
TRL_LOGS = {"log_extra", "log_metric"}
# TRL passes these columns of the data under other names, or not at all.
TRL_LEAVES_OUT = {"prompt", "completion", "completion_ids"}
GROUND_TRUTH = "ground_truth"  # every prompt has this column


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """Responses to one prompt, with everything that a reward function may use.

    A field with a default may be missing if the function does not read it (see
    `RewardFunction.reads`).
    """

    texts: Sequence[str]
    ground_truth: JSONValue
    token_ids: Sequence[Sequence[int]] = ()
    prompt: Prompt = ""
    # The prompt's row in the data, by column.
    columns: Mapping[str, JSONValue] = field(default_factory=dict)
    label: str | None = None  # in a mix of tasks, the label of the task
    deadline_s: float = math.inf  # `task.reward_deadline_s`, the time limit for each response
    rubrics: Sequence[Sequence[Any]] | None = None  # see `Request`; (description, weight) pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A reward function, independent of its form.

    A reward model is a reward function too.
    """

    # Returns one result per response: a value that `as_score` accepts, or None for no reward.
    score: Callable[[Responses], Sequence[Any]]
    scores_groups: bool = False  # True: one call scores all responses to a prompt
    # Scores the responses to several prompts in one call. None: the function cannot do this.
    score_batch: Callable[[Sequence[Responses]], Sequence[Sequence[Any]]] | None = None
    columns: frozenset[str] = frozenset()  # columns of the data that the function needs
    # Fields of `Responses` that the function reads, besides `texts` and `ground_truth`.
    reads: frozenset[str] = frozenset()
    name: str = ""  # name of this reward's part in a sum of rewards
    # Names of the reward's parts, if they are known in advance: the rewards of a sum, the criteria
    # of a judge, or only the answer.
    parts: tuple[str, ...] = ()
    takes_messages: bool = True  # False: the prompt must be text
    # Prepares the process for the first call. Not called if the reward is only checked.
    start: Callable[[], None] = lambda: None
    # False: a spare process would need too much memory.
    has_spare: bool = True
    # False: no response can kill the process, so a call whose process died is repeated.
    may_die_of_responses: bool = True


def is_reward(value: object) -> bool:
    """Return True if `value` is a function or a list."""
    return callable(value) or isinstance(value, list | tuple)


def as_reward(function: Any) -> RewardFunction:
    """Put a function, or a list of functions, behind the interface of `RewardFunction`.

    Raises:
        ValueError: The parameters fit none of the accepted forms. Or a list contains a value that
            is not a function, or contains two functions with the same name. The message completes a
            sentence that begins with the function's name.
    """
    if isinstance(function, list | tuple):
        return _of_list(function)
    return replace(_of_form(function), name=_name_of(function))


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _of_form(function: Any) -> RewardFunction:
    try:
        takes = _Parameters(inspect.signature(function))
    except (TypeError, ValueError):  # functions written in C may not state their parameters
        return _own(function)
    if "solution_str" in takes.names and takes.required <= VERL:
        return _verl(function, takes)
    fits_own = takes.accept_two()
    if takes.names & TRL_LISTS or (takes.any_name and not fits_own):
        return _trl(function, takes)
    if fits_own and takes.has_only_defaults:
        raise ValueError(
            f"takes {takes}, each with a default value, so it probably makes a reward function; "
            "name a function that it has made"
        )
    if fits_own and takes.misnamed:
        raise ValueError(
            f"takes {takes}, but the first argument is the response and the second one the true "
            "answer; reorder or rename the parameters, or use TRL's form to get prompts"
        )
    if fits_own and VERL_LIST not in takes.names:
        return _own(function)
    raise ValueError(f"takes {takes}; accepted: {FORMS}")


class _Parameters:
    """The parameters of a function."""

    def __init__(self, signature: inspect.Signature) -> None:
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = signature.parameters.values()
        named = [parameter for parameter in parameters if parameter.kind in by_name]
        self.names = {parameter.name for parameter in named}
        self.required = {p.name for p in named if p.default is inspect.Parameter.empty}
        fixed = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        self.has_only_defaults = bool(fixed) and all(
            p.default is not inspect.Parameter.empty for p in fixed
        )
        self.any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        first, second, *_ = [*(p.name for p in parameters if p.kind in positional), "", ""]
        # True: the names contradict the order in which this package passes arguments.
        self.misnamed = first in NOT_THE_RESPONSE or second in NOT_THE_TRUTH
        self._signature = signature

    def accept_two(self) -> bool:
        """Return True if the function can be called with two positional arguments."""
        try:
            self._signature.bind("response", "ground_truth")
        except TypeError:
            return False
        return True

    def choose(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the `given` arguments that the function takes."""
        return {k: v for k, v in given.items() if self.any_name or k in self.names}

    def __str__(self) -> str:
        plain = [p.replace(annotation=p.empty) for p in self._signature.parameters.values()]
        return str(inspect.Signature(plain))


def _own(function: Callable[..., Any]) -> RewardFunction:
    def score(given: Responses) -> list[Any]:
        return [_single(function(text, given.ground_truth)) for text in given.texts]

    return RewardFunction(score=score)


def _verl(function: Callable[..., Any], takes: _Parameters) -> RewardFunction:
    def score(given: Responses) -> list[Any]:
        told = {
            "data_source": given.columns.get("data_source", given.label),
            GROUND_TRUTH: given.ground_truth,
            "extra_info": given.columns.get("extra_info") or {},
        }
        calls = [takes.choose({"solution_str": text, **told}) for text in given.texts]
        return [_of_verl(_single(function(**arguments))) for arguments in calls]

    return RewardFunction(score=score, reads=frozenset({"columns", "label"}))


def _of_verl(result: Any) -> Any:
    """Convert the result of a function of verl's form to a mapping that `as_score` accepts.

    In a dict with `score`, the other numbers become parts of the reward, and `pred` becomes the
    answer.
    """
    if not isinstance(result, Mapping) or "score" not in result:
        return result
    numbers = {k: v for k, v in result.items() if isinstance(v, int | float) and math.isfinite(v)}
    parts = {name: number for name, number in numbers.items() if name != "score"}
    return {"reward": result["score"], "answer": result.get("pred"), "parts": parts}


def _trl(function: Callable[..., Any], takes: _Parameters) -> RewardFunction:
    def score(given: Responses) -> list[Any]:
        texts, chat = given.texts, not isinstance(given.prompt, str)
        columns = {GROUND_TRUTH: given.ground_truth, **given.columns}
        told = {k: [v] * len(texts) for k, v in columns.items() if k not in TRL_LEAVES_OUT}
        told |= {
            "prompts": [given.prompt] * len(texts),
            "completions": [_message(text) for text in texts] if chat else list(texts),
            "completion_ids": [list(ids) for ids in given.token_ids],
            **dict.fromkeys(TRL_LOGS, _ignore),
        }
        return _listed(_value(function(**takes.choose(told))), len(texts))

    return RewardFunction(
        score=score,
        scores_groups=True,
        columns=frozenset(takes.required - TRL_LISTS - TRL_LOGS - {GROUND_TRUTH}),
        parts=("answer",),  # one number per response: the answer reward
        reads=frozenset({"token_ids", "prompt", "columns"}),
    )


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Ignore values that a function logs."""


def _listed(result: Any, count: int) -> list[Any]:
    """Return the result of a function of TRL's form as a list.

    Raises:
        TypeError: The result is not a list.
        ValueError: The list has the wrong length.
    """
    if isinstance(result, str | Mapping) or not hasattr(result, "__len__"):
        kind = type(result).__name__
        raise TypeError(f"returned {kind}; it must return a list of {count} numbers")
    if len(result) != count:
        raise ValueError(f"returned {len(result)} rewards for {count} completions")
    return list(result)


def _single(result: Any) -> Any:
    """Return the result of a function that scores one response.

    Raises:
        TypeError: The function returned nothing.
    """
    value = _value(result)
    if value is None:
        raise TypeError("returned None instead of a number")
    return value


def _value(result: Any) -> Any:
    """Return the result of a call. If the function is asynchronous, wait for the result."""
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def _of_list(functions: Sequence[Any]) -> RewardFunction:
    if not functions or not all(map(callable, functions)):
        raise ValueError("must be a function or a list of functions")
    rewards = []
    for function in functions:
        try:
            rewards.append(as_reward(function))
        except ValueError as error:
            raise ValueError(f"lists {_name_of(function)}, which {error}") from None
    return sum_of(rewards)


def sum_of(rewards: Sequence[RewardFunction]) -> RewardFunction:
    """Combine rewards. The result is the sum of their values, with a part for each reward.

    Raises:
        ValueError: Two rewards have the same name, or two judges write rubrics. The message
            completes a sentence about the list of rewards.
    """
    names = [reward.name for reward in rewards]
    if len(set(names)) < len(names):
        raise ValueError(f"lists two rewards with the same name ({', '.join(names)}); rename one")
    # A prompt has one buffer of rubrics, so only one judge may write rubrics.
    writers = [reward.name for reward in rewards if "rubrics" in reward.reads]
    if len(writers) > 1:
        raise ValueError(f"lists two judges with max_rubrics ({', '.join(writers)}); keep one")

    def score(given: Responses) -> list[Any]:
        columns = [reward.score(given) for reward in rewards]
        return [_sum(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]

    def start() -> None:
        for reward in rewards:
            reward.start()

    return RewardFunction(
        score=score,
        scores_groups=any(reward.scores_groups for reward in rewards),
        columns=frozenset().union(*(reward.columns for reward in rewards)),
        reads=frozenset().union(*(reward.reads for reward in rewards)),
        parts=tuple(names),
        takes_messages=all(reward.takes_messages for reward in rewards),
        start=start,
        has_spare=all(reward.has_spare for reward in rewards),
        may_die_of_responses=any(reward.may_die_of_responses for reward in rewards),
    )


def _sum(results: Mapping[str, Any]) -> Score | RewardError | None:
    """Return the sum of several results, counting None as 0, or None if all results are None.

    If a result is an error, return this error. The sum keeps the calls and rubrics that judges
    report.
    """
    reported = [own for own in results.values() if isinstance(own, Score | RewardError)]
    usage = dict(sum((Counter(own.usage) for own in reported), Counter[str]()))
    for own in reported:
        if isinstance(own, RewardError):
            return replace(own, usage=usage)
    given = {k: as_score(result).reward for k, result in results.items() if result is not None}
    if not given:
        return None
    total = math.fsum(given.values())
    rubrics = (own.rubrics for own in reported if isinstance(own, Score))
    return Score(
        reward=total,
        format_reward=None,
        answer_reward=total,
        parts={**dict.fromkeys(results, 0.0), **given},
        usage=usage,
        rubrics=next((own for own in rubrics if own is not None), None),
    )
