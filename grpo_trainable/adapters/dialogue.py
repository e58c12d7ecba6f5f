"""A coroutine that asks for replies, led from outside reply by reply."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")
Ask: TypeAlias = Callable[[str], Awaitable[str]]  # from what is said to the reply

CLOSE_DEADLINE_S = 5.0


class Dialogue(Generic[T]):
    """Runs `lead(ask)` in a thread of its own, in which connections stay alive while nobody has
    replied yet. It is closed when the process ends, if it is not before."""

    def __init__(self, lead: Callable[[Ask], Coroutine[Any, Any, T]]) -> None:
        self._said: queue.Queue[str | None] = queue.Queue()  # None: it has ended
        self._replies: asyncio.Queue[str] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        self._task = self._waited(self._begin(lead))
        self._close = weakref.finalize(self, _end, self._task, self._loop, thread)

    def listen(self) -> str | None:
        """What is said next; None where it has ended. Whatever it raised is raised."""
        text = self._said.get()
        if text is None:
            self.result()
        return text

    def reply(self, text: str) -> str | None:
        """What is said after this reply, as `listen`."""
        self._loop.call_soon_threadsafe(self._replies.put_nowait, text)
        return self.listen()

    def result(self) -> T:
        """What the coroutine returned, or raised."""
        return self._waited(_result_of(self._task))

    def close(self) -> None:
        """Ends it, wherever it is, and its thread; no call follows.

        Raises:
            TimeoutError: it does not let itself be ended.
        """
        self._close()

    def _waited(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begin(self, lead: Callable[[Ask], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        return asyncio.create_task(self._run(lead))

    async def _run(self, lead: Callable[[Ask], Coroutine[Any, Any, T]]) -> T:
        try:
            return await lead(self._ask)
        finally:
            self._said.put(None)

    async def _ask(self, text: str) -> str:
        self._said.put(text)
        return await self._replies.get()


async def _result_of(task: asyncio.Task[T]) -> T:
    return await task


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})


def _end(
    task: asyncio.Task[Any], loop: asyncio.AbstractEventLoop, thread: threading.Thread
) -> None:
    asyncio.run_coroutine_threadsafe(_cancelled(task), loop).result(CLOSE_DEADLINE_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
