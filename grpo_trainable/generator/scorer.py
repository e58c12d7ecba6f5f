"""Scoring of responses, in this process or, for slow rewards, in processes that can be killed."""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Protocol

from grpo_trainable.config import GRPOConfig
from grpo_trainable.generator.worker_process import WorkerProcess
from grpo_trainable.tasks import JSONValue, RewardError, Score, ScoreRequest, Task
from grpo_trainable.tasks.answers import answer_form
from grpo_trainable.tasks.mix import MixTask
from grpo_trainable.telemetry.progress import advance

logger = logging.getLogger(__name__)

HANGS_A_CHUNK = 10  # number of missing answers after which the rest of a chunk is not scored


class Scorer(Protocol):
    """Computes the rewards of responses."""

    is_inline: bool  # True if scoring takes hardly any time and never hangs

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | RewardError]:
        """Return one answer for each request, in order."""
        ...

    def close(self) -> None:
        """Release all processes."""
        ...


class InlineScorer:
    """Scores with a built-in function that never hangs and, unless it has a bug, never raises."""

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
    """Scores with a function that may hang, in `workers` parallel processes that can be killed.

    `reward` is `module:function` or `path/to/file.py:function`. The module or file is looked up in
    `directory` (None: the current one) and on this process's `sys.path`. The function is
    `f(response, ground_truth)`. It returns a number, or a dict with `reward` and optionally
    `format_reward` and `answer_reward`. If `task` is given, `reward` names a task instead: a
    built-in one or a user's class. In that case, `task` contains the task's `settings` and `seed`,
    and the function is the task's method `reward`.

    Each of these failures gives the response a `RewardError`: an exception, a value that is not a
    finite number, no answer within `deadline_s`, or the death of the process. If no answer comes
    and `unverified` is given, the response gets the result of `unverified` as its score instead,
    because the response is at fault, not the function. A spare process, already warm, replaces a
    process that was killed or died.

    After `HANGS_A_CHUNK` missing answers in one call of `score`, the remaining responses are not
    scored, so a trial ends soon if all its rewards hang. Responses that other processes are already
    scoring are still awaited.

    Requests start in order, each in the first process that is free. The choice of the process
    depends on timing, so rewards are reproducible only if the function keeps no state between
    calls.
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
    ) -> None:
        """Start the processes and wait until they are ready.

        Args:
            reward: The function or task, as described above.
            deadline_s: Seconds after which an answer counts as missing.
            workers: Number of processes that score at the same time, not counting the spare.
            directory: The directory for relative paths; None: the current one.
            task: The task's `settings` and `seed`. None: `reward` names a function.
            unverified: Returns the score of a response without an answer. None: a missing answer is
                an error.

        Raises:
            ValueError: The function cannot be imported.
        """
        self._start = functools.partial(_worker, reward, directory, task)
        self._deadline_s = deadline_s
        self._unverified = unverified
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._changing = threading.Lock()  # guards the next two attributes
        self._processes = [self._start() for _ in range(workers)]  # the last one is the spare
        self._closed = False
        self._free: SimpleQueue[WorkerProcess] = SimpleQueue()
        for worker in self._processes:
            worker.wait_until_ready()
            self._free.put(worker)
        self._processes.append(self._start())

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | RewardError]:
        """Return one answer for each request, in order."""
        hung: list[ScoreRequest] = []

        def score_one(request: ScoreRequest) -> Score | RewardError:
            if len(hung) >= HANGS_A_CHUNK:
                return RewardError(
                    f"not scored: the reward hung on {len(hung)} other responses of the same chunk"
                )
            try:
                return self._ask(request)
            except TimeoutError:
                hung.append(request)
                return self._without_answer(request, f"no reward within {self._deadline_s:g} s")
            except EOFError as death:
                hung.extend([request] * (self._unverified is not None))
                return self._without_answer(request, f"the reward process died, {death}")
            finally:
                advance()

        try:
            return list(self._threads.map(score_one, requests))
        except BaseException:
            self._stop()
            raise

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

    def _ask(self, request: ScoreRequest) -> Score | RewardError:
        """Return the answer of a free process.

        Raises:
            TimeoutError: The answer did not come in time.
            EOFError: The process died.
        """
        message = {"response": request.response, "ground_truth": request.ground_truth}
        worker = self._free.get()
        try:
            if not worker.is_alive():
                worker = self._spare_for(worker)
                worker.wait_until_ready()
            reply = worker.ask(message, self._deadline_s)
        finally:
            self._free.put(worker)
        return RewardError(reply["error"]) if "error" in reply else Score(**reply)

    def _without_answer(self, request: ScoreRequest, reason: str) -> Score | RewardError:
        if self._unverified is None or self._closed:
            return RewardError(reason)
        return self._unverified(request.response)

    def _spare_for(self, ended: WorkerProcess) -> WorkerProcess:
        """Return the spare in place of a process that has ended, and start another spare.

        Raises:
            EOFError: The scorer is closed.
        """
        with self._changing:
            if self._closed:
                raise EOFError("the scorer was closed while it waited for an answer")
            logger.warning("a reward process has ended; the spare takes over")
            ended.kill()  # closes this process's ends of the pipes
            self._processes.remove(ended)
            worker = self._processes[-1]
            if not worker.is_alive():
                worker.kill()
                worker = self._processes[-1] = self._start()
            self._processes.append(self._start())
        return worker


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
        """Return one answer for each request, in order."""
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
    own = config.task.has_custom_reward
    return ProcessScorer(
        reward,
        deadline_s=config.task.reward_deadline_s,
        workers=config.resources.reward_workers,
        task=made_of,
        unverified=None if own else answer_form(config.task).unverified,
    )


def reward_apart(config: GRPOConfig) -> tuple[str, dict[str, Any] | None]:
    """Return the arguments `reward` and `task` of a trial's `ProcessScorer`."""
    task = config.task
    if task.reward is not None:
        return task.reward, None
    settings = dict(task.own) if task.is_custom else task.to_dict()
    return task.name, {"settings": settings, "seed": config.seed}


def check_reward(
    reward: str, task: Mapping[str, Any] | None = None, *, directory: str | None = None
) -> None:
    """Check, before Ray starts, that a `ProcessScorer` can start.

    This imports the function in a separate process but does not call it.

    Raises:
        ValueError: The function cannot be imported. The message names `reward` and the reason.
    """
    worker = _worker(reward, directory, task)
    try:
        worker.wait_until_ready()
    finally:
        worker.kill()


def _worker(reward: str, directory: str | None, task: Mapping[str, Any] | None) -> WorkerProcess:
    """Start a process that computes rewards."""
    name = f"task.{'reward' if task is None else 'name'}={reward}"
    made_of = [] if task is None else [json.dumps(task)]
    module = "grpo_trainable.generator.score_worker"
    return WorkerProcess(name, module, [reward, *made_of], directory)
