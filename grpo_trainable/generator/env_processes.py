"""Environments in processes that can be killed: each process plays the episodes of one group."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from grpo_trainable.config import EnvSettings, shown
from grpo_trainable.environments import ENVIRONMENTS, UNSAFE_PYTHON, JSONValue, Turn
from grpo_trainable.environments.sandbox import INSTALL, SandboxError, check_containment
from grpo_trainable.generator.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 5.0


class EpisodeError(Exception):
    """An environment failed during an episode. The message is one line."""


class GroupProcess:
    """The process that plays a group's episodes, and the thread that talks to it.

    Submitted jobs run one after the other.
    """

    def __init__(self, settings: EnvSettings) -> None:
        self._settings = settings
        self._process: WorkerProcess | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="environment")

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run a job after all earlier ones.

        The job may call the methods of this group's `Episode` objects.
        """
        return self._thread.submit(job)

    def start(self) -> None:
        """Start the process unless it is already running.

        Raises:
            ValueError: The environment cannot be loaded. The message is one line.
        """
        if self._process is not None and self._process.is_alive():
            return
        if self._process is not None:
            self._process.kill()
        self._process = start_environment(self._settings)

    def ask(self, message: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send a message to the process, and return its reply.

        Raises:
            TimeoutError: The reply did not come in time. The process was killed.
            EpisodeError: The process has ended, or the environment failed.
        """
        if self._process is None or not self._process.is_alive():
            raise EpisodeError("the process of this group has ended")
        try:
            reply = self._process.ask(message, deadline_s)
        except EOFError as death:
            raise EpisodeError(f"its process died ({death})") from None
        except ValueError:
            raise EpisodeError("its process answered with something other than JSON") from None
        if "error" in reply:
            raise EpisodeError(reply["error"])
        return reply

    def started(self) -> list[int]:
        """Return the ids of running processes that the environments have started."""
        return [] if self._process is None else self._process.started()

    def close(self) -> None:
        """Ask the environments to close, then kill the process and all its subprocesses."""
        closing = self._thread.submit(self._say_goodbye)
        wait([closing], CLOSE_DEADLINE_S)
        if self._process is not None and not closing.done():
            self._process.stop()  # a pending `ask` then fails
        self._thread.shutdown(cancel_futures=True)
        if self._process is not None:
            self._process.kill()

    def _say_goodbye(self) -> None:
        with contextlib.suppress(EpisodeError, TimeoutError):  # the process is killed in any case
            self.ask({"close": True}, CLOSE_DEADLINE_S)


class Episode:
    """One episode, played by the process of its group.

    Call the methods in the thread of the `GroupProcess`. `place` identifies the episode within its
    group.
    """

    def __init__(self, process: GroupProcess, place: int, settings: EnvSettings) -> None:
        self._process, self._place, self._settings = process, place, settings
        self._left_s = settings.episode_deadline_s

    def begin(self, spec: JSONValue, prompt: str) -> None:
        """Begin an episode.

        Args:
            spec: The description of the episode. The environment receives it.
            prompt: The text that the episode must begin with.

        Raises:
            EpisodeError: The environment fails, or begins with a different text.
        """
        said = self._ask({"reset": self._place, "spec": spec})["text"]
        if said != prompt:
            raise EpisodeError(
                f"reset returned {shown(said)}, but the task's prompt is {shown(prompt)}"
            )

    def step(self, action: str) -> Turn:
        """Play an action, and return the environment's answer.

        Raises:
            EpisodeError: The environment fails.
        """
        return Turn(**self._ask({"step": self._place, "action": action}))

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        of_step, of_episode = self._settings.step_deadline_s, self._settings.episode_deadline_s
        start = time.monotonic()
        try:
            return self._process.ask(message, min(of_step, max(self._left_s, 0.0)))
        except TimeoutError:
            if self._left_s < of_step:
                raise EpisodeError(f"took more than {of_episode:g} s in total") from None
            raise EpisodeError(f"no answer within {of_step:g} s") from None
        finally:
            self._left_s -= time.monotonic() - start


def start_environment(settings: EnvSettings) -> WorkerProcess:
    """Start a process for the environment that `env.name` names, and wait until it is ready.

    Raises:
        ValueError: The environment cannot be loaded. The message is one line.
    """
    worker = WorkerProcess(
        f"env.name={settings.name}", "grpo_trainable.generator.env_worker", [_reference(settings)]
    )
    worker.wait_until_ready()
    return worker


def _reference(settings: EnvSettings) -> str:
    """Return a reference to the environment's class, such as `module:Class`.

    Raises:
        ValueError: The environment runs code that the policy writes, and this machine cannot
            sandbox the code.
    """
    if settings.allow_unsafe:
        _warn_of_unsafe_code()
        return UNSAFE_PYTHON
    if settings.name == "python":
        try:
            check_containment()
        except SandboxError as error:
            raise ValueError(
                f"env.name=python: cannot sandbox the code that the policy writes: {error}; "
                f"{INSTALL}, or set env.allow_unsafe=true to run the code with all your rights"
            ) from None
    return ENVIRONMENTS.get(settings.name, settings.name)


@functools.cache
def _warn_of_unsafe_code() -> None:
    """Warn once in each process."""
    logger.warning(
        "env.allow_unsafe=true: code that the policy writes can read, change and delete your files "
        "and end your processes"
    )


def check_environment(settings: EnvSettings, spec: JSONValue, prompt: str) -> None:
    """Check, before Ray starts, that the environment can begin an episode in a separate process.

    Raises:
        ValueError: The environment cannot be loaded. The message is one line.
        EpisodeError: The environment fails, or begins the episode with a text other than `prompt`.
    """
    process = GroupProcess(settings)
    try:
        process.start()
        Episode(process, 0, settings).begin(spec, prompt)
    finally:
        process.close()
