"""Responses in, scores out: in this process, or in killable ones for what may take long."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import IO, Any, Protocol

from grpo_trainable.actors.progress import advance
from grpo_trainable.config import GRPOConfig
from grpo_trainable.tasks import JSONValue, RewardError, Score, ScoreRequest, Task
from grpo_trainable.tasks.answers import answer_form
from grpo_trainable.tasks.mix import MixTask

logger = logging.getLogger(__name__)

HANGS_A_CHUNK = 10  # answers that may fail to come before the rest of a chunk is not asked for
WAIT_S = 0.5  # for a process, until the wait is told as progress
START_DEADLINE_S = 120.0  # a user's module may import torch on a busy machine


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
        self._start = functools.partial(_Worker, reward, directory, task)
        self._deadline_s = deadline_s
        self._unverified = unverified
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._changing = threading.Lock()  # of the two that follow
        self._processes = [self._start() for _ in range(workers)]  # the spare last
        self._closed = False
        self._free: SimpleQueue[_Worker] = SimpleQueue()
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

    def _spare_for(self, ended: _Worker) -> _Worker:
        """The spare, which gets another behind it. EOFError once the scorer is closed."""
        with self._changing:
            if self._closed:
                raise EOFError("as the scorer was closed")
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
    worker = _Worker(reward, directory, task)
    try:
        worker.wait_until_ready()
    finally:
        worker.kill()


class _Worker:
    """One `score_worker` process and the conversation with it."""

    def __init__(self, reward: str, directory: str | None, task: Mapping[str, Any] | None) -> None:
        self._name = f"task.{'reward' if task is None else 'name'}={reward}"
        program = [sys.executable, "-m", "grpo_trainable.actors.score_worker", reward]
        # The worker ends when our end of this pipe closes, even if we are killed.
        lifeline, our_end = os.pipe()
        self._lifeline = os.fdopen(our_end, "wb", buffering=0)
        try:
            self._process = subprocess.Popen(
                [*program, str(lifeline), *([] if task is None else [json.dumps(task)])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                cwd=directory,
                # A Ray worker has the driver's sys.path, but its children do not inherit that.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[lifeline],
                # Its own group, so that kill() takes the user's subprocesses too and Ctrl-C, which
                # is ours to handle, does not reach it.
                start_new_session=True,
            )
        finally:
            os.close(lifeline)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._unread = b""
        self._killed = self._stopped = False

    def wait_until_ready(self) -> None:
        """ValueError naming the reward when it cannot be had."""
        try:
            reply = self._converse(b"", START_DEADLINE_S)
        except TimeoutError:
            reason = f"not imported within {START_DEADLINE_S:g} s"
        except EOFError as death:
            reason = f"its import ended the process, {death}"
        else:
            if "error" not in reply:
                return
            self.kill()
            raise ValueError(reply["error"])
        raise ValueError(f"{self._name}: {reason}")

    def ask(self, message: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """The reply; when none comes TimeoutError, or EOFError saying how the process died."""
        return self._converse(json.dumps(message).encode() + b"\n", deadline_s)

    def is_alive(self) -> bool:
        """Whether it may be asked; one that was told to end need not have ended yet."""
        return not self._stopped and self._process.poll() is None

    def stop(self) -> None:
        """End it from another thread than the one that talks to it, which is told so by EOFError
        and has yet to `kill` it."""
        self._stopped = True
        if self._process.poll() is None:
            self._signal_group()

    def kill(self) -> None:
        """End it and the processes it started; it is gone on return. Again is harmless."""
        if not self._killed:
            self._killed = True
            self._signal_group()
            self._process.wait()
        for pipe in (self._stdin, self._stdout, self._lifeline):
            pipe.close()

    def _signal_group(self) -> None:
        # It leads its group, whose number nobody else gets while one of its processes is left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _converse(self, data: bytes, deadline_s: float) -> dict[str, Any]:
        """Send `data`, return the next reply."""
        deadline = time.monotonic() + deadline_s
        try:
            self._send(data, deadline)
            return self._receive(deadline)
        except BaseException:
            # Whatever interrupted us: a late reply must not become the next response's.
            self.kill()
            raise

    def _send(self, data: bytes, deadline: float) -> None:
        while data:
            self._wait(self._stdin, select.POLLOUT, deadline)
            try:
                data = data[os.write(self._stdin.fileno(), data) :]
            except BrokenPipeError:
                raise EOFError(self._cause_of_death()) from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._unread:
            self._wait(self._stdout, select.POLLIN, deadline)
            chunk = os.read(self._stdout.fileno(), 65536)
            if not chunk:
                raise EOFError(self._cause_of_death())
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _cause_of_death(self) -> str:
        # Its pipes close a moment before its status is there; killed now, it would say SIGKILL.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        self.kill()
        status = self._process.returncode
        return f"exit status {status}" if status >= 0 else f"signal {signal.strsignal(-status)}"

    def _wait(self, pipe: IO[bytes], event: int, deadline: float) -> None:
        """Until `pipe` is ready or closed at the other end; TimeoutError at the deadline. A wait
        that ends by itself is progress: whoever is in one does not hang."""
        poller = select.poll()  # select.select() refuses file descriptors above 1023
        poller.register(pipe, event)
        while not poller.poll(min(WAIT_S, max(0.0, deadline - time.monotonic())) * 1000):
            if time.monotonic() >= deadline:
                raise TimeoutError
            advance()
