"""A real local server that speaks OpenAI's protocol and fails on request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    wait: threading.Event | None = None  # if set, answer only after this event


def says(text: str | None) -> Reply:
    return Reply(body=json.dumps({"choices": [{"message": {"content": text}}]}).encode())


def story_about(request: dict[str, Any]) -> Reply:
    """Return a usable prompt for the keywords in a request."""
    content = request["messages"][0]["content"]
    words = content.partition("must contain the ")[2].partition(": ")[2].partition(". ")[0]
    return says(f'1. "Write a short story with these: {words}."')


@dataclass
class Server:
    url: str
    asked: list[dict[str, Any]]  # the bodies of all requests
    headers: list[dict[str, str]]


@contextmanager
def endpoint(
    first: Sequence[Reply] = (), then: Callable[[dict[str, Any]], Reply] = story_about
) -> Iterator[Server]:
    """Answer the first requests from the list `first`, and all others with `then`."""
    listed, lock = list(first), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.asked.append({"path": self.path, **body})
                server.headers.append(dict(self.headers))
                reply = listed.pop(0) if listed else None
            reply = then(body) if reply is None else reply
            if reply.wait is not None:
                reply.wait.wait(20)
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.handle_error = lambda request, client_address: None  # ignore clients that disconnect
    server = Server(f"http://127.0.0.1:{http.server_address[1]}/v1", [], [])
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
