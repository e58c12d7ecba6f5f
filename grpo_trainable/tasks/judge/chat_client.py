"""Call an OpenAI-compatible endpoint, with retries and time limits, and count tokens.

The API key is sent only in the header `Authorization`. Error messages never contain the key,
even if the endpoint repeats it.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import requests
from requests.adapters import HTTPAdapter

from grpo_trainable.tasks.judge.judge_file import JudgeSettings

# Seconds before the first retry. Each further wait is twice as long, up to the maximum. A random
# factor between 0.5 and 1 keeps many clients from retrying at the same moment.
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 20.0
MAX_BYTES = 4 << 20  # maximum length of an answer
SHOWN = 120  # maximum length of an answer in an error message


class NoAnswer(Exception):
    """The endpoint gave no usable answer. The message is one line."""

    def __init__(self, reason: str, *, repeats: bool, answered: bool = True) -> None:
        """Describe the failure.

        Args:
            reason: The reason, in one line.
            repeats: True if the same call would fail again, for example because of a wrong key.
            answered: False if the endpoint is down or did not answer in time.
        """
        super().__init__(reason)
        self.repeats = repeats
        self.answered = answered


class _Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class _Passing(Exception):
    """A failure that may be temporary, with the wait in seconds that the endpoint asks for."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class ChatClient:
    """Asks a model one question at a time. Several threads may share a client."""

    def __init__(self, settings: JudgeSettings, key: str | None) -> None:
        """Create a client.

        Args:
            settings: The endpoint, the model, and the limits of a call.
            key: The API key, or None if the endpoint needs none.
        """
        self._settings = settings
        self._url = settings.endpoint.rstrip("/") + "/chat/completions"
        self._key = key
        self._session = requests.Session()
        # An explicit `auth` keeps `requests` from sending a password from the file ~/.netrc.
        self._session.auth = self._authorize
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=settings.concurrency))

    def ask(self, system: str, user: str, usage: Counter[str], until: float) -> str:
        """Return the answer to a question.

        Args:
            system: The instructions.
            user: The question.
            usage: Counts of calls, retries and tokens. This call adds its own counts.
            until: Deadline of the call (`time.monotonic`).

        Raises:
            NoAnswer: There is no answer after all retries, or before `until`.
        """
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        body = {
            "model": self._settings.model,
            "messages": messages,
            **json.loads(self._settings.parameters),
        }
        attempt = 0
        while True:
            try:
                return self._content(self._post(body, usage, until), usage)
            except _Passing as failure:
                reason, wait_s = str(failure), max(failure.wait_s, _backoff_s(attempt))
            if attempt == self._settings.retries or time.monotonic() + wait_s >= until:
                calls = "1 call" if attempt == 0 else f"{attempt + 1} calls"
                raise NoAnswer(f"no answer after {calls}: {reason}", repeats=False, answered=False)
            time.sleep(wait_s)
            attempt += 1
            usage["retries"] += 1

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._key is not None:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def _post(self, body: Mapping[str, Any], usage: Counter[str], until: float) -> _Reply:
        """Send a request once.

        Raises:
            _Passing: The endpoint cannot be reached or does not answer in time.
            NoAnswer: The time `until` has passed.
        """
        limit_s = min(self._settings.timeout_s, until - time.monotonic())
        if limit_s <= 0:
            raise NoAnswer("no time was left for the call", repeats=False, answered=False)
        usage["calls"] += 1
        end = time.monotonic() + limit_s
        try:
            # A redirect could send the responses elsewhere, so it counts as a refusal.
            with self._session.post(
                self._url, json=body, timeout=limit_s, stream=True, allow_redirects=False
            ) as response:
                return _Reply(response.status_code, response.headers, _read(response, end))
        except (requests.Timeout, TimeoutError):
            raise _Passing(f"no complete answer within {limit_s:.3g} s") from None
        except requests.RequestException as error:
            raise _Passing(_reason(error)) from None

    def _content(self, reply: _Reply, usage: Counter[str]) -> str:
        """Return the text of a chat completion.

        Raises:
            _Passing: The endpoint is busy or down.
            NoAnswer: The endpoint refuses the request, or does not answer with a chat completion.
        """
        said = f"HTTP {reply.status}: {self._shown(reply.body)}".rstrip(": ")
        if reply.status in (408, 409, 425, 429) or reply.status >= 500:
            raise _Passing(said, _retry_after_s(reply.headers))
        if reply.status != 200:
            raise NoAnswer(said, repeats=True)
        try:
            answer = json.loads(reply.body)
            content = answer["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            content = answer = None
        counted = answer.get("usage") if isinstance(answer, dict) else None
        for name in ("prompt_tokens", "completion_tokens"):
            tokens = counted.get(name) if isinstance(counted, dict) else None
            usage[name] += tokens if type(tokens) is int and tokens > 0 else 0
        if not isinstance(content, str):
            raise NoAnswer(f"no chat completion: {self._shown(reply.body)}", repeats=True)
        return content

    def _shown(self, body: bytes) -> str:
        return self.without_key(body[:MAX_BYTES].decode("utf-8", "replace"))

    def without_key(self, text: str) -> str:
        """Return the start of a text as one line of valid UTF-8, without the API key."""
        hidden = text if self._key is None else text.replace(self._key, "***")
        line = " ".join(encodable(hidden).split())
        return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


def encodable(text: str) -> str:
    """Replace lone surrogates, which JSON can express but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def _read(response: requests.Response, end: float) -> bytes:
    """Return the body of a response.

    The time limit of `requests` applies to each wait for bytes, not to the whole answer.

    Raises:
        TimeoutError: The body is not complete at the time `end`.
        requests.RequestException: The connection broke, or the body is too long.
    """
    body = b""
    for part in response.iter_content(65536):
        body += part
        if len(body) > MAX_BYTES:
            raise requests.RequestException(f"the answer is longer than {MAX_BYTES >> 20} MiB")
        if time.monotonic() > end:
            raise TimeoutError
    return body


def _reason(error: requests.RequestException) -> str:
    """Return the operating system's reason, or the type of the error if there is none.

    The full message of an exception of `requests` is long and contains memory addresses.
    """
    one: BaseException | None = error
    while one is not None:
        if isinstance(one, OSError) and one.strerror:
            return one.strerror
        one = one.__cause__ or one.__context__
    return str(error) if type(error) is requests.RequestException else type(error).__name__


def _backoff_s(attempt: int) -> float:
    return min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S) * random.uniform(0.5, 1.0)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that the header `Retry-After` asks to wait, or 0 if it has no number."""
    given = headers.get("Retry-After", "")
    return float(given) if given.isascii() and given.isdigit() else 0.0
