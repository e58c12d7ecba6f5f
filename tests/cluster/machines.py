"""Simulated machines: network and mount namespaces of this machine, connected by a switch.

Each simulated machine has its own address, `/dev/shm` and disk. Only root can make them, on Linux
with `ip`, `nsenter` and `unshare`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TOOLS = ("ip", "nsenter", "unshare", "mount")
CLONE_NEWNET = 0x40000000  # from <sched.h>
SUBNET = "10.77.0"
SHARED_MEMORY = DISK = "2g"
_SETS = itertools.count()  # a number for each set of machines that this process makes


def missing() -> str | None:
    """Return the reason why this machine cannot simulate others, or None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} missing (iproute2, util-linux)"
    trial = subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True, text=True)
    return None if trial.returncode == 0 else f"no namespaces: {trial.stderr.strip()}"


@contextlib.contextmanager
def machines(count: int, disk: Path) -> Iterator[list[Machine]]:
    """Yield simulated machines 1 to `count`. Remove them at the end, and kill their processes.

    Args:
        count: Number of machines.
        disk: Path at which every machine has its own disk.
    """
    prefix = f"grpo-{os.getpid()}-{next(_SETS)}"
    switch = f"{prefix}-sw"
    made: list[Machine] = []
    disk.mkdir(parents=True, exist_ok=True)
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number in range(1, count + 1):
            made.append(Machine(number, prefix, switch, disk))
        yield made
    finally:
        for machine in made:
            machine.remove()
        _ip("netns", "del", switch)


class Machine:
    def __init__(self, number: int, prefix: str, switch: str, disk: Path) -> None:
        self.address = f"{SUBNET}.{number}"
        self._name, self._port = f"{prefix}-{number}", f"p{number}"
        self._switch = switch
        name = self._name
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        wire = ("type", "veth", "peer", "name", self._port, "netns", switch)
        _ip("-n", name, "link", "add", "eth0", *wire)
        _ip("-n", switch, "link", "set", self._port, "master", "br0", "up")
        _ip("-n", name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.connect()
        # The mounts exist as long as the process that makes them.
        mounts = (
            "mount --make-rprivate /",
            f"mount -t tmpfs -o size={SHARED_MEMORY} tmpfs /dev/shm",
            f"mount -t tmpfs -o size={DISK} tmpfs '{disk}'",
            "echo ready && exec sleep infinity",
        )
        command = ["ip", "netns", "exec", name, "unshare", "-m", "sh", "-ec", "\n".join(mounts)]
        self._keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == "ready\n"

    def connect(self) -> None:
        """Plug in the machine's network cable."""
        _ip("-n", self._name, "link", "set", "eth0", "up")

    def limit(self, mbit_per_s: int) -> None:
        """Limit the rate of the machine's network cable, in each direction."""
        rate = ("root", "tbf", "rate", f"{mbit_per_s}mbit", "burst", "256kb", "latency", "50ms")
        for namespace, device in ((self._name, "eth0"), (self._switch, self._port)):
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "replace", "dev", device, *rate], check=True
            )

    def cut(self) -> None:
        """Unplug the machine's network cable."""
        _ip("-n", self._name, "link", "set", "eth0", "down")

    def lose(self, percent: float) -> None:
        """Drop a random share of the packets that reach this machine. This needs `nft`.

        Args:
            percent: Share of the packets in percent, at least 0.1.
        """
        # Each packet draws a number from 0 to 999, and is dropped if the number is at most `last`.
        last = round(percent * 10) - 1
        rules = (
            "add table inet loss",
            "add chain inet loss in { type filter hook input priority 0; }",
            f'add rule inet loss in iifname "eth0" numgen random mod 1000 <= {last} drop',
        )
        inside = ["ip", "netns", "exec", self._name, "nft", "\n".join(rules)]
        subprocess.run(inside, check=True)

    def listen(self) -> socket.socket:
        """Return a socket that listens on this machine, for a server in the test's own process."""

        # A thread enters the machine's namespace and opens the socket there. The socket stays there
        # when the thread ends.
        def enter() -> socket.socket:
            with open(f"/proc/{self._keeper.pid}/ns/net") as network:
                if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "no way into the machine's network")
            return socket.create_server((self.address, 0))

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(enter).result()

    def seen(self, path: Path) -> Path:
        """Return the path at which the test's process finds a file of this machine.

        Args:
            path: The absolute path of the file on this machine.
        """
        return Path(f"/proc/{self._keeper.pid}/root") / path.relative_to("/")

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: Any = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start a command on this machine."""
        inside = ["nsenter", "-t", str(self._keeper.pid), "-n", "-m", "--", *command]
        return subprocess.Popen(
            inside,
            env={**os.environ, **environment},
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        """Run a command on this machine; return its exit status and output."""
        with self.start(command, environment) as process:
            printed, _ = process.communicate()
        return process.returncode, printed

    def processes(self) -> list[int]:
        """Return every process on this machine except the one that keeps its namespaces."""
        network = _network(self._keeper.pid)
        found = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return [pid for pid in found if pid != self._keeper.pid and _network(pid) == network]

    def kill(self) -> None:
        """End all processes of this machine at once, as a power failure would."""
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def remove(self) -> None:
        self.kill()
        self._keeper.kill()
        self._keeper.communicate()
        _ip("netns", "del", self._name)


def _network(pid: int) -> int | None:
    """Return the number of a process's network namespace, or None if the process has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
