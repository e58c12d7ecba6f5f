"""Synchronous access to a coroutine that asks for one reply after another."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")
Ask: TypeAlias = Callable[[str], Awaitable[str]]  # takes a message and returns the reply

CLOSE_DEADLINE_S = 5.0


class Dialogue(Generic[T]):
    """Runs the coroutine `lead(ask)` in a separate thread.

    The coroutine awaits `ask(message)` to get a reply. In the meantime, the thread keeps the
    coroutine's connections alive. A dialogue that is still open when the process ends is closed.
    """

    def __init__(self, lead: Callable[[Ask], Coroutine[Any, Any, T]]) -> None:
        self._said: queue.Queue[str | None] = queue.Queue()  # None: the coroutine has ended
        self._replies: asyncio.Queue[str] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        self._task = self._waited(self._begin(lead))
        self._close = weakref.finalize(self, _end, self._task, self._loop, thread)

    def listen(self) -> str | None:
        """Return the next message, or None if the coroutine has ended.

        If the coroutine raised an exception, raise that exception.
        """
        text = self._said.get()
        if text is None:
            self.result()
        return text

    def reply(self, text: str) -> str | None:
        """Send a reply and return the next message, as `listen` does."""
        self._loop.call_soon_threadsafe(self._replies.put_nowait, text)
        return self.listen()

    def result(self) -> T:
        """Wait until the coroutine ends, then return its result or raise its exception."""
        return self._waited(_result_of(self._task))

    def close(self) -> None:
        """Cancel the coroutine and end the thread. Call no method afterwards.

        Raises:
            TimeoutError: If the coroutine does not end within 5 s.
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
