"""Scoring of responses, in this process or, for slow rewards, in processes that can be killed."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Protocol

from grpo_trainable.config import ConfigError, GRPOConfig, TaskSettings, threads
from grpo_trainable.config.resources import sampling_gpus
from grpo_trainable.config.reward_kinds import JUDGE, models_in, rewards_of
from grpo_trainable.generator.worker_process import WorkerProcess
from grpo_trainable.tasks import Example, JSONValue, RewardError, Score, ScoreRequest, Task
from grpo_trainable.tasks.answers import answer_form
from grpo_trainable.tasks.code import unverified_score
from grpo_trainable.tasks.mix import MixTask
from grpo_trainable.tasks.reward_function import GROUND_TRUTH
from grpo_trainable.tasks.task import has_failed
from grpo_trainable.telemetry.progress import advance

logger = logging.getLogger(__name__)

# After this many missing answers in one call of `score`, the remaining responses are not scored.
HANGS_A_CHUNK = 10


class Scorer(Protocol):
    """Computes the rewards of responses."""

    is_inline: bool  # True if scoring takes hardly any time and never hangs

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | RewardError]:
        """Return a score or an error for each request, in order."""
        ...

    def close(self) -> None:
        """Release all processes."""
        ...


class InlineScorer:
    """Scores responses with a built-in function. It never hangs, and fails only if it has a bug."""

    is_inline = True

    def __init__(self, reward_fn: Callable[[str, JSONValue], Score]) -> None:
        self._reward_fn = reward_fn

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | RewardError]:
        """Return the score of each request, in order."""
        return [self._reward_fn(request.response, request.ground_truth) for request in requests]

    def close(self) -> None:
        """Do nothing: there are no processes."""
        pass


class ProcessScorer:
    """Scores responses with a function that may hang, in parallel processes that can be killed.

    `reward` is a value of `task.reward`, such as `path/to/file.py:function`. A module or file is
    looked up in `directory` (None: the current directory) and on this process's `sys.path`.
    `grpo_trainable/tasks/reward_function.py` lists the forms that the function may have. If `task`
    is given, `reward` names a task instead: a built-in task or a user's class. In that case, `task`
    contains the task's `settings` and `seed`, and the function is the task's method `reward`.

    A call scores one response, unless the function scores groups or batches. A function that scores
    groups gets consecutive responses to the same example in one call. A function that scores
    batches gets all responses in one call. Three kinds of failure give all responses of a call a
    `RewardError`: an exception, no answer within `deadline_s` seconds per response, and the death
    of the process. A result that is not a finite number gives only its own response a
    `RewardError`. A call that raises an exception or returns such a result is repeated once, to see
    whether the failure repeats. If the function gives no answer for a response and `unverified` is
    given, the score is the result of `unverified` instead. In this case, the response is at fault,
    not the function. A spare process, already warm, replaces a process that was killed or has died.
    A reward model has no spare, because the spare would need memory for a second model. If the
    process of a reward model dies, a new process starts and repeats the call once.

    After `HANGS_A_CHUNK` missing answers in one call of `score`, the remaining responses are not
    scored, so a trial ends soon if all its rewards hang. Responses that other processes are already
    scoring are still awaited.

    Calls start in order, each in the first process that is free. The choice of the process depends
    on timing, so rewards are reproducible only if the function keeps no state between calls.
    """

    is_inline = False

    def __init__(
        self,
        reward: str,
        *,
        deadline_s: float,
        workers: int = 1,
        directory: str | None = None,
        task: Mapping[str, Any] | None = None,
        unverified: Callable[[str], Score] | None = None,
        weights: Mapping[str, float] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the processes and wait until they are ready.

        Args:
            reward: The function or task, as described above.
            deadline_s: Time limit of a call, in seconds for each of its responses. After that, the
                answer counts as missing.
            workers: Number of processes that score at the same time, not counting the spare.
            directory: The directory for relative paths. None: the current directory.
            task: The task's `settings` and `seed`. None: `reward` names a function.
            unverified: Returns the score of a response for which the function gives no answer.
                None: a missing answer is an error.
            weights: Weights of the parts, if the reward has parts that are known in advance. The
                reward is the weighted sum of the parts. None: the reward is the one that the
                function returns.
            environment: Environment variables to add to those of this process.

        Raises:
            ValueError: The function cannot be imported or has an unsupported form, or `weights`
                names a part that the reward lacks.
        """
        self._start = functools.partial(
            _worker, reward, directory, task, environment=environment or {}
        )
        self._deadline_s = deadline_s
        self._unverified = unverified
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._changing = threading.Lock()  # guards the next two attributes
        # The last process is the spare, unless the reward has no spare.
        self._processes = [self._start() for _ in range(workers)]
        self._closed = False
        self._free: SimpleQueue[WorkerProcess] = SimpleQueue()
        for worker in self._processes:
            ready = worker.wait_until_ready()
            self._scores_groups: bool = ready["scores_groups"]
            self._scores_batches: bool = ready["scores_batches"]
            self._has_spare: bool = ready["has_spare"]
            self._may_die_of_responses: bool = ready["may_die_of_responses"]
            self._reads: list[str] = ready["reads"]
            parts: list[str] = ready["parts"]
            self._free.put(worker)
        try:
            _refuse_other_parts(_named(reward, task), parts, weights or {})
        except ValueError:
            self.close()
            raise
        # A sum of rewards has no reward for the answer alone, so its answer reward is the weighted
        # sum.
        self._weights = (weights or {}) if parts and parts != ["answer"] else {}
        if self._has_spare:
            self._processes.append(self._start())

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | RewardError]:
        """Return a score or an error for each request, in order."""
        hung: list[ScoreRequest] = []

        def score_together(group: Sequence[ScoreRequest]) -> list[Score | RewardError]:
            if len(hung) >= HANGS_A_CHUNK:
                why = f"the reward hung on {len(hung)} other responses of the same chunk"
                return [RewardError(f"not scored: {why}")] * len(group)
            deadline_s = self._deadline_s * len(group)
            try:
                return self._ask(group, deadline_s)
            except TimeoutError:
                hung.extend(group)
                return self._without_answer(group, f"no reward within {deadline_s:g} s")
            except EOFError as death:
                hung.extend(group if self._unverified is not None else [])
                return self._without_answer(group, f"the reward process died ({death})")
            finally:
                for _ in group:
                    advance()

        try:
            scored = self._threads.map(score_together, self._calls(requests))
            return [self._weighted(answer) for answers in scored for answer in answers]
        except BaseException:
            self._stop()
            raise

    def _calls(self, requests: Sequence[ScoreRequest]) -> list[list[ScoreRequest]]:
        """Divide the requests into calls of the reward function."""
        if self._scores_batches:
            return [list(requests)] if requests else []
        if not self._scores_groups:
            return [[request] for request in requests]
        return _groups(requests)

    def close(self) -> None:
        """Kill all processes. Pending requests get no answer."""
        with self._changing:
            self._closed = True
        self._stop()
        self._threads.shutdown()
        for worker in self._processes:
            worker.kill()

    def _stop(self) -> None:
        """Kill every process. Pending requests get no answer."""
        with self._changing:
            for worker in self._processes:
                worker.stop()

    def _weighted(self, answer: Score | RewardError) -> Score | RewardError:
        if isinstance(answer, RewardError) or not self._weights:
            return answer
        total = math.fsum(weight * answer.parts[name] for name, weight in self._weights.items())
        return replace(answer, reward=total, answer_reward=total)

    def _ask(self, group: Sequence[ScoreRequest], deadline_s: float) -> list[Score | RewardError]:
        """Return the answers of a free process. If any of them is a failure, ask once more.

        Raises:
            TimeoutError: The answers did not come in time.
            EOFError: The process died.
        """
        message = [_message(own, self._reads, self._deadline_s) for own in _groups(group)]
        worker = self._free.get()
        try:
            if not worker.is_alive():
                worker = self._replace(worker)
                worker.wait_until_ready()
            try:
                first = _answers(worker.ask(message, deadline_s))
            except EOFError:
                if self._may_die_of_responses or worker.stopped:
                    raise
                worker = self._replace(worker)
                worker.wait_until_ready()
                first = _answers(worker.ask(message, deadline_s))
            if not any(map(has_failed, first)):
                return first
            second = _answers(worker.ask(message, deadline_s))
        finally:
            self._free.put(worker)
        return [_confirmed(a, b) for a, b in zip(first, second, strict=True)]

    def _without_answer(
        self, group: Sequence[ScoreRequest], reason: str
    ) -> list[Score | RewardError]:
        if self._unverified is None or self._closed:
            return [RewardError(reason)] * len(group)
        return [self._unverified(request.response) for request in group]

    def _replace(self, ended: WorkerProcess) -> WorkerProcess:
        """Return the spare process as a replacement for `ended`, and start another spare.

        Without a spare, return a new process.

        Raises:
            EOFError: The scorer is closed.
        """
        with self._changing:
            if self._closed:
                raise EOFError("the scorer was closed while it waited for an answer")
            replacement = "the spare" if self._has_spare else "a new process"
            logger.warning("a reward process has ended; %s takes over", replacement)
            ended.kill()  # closes our ends of the pipes
            self._processes.remove(ended)
            if not self._has_spare:
                self._processes.append(self._start())
                return self._processes[-1]
            worker = self._processes[-1]
            if not worker.is_alive():
                worker.kill()
                worker = self._processes[-1] = self._start()
            self._processes.append(self._start())
        return worker


