"""A server on this machine that speaks the protocol of S3 and can be made to fail."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

KEY = "a-key"  # the only access key that the server accepts
STALL_S = 600.0


class Silent(WSGIRequestHandler):
    def log_request(self, *args: Any) -> None:
        pass


@dataclass
class Store:
    """An object store and the address of its server.

    A test may set `refuses(method, path)`. For every request, this function returns an error status
    to answer with, "stall" to let the client wait, or None to serve the request.
    """

    host: str = "127.0.0.1"
    port: int = 0
    refuses: Callable[[str, str], str | None] = lambda method, path: None
    asked: list[tuple[str, str]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables with which a command uses the store."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": "a-secret-that-nobody-writes-down",
            "AWS_ENDPOINT_URL": self.address,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": self.host,
        }

    def make_bucket(self, name: str) -> None:
        self._ask("PUT", name)

    def empty(self) -> None:
        """Empty the store, because this process may have filled it through an earlier server."""
        self._ask("POST", "moto-api/reset")

    def _ask(self, method: str, path: str) -> None:
        request = urllib.request.Request(f"{self.address}/{path}", method=method)
        scope = f"{KEY}/20260101/us-east-1/s3/aws4_request"
        signed = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"
        request.add_header("Authorization", signed)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(request).close()

    def answer(self, behind: Any, environ: dict[str, Any], start: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.asked.append((method, path))
        status = self.refuses(method, path)
        if f"Credential={KEY}/" not in environ.get("HTTP_AUTHORIZATION", ""):
            status = "403 InvalidAccessKeyId"
        if status is None:
            return behind(environ, start)
        if status == "stall":
            self.over.wait(STALL_S)
            status = "503 SlowDown"
        code = status.split()[1]
        start(status, [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode()]


@contextmanager
def s3_store(listener: socket.socket | None = None) -> Iterator[Store]:
    """Serve an object store, which is emptied first if there is no `listener`.

    Args:
        listener: The socket to listen on, which may be on another machine. This server then serves
            the same files as this process's other server, but can be made to fail separately.
    """
    store = Store() if listener is None else Store(host=listener.getsockname()[0])
    behind = DomainDispatcherApplication(create_backend_app)
    server = make_server(
        *(store.host, 0, lambda environ, start: store.answer(behind, environ, start)),
        threaded=True,
        request_handler=Silent,
        fd=None if listener is None else listener.fileno(),
    )
    store.port = server.port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        if listener is None:
            store.empty()
        yield store
    finally:
        store.over.set()
        server.shutdown()
        server.server_close()
        thread.join(5.0)
