"""Responses in, scores out: in this process, or in killable ones for what may take long."""

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

HANGS_A_CHUNK = 10  # answers that may fail to come before the rest of a chunk is not asked for


class Scorer(Protocol):
    is_inline: bool  # it takes no time of its own, and never hangs

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | RewardError]:
        """One answer per request, in order."""
        ...

    def close(self) -> None: ...


class InlineScorer:
    """Scores with a function of ours that never hangs and whose exceptions are our bugs."""

    is_inline = True

    def __init__(self, reward_fn: Callable[[str, JSONValue], Score]) -> None:
        self._reward_fn = reward_fn

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | RewardError]:
        return [self._reward_fn(request.response, request.ground_truth) for request in requests]

    def close(self) -> None:
        pass


class ProcessScorer:
    """Scores with a function that may hang, in `workers` processes side by side that can be killed.

    `reward` is `module:function` or `path/to/file.py:function`, looked up from `directory` (None:
    the current one) and on this process's `sys.path`. The function is `f(response, ground_truth)`
    and returns a number, or a dict with `reward` and optionally `format_reward` and
    `answer_reward`. With `task`, its `settings` and `seed`, `reward` names a task instead, built-in
    or a class of the user's, whose method of that name is the function.

    Whatever goes wrong with a response (an exception, a value that is no finite number, no answer
    within `deadline_s`, the death of the process) becomes its `RewardError`. Where no answer comes
    and `unverified` is given, that says instead what the response is worth, which is then at fault
    and not the function. A spare process, already warm, takes over from one that was killed or
    died. After `HANGS_A_CHUNK` answers of one `score` that did not come, the rest is not asked for,
    so that rewards which all hang end the trial soon; what other processes are at by then is still
    awaited. ValueError when the function cannot be imported.

    Requests are begun in order, each by the process that is free first. Which one that is depends
    on timing, so only a function that keeps nothing from call to call gives the same rewards again.
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
        self._start = functools.partial(_worker, reward, directory, task)
        self._deadline_s = deadline_s
        self._unverified = unverified
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._changing = threading.Lock()  # guards the two that follow
        self._processes = [self._start() for _ in range(workers)]  # the spare last
        self._closed = False
        self._free: SimpleQueue[WorkerProcess] = SimpleQueue()
        for worker in self._processes:
            worker.wait_until_ready()
            self._free.put(worker)
        self._processes.append(self._start())

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | RewardError]:
        hung: list[ScoreRequest] = []

        def score_one(request: ScoreRequest) -> Score | RewardError:
            if len(hung) >= HANGS_A_CHUNK:
                return RewardError(f"not asked for: {len(hung)} others of its chunk hung")
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
        with self._changing:
            self._closed = True
        self._stop()
        self._threads.shutdown()
        for worker in self._processes:
            worker.kill()

    def _stop(self) -> None:
        """Ends every process; who waits for an answer gets none."""
        with self._changing:
            for worker in self._processes:
                worker.stop()

    def _ask(self, request: ScoreRequest) -> Score | RewardError:
        """TimeoutError when no answer comes in time, EOFError when the process dies."""
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
        """The spare, which gets another behind it. EOFError once the scorer is closed."""
        with self._changing:
            if self._closed:
                raise EOFError("the scorer was closed while it waited for an answer")
            logger.warning("a reward process has ended; the spare takes over")
            ended.kill()  # closes our ends of its pipes
            self._processes.remove(ended)
            worker = self._processes[-1]
            if not worker.is_alive():
                worker.kill()
                worker = self._processes[-1] = self._start()
            self._processes.append(self._start())
        return worker


class MixScorer:
    """Scores each response as the task that it is of would be scored alone."""

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        """`scorers`: by the label of their task."""
        self._scorers = scorers
        self.is_inline = all(scorer.is_inline for scorer in scorers.values())

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | RewardError]:
        answers: dict[int, Score | RewardError] = {}
        for label, scorer in self._scorers.items():
            own = [i for i, request in enumerate(requests) if request.label == label]
            answers |= zip(own, scorer.score([requests[i] for i in own]), strict=True)
        return [answers[i] for i in range(len(requests))]

    def close(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()


def make_scorer(config: GRPOConfig, task: Task | MixTask) -> Scorer:
    """The scorer of a trial: in this process where scoring is quick, else in processes of its own;
    of a mix, both for those tasks that need it.

    An answer to a built-in task that cannot be verified in time is a wrong answer.

    Raises:
        ValueError: the reward cannot be had, in one line.
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
    """The scorer of a trial with one task.

    Raises:
        ValueError: the reward cannot be had, in one line.
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
    """What a `ProcessScorer` of a trial is told as `reward` and `task`."""
    task = config.task
    if task.reward is not None:
        return task.reward, None
    settings = dict(task.own) if task.is_custom else task.to_dict()
    return task.name, {"settings": settings, "seed": config.seed}


def check_reward(
    reward: str, task: Mapping[str, Any] | None = None, *, directory: str | None = None
) -> None:
    """ValueError naming `reward` and the reason when `ProcessScorer` could not start on it.

    Imports it in a process of its own and asks nothing of it, so that it can run before Ray does.
    """
    worker = _worker(reward, directory, task)
    try:
        worker.wait_until_ready()
    finally:
        worker.kill()


def _worker(reward: str, directory: str | None, task: Mapping[str, Any] | None) -> WorkerProcess:
    """A process that scores."""
    name = f"task.{'reward' if task is None else 'name'}={reward}"
    made_of = [] if task is None else [json.dumps(task)]
    module = "grpo_trainable.generator.score_worker"
    return WorkerProcess(name, module, [reward, *made_of], directory)