def _groups(requests: Sequence[ScoreRequest]) -> list[list[ScoreRequest]]:
    """Group consecutive requests for the same example."""
    groups = itertools.groupby(requests, lambda own: (own.label, own.example, own.rubrics))
    return [list(group) for _, group in groups]


def _message(
    group: Sequence[ScoreRequest], reads: Collection[str], deadline_s: float
) -> dict[str, Any]:
    """Return the fields of a `Responses` object for requests that share an example.

    Args:
        group: The requests.
        reads: The fields that the function reads besides the texts and the true answer.
        deadline_s: Time limit for each response.
    """
    first = group[0]
    prompt = first.prompt
    further = {
        "token_ids": [list(request.token_ids) for request in group],
        "prompt": prompt if isinstance(prompt, str) else [dict(message) for message in prompt],
        "columns": dict(first.columns),
        "label": first.label,
        "deadline_s": deadline_s,
        "rubrics": first.rubrics,
    }
    return {
        "texts": [request.response for request in group],
        "ground_truth": first.ground_truth,
        **{name: further[name] for name in reads},
    }


def _answers(replies: Sequence[Mapping[str, Any]]) -> list[Score | RewardError]:
    return [RewardError(**own) if "message" in own else Score(**own) for own in replies]


def _confirmed(first: Score | RewardError, second: Score | RewardError) -> Score | RewardError:
    """Combine two answers to a request. A failure keeps `repeats` only if the answers are equal."""
    usage = dict(Counter(first.usage) + Counter(second.usage))
    if isinstance(first, Score):
        # The rubrics of a group are known only once all its responses are scored.
        rubrics = second.rubrics if isinstance(second, Score) else None
        return replace(first, usage=usage, rubrics=rubrics)
    if not has_failed(first):
        return replace(first, usage=usage)
    if isinstance(second, Score) or second == first:
        return replace(second, usage=usage)
    return replace(second, repeats=False, usage=usage)


