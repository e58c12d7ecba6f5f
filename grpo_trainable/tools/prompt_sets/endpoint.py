"""A model behind an OpenAI-compatible endpoint. The client uses only the standard library."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from grpo_trainable.config import shown
from grpo_trainable.tools.prompt_sets.keyword import Item

TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)  # HTTP statuses of temporary failures
LONGEST_WAIT_S = 60.0
LONGEST_ANSWER = 1 << 20  # bytes


class EndpointError(Exception):
    """The endpoint does not answer, or rejects a request. The message is one line."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Address and model of an endpoint, with the rules for retries.

    Raises:
        ValueError: If `url` is not an http or https address.
    """

    url: str  # up to /v1, without /chat/completions
    model: str
    key: str | None = field(default=None, repr=False)  # sent as a bearer token
    timeout_s: float = 60.0  # time limit for one answer
    retries: int = 5  # further attempts after the first one
    per_minute: float | None = None  # maximum number of requests per minute; None for no limit
    first_wait_s: float = 1.0  # pause before the first retry; doubles with each retry

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(
                f"--endpoint {shown(self.url)}: must be an address such as http://localhost:8000/v1"
            )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Turns redirects into errors, because the key must go only to the given address."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


class EndpointWriter:
    """Sends several requests for prompts in parallel."""

    def __init__(
        self, endpoint: Endpoint, *, temperature: float, max_tokens: int, workers: int
    ) -> None:
        self._endpoint = endpoint
        self._sampling = {"temperature": temperature, "max_tokens": max_tokens}
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="endpoint")
        self._closed = threading.Event()
        self._pace = _Pace(endpoint.per_minute)

    def write(self, items: Sequence[Item], attempt: int) -> list[str]:
        """Return the model's answer to each item, in order.

        Raises:
            EndpointError: If the endpoint rejects a request, or still fails after all retries.
        """
        waiting = [self._pool.submit(self._ask, item) for item in items]
        try:
            return [answer.result() for answer in waiting]
        except BaseException:
            self._closed.set()  # wakes the requests that wait for a retry
            for answer in waiting:
                answer.cancel()
            raise

    def close(self) -> None:
        """Cancel waiting requests and end the threads."""
        self._closed.set()
        self._pool.shutdown(cancel_futures=True)

    def _ask(self, item: Item) -> str:
        message = {"role": "user", "content": item.instruction}
        body = {"model": self._endpoint.model, "messages": [message], **self._sampling}
        wait_s, reason = self._endpoint.first_wait_s, ""
        for left in range(self._endpoint.retries, -1, -1):
            self._pace.wait(self._closed)
            if self._closed.is_set():
                raise EndpointError("not sent: another request failed, so the command is ending")
            try:
                return self._answer(body)
            except _MayPass as failure:
                reason = str(failure)
                if left:
                    # Spread the retries, because many requests may have failed at the same time.
                    spread_s = wait_s * random.uniform(0.5, 1.0)
                    asked_s = spread_s if failure.after_s is None else failure.after_s
                    self._closed.wait(min(LONGEST_WAIT_S, asked_s))
                    wait_s *= 2
        tries = self._endpoint.retries + 1
        raise EndpointError(f"{self._endpoint.url}: {reason} (attempts: {tries})")

    def _answer(self, body: dict[str, Any]) -> str:
        """Send one request and return the text of the answer.

        Raises:
            EndpointError: If the endpoint rejects the request.
            _MayPass: If the failure may be temporary.
        """
        headers = {"Content-Type": "application/json"}
        if self._endpoint.key is not None:
            headers["Authorization"] = f"Bearer {self._endpoint.key}"
        request = urllib.request.Request(
            f"{self._endpoint.url.rstrip('/')}/chat/completions",
            data=json.dumps(body).encode(),
            headers=headers,
        )
        try:
            with _OPENER.open(request, timeout=self._endpoint.timeout_s) as reply:
                content = reply.read(LONGEST_ANSWER)
        except urllib.error.HTTPError as error:
            told = _message(error)
            if error.code in TRY_AGAIN:
                after_s = _seconds(error.headers.get("Retry-After"))
                raise _MayPass(f"status {error.code}{told}", after_s) from None
            raise EndpointError(f"{self._endpoint.url}: status {error.code}{told}") from None
        except TimeoutError:
            raise _MayPass(f"no answer within {self._endpoint.timeout_s:g} s") from None
        except (OSError, HTTPException) as error:  # URLError is an OSError
            reason = getattr(error, "reason", None) or error
            raise _MayPass(" ".join(f"cannot be reached ({reason})".split())) from None
        return _text(content)


class _MayPass(Exception):
    """A temporary failure, after which the request is repeated."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s  # pause that the endpoint asked for


class _Pace:
    """Spaces requests evenly in time."""

    def __init__(self, per_minute: float | None) -> None:
        self._apart_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = time.monotonic()
        self._lock = threading.Lock()

    def wait(self, closed: threading.Event) -> None:
        """Wait until the next request may start, or until `closed` is set."""
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + self._apart_s
        closed.wait(max(0.0, turn - time.monotonic()))


def _text(content: bytes) -> str:
    """Return the text of a chat completion. The text is empty if the model refused.

    Raises:
        _MayPass: If `content` is not a chat completion.
    """
    try:
        message = json.loads(content)["choices"][0]["message"]
        text = "" if message["content"] is None else message["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        start = shown(content[:80].decode(errors="replace"))
        raise _MayPass(f"the answer is not a chat completion: {start}")
    return text


def _message(failure: urllib.error.HTTPError) -> str:
    """Return the endpoint's error message in one line, or an empty string if it cannot be read."""
    try:
        with failure:
            error = json.loads(failure.read(LONGEST_ANSWER))["error"]
        said = error["message"] if isinstance(error, dict) else error
    except (OSError, HTTPException, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return f" ({' '.join(str(said).split())[:200]})"


def _seconds(retry_after: str | None) -> float | None:
    """Return the delay in seconds from a Retry-After header, which gives seconds or a date."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None
