"""The echo environment that `openenv init` writes, served on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVE = """
import sys
import uvicorn
from models import EchoGameAction, EchoGameObservation
from openenv.core.env_server.http_server import create_app
from server.echo_game_environment import EchoGameEnvironment

sample = (EchoGameEnvironment, EchoGameAction, EchoGameObservation)
app = create_app(*sample, env_name="echo_game", max_concurrent_envs=64)
uvicorn.run(app, fd=int(sys.argv[1]), log_level="critical")
"""


@contextmanager
def serving_sample(folder: Path) -> Iterator[str]:
    """Write the unmodified sample environment to a folder, serve it, and yield the address."""
    init = [sys.executable, "-m", "openenv.cli", "init", "echo_game"]
    subprocess.run(init, cwd=folder, check=True, capture_output=True, timeout=120)
    # The port accepts connections before the server is up, so early clients wait for the server.
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(listening.fileno())],
            cwd=folder / "echo_game",
            pass_fds=[listening.fileno()],
        )
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.terminate()
            server.wait()