class MixScorer:
    """Scores each response with the scorer of its task."""

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        """Combine the scorers of several tasks.

        Args:
            scorers: Label of a task -> its scorer.
        """
        self._scorers = scorers
        self.is_inline = all(scorer.is_inline for scorer in scorers.values())

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | RewardError]:
        """Return a score or an error for each request, in order."""
        answers: dict[int, Score | RewardError] = {}
        for label, scorer in self._scorers.items():
            own = [i for i, request in enumerate(requests) if request.label == label]
            answers |= zip(own, scorer.score([requests[i] for i in own]), strict=True)
        return [answers[i] for i in range(len(requests))]

    def close(self) -> None:
        """Close all scorers."""
        for scorer in self._scorers.values():
            scorer.close()


def make_scorer(config: GRPOConfig, task: Task | MixTask) -> Scorer:
    """Build the scorer of a trial.

    Quick rewards are computed in this process, others in separate processes. In a mix, each task
    has its own scorer. If a response to a built-in task cannot be verified in time, it counts as
    wrong.

    Args:
        config: The trial's settings.
        task: The task, or a mix of tasks.

    Raises:
        ValueError: The reward cannot be loaded. The message is one line.
    """
    if not isinstance(task, MixTask):
        return _scorer_of_one(config, task)
    scorers: dict[str, Scorer] = {}
    try:
        for label, part in config.parts.items():
            scorers[label] = _scorer_of_one(part, task.parts[label])
    except BaseException:
        MixScorer(scorers).close()
        raise
    return MixScorer(scorers)


def _scorer_of_one(config: GRPOConfig, task: Task) -> Scorer:
    """Build the scorer of a single task.

    Raises:
        ValueError: The reward cannot be loaded. The message is one line.
    """
    if not config.task.is_scored_apart:
        return InlineScorer(task.reward)
    reward, made_of = reward_apart(config)
    return ProcessScorer(
        reward,
        deadline_s=config.task.reward_deadline_s,
        workers=config.resources.reward_workers,
        task=made_of,
        unverified=_unverified(config.task),
        weights=config.task.part_weights,
        environment=_share(config),
    )


def _unverified(task: TaskSettings) -> Callable[[str], Score] | None:
    """Return the function that scores a response for which a built-in reward gives no answer.

    The result is None for a user's reward, for which a missing answer is an error.
    """
    if task.has_custom_reward:
        return None
    return unverified_score if task.name == "code" else answer_form(task).unverified


