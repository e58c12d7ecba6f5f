"""A coroutine that asks for replies, led from outside reply by reply."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")
Ask: TypeAlias = Callable[[str], Awaitable[str]]  # from what is said to the reply


class Dialogue(Generic[T]):
    """Runs `lead(ask)` in a thread of its own, in which connections stay alive while nobody has
    replied yet."""

    def __init__(self, lead: Callable[[Ask], Coroutine[Any, Any, T]]) -> None:
        self._said: queue.Queue[str | None] = queue.Queue()  # None: it has ended
        self._replies: asyncio.Queue[str] = asyncio.Queue()
        self._ended = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._led = asyncio.run_coroutine_threadsafe(self._run(lead), self._loop)

    def listen(self) -> str | None:
        """What is said next; None where it has ended. Whatever it raised is raised."""
        text = self._said.get()
        if text is None:
            self._ended = True
            self._led.result()
        return text

    def reply(self, text: str) -> str | None:
        """What is said after this reply, as `listen`."""
        self._loop.call_soon_threadsafe(self._replies.put_nowait, text)
        return self.listen()

    def result(self) -> T:
        """What the coroutine returned, once it has ended."""
        return self._led.result()

    def close(self) -> None:
        """Ends it, wherever it is, and its thread."""
        self._led.cancel()
        while not self._ended:
            self._ended = self._said.get() is None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _run(self, lead: Callable[[Ask], Coroutine[Any, Any, T]]) -> T:
        try:
            return await lead(self._ask)
        finally:
            self._said.put(None)

    async def _ask(self, text: str) -> str:
        self._said.put(text)
        return await self._replies.get()
