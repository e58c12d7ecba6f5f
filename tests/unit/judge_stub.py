"""An OpenAI-compatible judge on this machine, with faults on demand."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import yaml

KEY = "sk-secret/0123456789"
CRITERIA = [
    {"name": "cat", "description": "mentions cat", "weight": 2},
    {"name": "rude", "description": "mentions rude", "weight": -1},
]


class Reply(NamedTuple):
    """An answer of the stub."""

    status: int = 200
    body: str = ""
    headers: Mapping[str, str] = {}


def completion(text: Any) -> Reply:
    """Return an answer with a text. It costs 10 prompt tokens and 3 completion tokens."""
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 10, "completion_tokens": 3}
    return Reply(body=json.dumps({"choices": [{"message": message}], "usage": usage}))


def inside(tag: str, text: str) -> str:
    """Return the text between two tags of a question."""
    found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found[1] if found else ""


def mentions(question: str) -> Reply:
    """Give score 2 if the response contains the last word of the criterion, and 0 otherwise."""
    word = inside("criterion", question).split()[-1]
    score = 2 * (word in inside("response", question))
    return completion(f'I thought {{hard}}. {{"score": {score}}}')


class StubJudge:
    """A server in a thread. `answers` turns the text of a question into a reply."""

    def __init__(self, answers: Callable[[str], Reply] = mentions) -> None:
        self.answers = answers
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.most_at_once = 0
        self.ended = threading.Event()  # ends hanging answers
        self._at_once = 0
        self._lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                reply = stub._answer(json.loads(data), self.headers.get("Authorization"))
                try:
                    self.send_response(reply.status)
                    for name, value in reply.headers.items():
                        self.send_header(name, value)
                    body = reply.body.encode()
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:  # the client has given up
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Print nothing: a client may close its connection."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )

    def _answer(self, body: dict[str, Any], key: str | None) -> Reply:
        with self._lock:
            self.requests.append(body)
            self.keys.add(key)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return self.answers(body["messages"][-1]["content"])
        finally:
            with self._lock:
                self._at_once -= 1

    @property
    def asked(self) -> list[str]:
        """The responses that the stub was asked about, with repetitions."""
        texts = (request["messages"][-1]["content"] for request in self.requests)
        return [inside("response", text) for text in texts]

    def hang(self, question: str) -> Reply:
        """Answer only when the stub ends."""
        self.ended.wait(60)
        return mentions(question)

    def file(self, directory: Path, **settings: Any) -> Path:
        """Write a judge's file that names this server, and return its path."""
        return judge_file(directory, endpoint=self.endpoint, **settings)

    def __enter__(self) -> StubJudge:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()


def judge_file(directory: Path, **settings: Any) -> Path:
    """Write a judge's file, and return its path."""
    given = {"model": "stub", "criteria": CRITERIA, "timeout_s": 5, "retries": 2, **settings}
    path = directory / "judge.yaml"
    path.write_text(yaml.safe_dump(given))
    return path