def _share(config: GRPOConfig) -> dict[str, str]:
    """Return the environment variables that limit a reward process to its share of the machine.

    The processes of a generator share `resources.reward_cpus`. Reward models also share the
    generator's GPU, if it has one.
    """
    r = config.resources
    cores = {"OMP_NUM_THREADS": str(threads(r.reward_cpus / r.reward_workers))}
    hides_gpus = models_in(config.task.reward) and not sampling_gpus(config)
    return {**cores, "CUDA_VISIBLE_DEVICES": ""} if hides_gpus else cores


def reward_apart(config: GRPOConfig) -> tuple[str, dict[str, Any] | None]:
    """Return the arguments `reward` and `task` for a trial's `ProcessScorer`."""
    task = config.task
    if task.reward is not None:
        return task.reward, None
    settings = dict(task.own) if task.is_custom else task.to_dict()
    return task.name, {"settings": settings, "seed": config.seed}


def check_reward(
    reward: str,
    task: Mapping[str, Any] | None = None,
    *,
    directory: str | None = None,
    examples: Sequence[Example] = (),
    weighted: Collection[str] = (),
) -> list[str]:
    """Check, before Ray starts, that a `ProcessScorer` can start and suits the data.

    A function is imported in a separate process but is not called. A reward model is checked in
    that process, but its weights are not read. A judge is asked one question.

    Args:
        reward: See `ProcessScorer`.
        task: See `ProcessScorer`.
        directory: See `ProcessScorer`.
        examples: Examples that must have every column that the function needs.
        weighted: The parts of the reward that `task.reward_weights` names.

    Returns:
        Parts of the reward that `weighted` leaves out; none if `weighted` is empty.

    Raises:
        ValueError: The reward cannot be loaded, has an unsupported form or does not suit an
            example, or `weighted` names a part that the reward lacks. The message is one line that
            names the setting.
    """
    worker = _worker(reward, directory, task, environment={}, check=True)
    try:
        ready = worker.wait_until_ready()
    finally:
        worker.kill()
    for example in examples:
        for column in ready["columns"]:
            if column not in example.columns:
                raise ValueError(_lacks(_named(reward, task), column, example))
        if not ready["takes_messages"] and not isinstance(example.prompt, str):
            raise ValueError(
                f"{_named(reward, task)}: a prompt of the task is a list of messages, but the "
                "tokenizer of the reward model has no chat template"
            )
    _refuse_other_parts(_named(reward, task), ready["parts"], weighted)
    if task is None:
        check_judges(reward)
    return [part for part in ready["parts"] if weighted and part not in weighted]


def check_judges(reward: str) -> None:
    """Check that each judge in `task.reward` can answer. Other rewards are not checked.

    Raises:
        ConfigError: A judge cannot be used. The message is one line that names the setting.
    """
    for one in rewards_of(reward):
        if one.kind == JUDGE:
            # Other rewards need no HTTP client.
            from grpo_trainable.tasks.judge.reward import check_judge

            try:
                check_judge(one.source)
            except ConfigError as error:
                raise ConfigError(f"{_named(one.text, None)}: {error}") from None


def _refuse_other_parts(named: str, parts: Sequence[str], weighted: Collection[str]) -> None:
    """Check that the weights name only parts that the reward has.

    Args:
        named: The setting that names the reward.
        parts: Names of the reward's parts. Empty: the function's return value determines the parts.
        weighted: The parts of the reward that `task.reward_weights` names.

    Raises:
        ConfigError: A weight names something that is not a part of the reward.
    """
    unknown = set(weighted) - set(parts)
    if parts and unknown:
        raise ConfigError(
            f"task.reward_weights: names {min(unknown)}, but {named} has the parts "
            f"{', '.join(parts)}"
        )


def _lacks(named: str, column: str, example: Example) -> str:
    columns = sorted({GROUND_TRUTH, *example.columns})
    return (
        f"{named}: needs the column {column}, which the prompts lack; they have the columns "
        f"{', '.join(columns)}"
    )


def _named(reward: str, task: Mapping[str, Any] | None) -> str:
    return f"task.{'reward' if task is None else 'name'}={reward}"


def _worker(
    reward: str,
    directory: str | None,
    task: Mapping[str, Any] | None,
    *,
    environment: Mapping[str, str],
    check: bool = False,
) -> WorkerProcess:
    """Start a process that computes rewards, or one that only checks them."""
    arguments = [reward, json.dumps(task), *(["check"] if check else [])]
    module = "grpo_trainable.generator.score_worker"
    return WorkerProcess(_named(reward, task), module, arguments, directory, environment)
