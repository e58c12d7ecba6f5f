"""The share of this machine's CPU time that other work took from a trial.

Busy time is all time that the kernel reports neither as idle nor as waiting for I/O. It includes
interrupts and the time that a hypervisor gave to other virtual machines (steal). From busy time we
subtract the time that the trial's own processes and Ray's services used. The rest of the busy time
went to other work. Other work includes processes that this process cannot see: inside a container,
`/proc/stat` still shows the whole host.

The time that other work took from the trial has an upper limit: the time for which the trial's
threads waited for a core, plus the time that the hypervisor stole. The kernel reports the waiting
time of each thread. On a machine with idle cores, no thread waits. The time for which a CPU quota
stopped the trial is added to the time that other work took.

The trial's own usage comes from the CPU clocks of its processes, in nanoseconds. Idle time has the
kernel's resolution of 10 ms. Other trials of the same Ray cluster count as other work.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# A round is disturbed if other work took more than this share of the machine's CPU time from the
# trial. On an otherwise unused machine, the share is 0.01 or 0.02. If a trial keeps both cores of a
# machine busy, one other busy process takes a third of the CPU time from the trial.
DISTURBED_ABOVE = 0.1
LEAST_ROUNDS = 4  # minimum number of rounds for estimating the spread of a speed

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

# When a command line is shown, only words of this form are shown. The value of an option is shown
# only if the option names the program to run, or if the value looks like a file name, because other
# values may be secret.
PLAIN_WORD = re.compile(r"[\w.+-]{1,40}")
RUNS = ("-m", "-jar")
FILE_NAME = re.compile(r"[\w.+-]*\w\.[A-Za-z]{1,4}")

# The names, truncated by the kernel, of those children of the raylet that belong to no trial. A
# child without a `ray::` name is a worker that is starting.
RAY_SERVICES = ("ray::IDLE", "ray::DashboardA", "ray::RuntimeEnv")


@dataclass(frozen=True, slots=True)
class MachineProcess:
    """A process, and the machine or container in which its pid is valid."""

    machine: str
    pid: int
    # 0 for an ordinary process. With niceness 15, Ray's default for actors, a process yields to all
    # others.
    niceness: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds that a process has used since it started."""

    parent: int
    cpu_s: float
    reaped_s: float | None = None  # CPU seconds of children that have ended; None if not read


@dataclass(frozen=True, slots=True)
class Disturbance:
    """The CPU time that other work took from the trial between two readings."""

    foreign_s: float  # core-seconds that other work used, including stolen time
    # Core-seconds for which threads of the trial waited for a core, including stolen time.
    # None: not reported.
    waited_s: float | None
    denied_s: float  # core-seconds for which a CPU quota stopped this container
    cores: int  # number of cores that the trial can run on
    quota: float  # number of cores that the trial can use at the same time
    seconds: float  # time between the readings
    # Pid of the process that used more than half of `foreign_s`; None if no visible process did.
    culprit: int | None = None

    @property
    def fraction(self) -> float:
        """Share of the available CPU time that other work or a quota took away, from 0 to 1."""
        if not self.seconds:
            return 0.0
        # The kernel rounds the idle and the iowait time of each core. `rounded_s` is the largest
        # error that the rounding can cause.
        rounded_s = 2 * self.cores / TICKS_PER_S
        taken_s = max(0.0, self.foreign_s - rounded_s)
        if self.waited_s is not None:
            taken_s = min(taken_s, self.waited_s)
        share = taken_s / self.cores + self.denied_s / self.quota
        return min(1.0, share / self.seconds)

    def note(self, round_: int, *, counts: bool) -> str:
        """Return a one-line message to the user about a disturbed round.

        Args:
            round_: the round.
            counts: True if speeds include disturbed rounds.
        """
        name = shown_command(self.culprit) if self.culprit else ""
        most = f", most of it in process {self.culprit} ({name})" if name else ""
        asked = "include disturbed rounds, because callbacks.leave_out_disturbed=false"
        how = asked if counts else "exclude disturbed rounds"
        return (
            f"other work took {self.fraction:.0%} of this machine's CPU time in round {round_}"
            f"{most}; speeds {how} (time/disturbed_fraction)"
        )


def enough_undisturbed(rounds: int, disturbed: int) -> bool:
    """Return True if a trial has enough undisturbed rounds for its speed to be compared.

    Enough means at least half of the rounds, and at least `LEAST_ROUNDS` (or all rounds of a
    shorter trial).

    Args:
        rounds: Number of timed rounds.
        disturbed: Number of disturbed rounds among them.
    """
    clean = rounds - disturbed
    return 2 * clean >= rounds and clean >= min(LEAST_ROUNDS, rounds)


@dataclass(frozen=True, slots=True)
class Reading:
    """The machine's counters at one moment. Only differences between readings are meaningful."""

    at: float
    idle_s: float  # summed over the cores that the trial can run on
    denied_s: float
    processes: Mapping[int, Usage]
    own: frozenset[int]
    stolen_s: float = 0.0  # seconds that a hypervisor took, summed over the same cores
    # Pid -> seconds of waiting for a core (`waited_seconds`). None if not reported.
    waited_s: Mapping[int, float] | None = None


def this_process() -> MachineProcess:
    """Return this process, with its machine."""
    machine = ""
    with contextlib.suppress(OSError):  # on a platform without /proc, Meter measures nothing
        machine = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        machine += os.readlink(PROC / "self/ns/pid")
    return MachineProcess(machine, os.getpid(), os.getpriority(os.PRIO_PROCESS, 0))


class Meter:
    """Measures the CPU time that other work takes from a trial.

    The trial is this process, the `own` processes, and all their descendants.
    """

    def __init__(self, own: Iterable[int] = ()) -> None:
        self._here = this_process()
        self.own = {os.getpid(), *own}  # pids, without those of descendants
        self._tree = ProcessTree(self.own)
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._cgroup = cpu_cgroup()
        self._before: Reading | None = None

    def add(self, other: MachineProcess) -> None:
        """Count a process as the trial's own, unless it runs on another machine."""
        if other.machine == self._here.machine:
            self.own.add(other.pid)

    def start_measuring(self) -> None:
        """Start measuring now."""
        self._before = self._read()

    def take(self) -> Disturbance | None:
        """Return the disturbance since the last `take` or `start_measuring`, or None if unknown."""
        before, after = self._before, self._read()
        self._before = after
        if before is None or after is None:
            return None
        cores = len(self._cores)
        return disturbance(before, after, cores, min(cores, quota_cores(self._cgroup)))

    def _read(self) -> Reading | None:
        try:
            stat = (PROC / "stat").read_text()
        except OSError:
            return None
        idle_s, stolen_s = idle_seconds(stat, self._cores), stolen_seconds(stat, self._cores)
        if idle_s is None:
            return None
        at = time.perf_counter()
        processes, own = self._tree.read()
        denied_s, waited_s = denied_seconds(self._cgroup), waited_seconds(self.own)
        return Reading(at, idle_s, denied_s, processes, own, stolen_s, waited_s)


def disturbance(before: Reading, after: Reading, cores: int, quota: float) -> Disturbance:
    """Return the disturbance between two readings.

    Args:
        before: the first reading.
        after: the second reading.
        cores: number of cores that the trial can run on.
        quota: number of cores that the trial can use at the same time.
    """
    seconds = after.at - before.at
    busy_s = cores * seconds - (after.idle_s - before.idle_s)
    own_s = spent(before.processes, after.processes, after.own)
    foreign_s = max(0.0, busy_s - own_s)
    return Disturbance(
        foreign_s=foreign_s,
        waited_s=_lost(before, after),
        denied_s=max(0.0, after.denied_s - before.denied_s),
        cores=cores,
        quota=quota,
        seconds=seconds,
        culprit=culprit(before.processes, after, foreign_s / 2),
    )


def _lost(before: Reading, after: Reading) -> float | None:
    """Return the core-seconds of waiting for a core, plus those that the hypervisor stole."""
    if before.waited_s is None or after.waited_s is None:
        return None
    # The waiting time of a process excludes threads that have ended, so it may decrease.
    then, now = before.waited_s, after.waited_s
    waited_s = sum(max(0.0, now[pid] - then[pid]) for pid in now.keys() & then.keys())
    return waited_s + max(0.0, after.stolen_s - before.stolen_s)


# ---- The machine -----------------------------------------------------------------------------


def idle_seconds(stat: str, cores: Iterable[int]) -> float | None:
    """Return the idle and iowait seconds of these cores since boot.

    Args:
        stat: the text of `/proc/stat`.
        cores: the numbers of the cores.

    Returns:
        The sum over the cores, or None if a core has no counts, as in sandboxes that show zeros.
    """
    times = [_times(stat, core) for core in cores]
    if not all(map(any, times)):
        return None
    return sum(own[3] + own[4] for own in times) / TICKS_PER_S


def stolen_seconds(stat: str, cores: Iterable[int]) -> float:
    """Return the seconds that a hypervisor has taken from these cores since boot."""
    return sum(sum(_times(stat, core)[7:8]) for core in cores) / TICKS_PER_S


def _times(stat: str, core: int) -> list[int]:
    """Return a core's ticks by kind, in the order of proc(5); empty for an unknown core."""
    found = re.search(rf"^cpu{core} (.*)$", stat, re.MULTILINE)
    return [int(field) for field in found[1].split()] if found else []


def waited_seconds(pids: Iterable[int]) -> dict[int, float] | None:
    """Return the time for which the threads of each process were ready to run but had no core.

    Returns:
        Process -> core-seconds since the start of its threads, summed over the threads that have
        not ended. None if the kernel does not report waiting times, either because it was built
        without CONFIG_SCHED_INFO or because this is a sandbox.
    """
    waited: dict[int, float] = {}
    for pid in pids:
        threads = [_text(path) for path in (PROC / str(pid) / "task").glob("*/schedstat")]
        if told := [line.split() for line in threads if line]:
            waited[pid] = sum(int(fields[1]) for fields in told) / 1e9
    return waited or None


def cpu_cgroup() -> Path | None:
    """Return the directory of this process's CPU controller, or None if there is no controller."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            root = CGROUPS / controllers
        elif not controllers:
            root = CGROUPS
        else:
            continue
        # A container may show the host's path but mount only the container's part of the tree.
        for directory in (root / path.lstrip("/"), root):
            if "throttled" in _text(directory / "cpu.stat"):
                return directory
    return None


def denied_seconds(cgroup: Path | None) -> float:
    """Return the core-seconds for which the quota has stopped processes of this cgroup."""
    stat = _text(cgroup / "cpu.stat") if cgroup else ""
    for name, per_second in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
        if match := re.search(rf"^{name} (\d+)$", stat, re.MULTILINE):
            return int(match[1]) / per_second
    return 0.0


def quota_cores(cgroup: Path | None) -> float:
    """Return the number of cores that the quota lets this cgroup use; infinity without a quota."""
    if cgroup is None:
        return float("inf")
    words = _text(cgroup / "cpu.max").split() or [
        _text(cgroup / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    ]
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return float("inf")  # "max" or -1 means no quota
    return int(words[0]) / int(words[1])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# ---- Processes -------------------------------------------------------------------------------


def spent(before: Mapping[int, Usage], after: Mapping[int, Usage], own: Iterable[int]) -> float:
    """Return the CPU seconds that the `own` processes used between two readings of all processes.

    When a child ends, the kernel adds the child's CPU time to a total that its parent keeps. This
    function counts the growth of that total between the readings, minus the CPU time that the ended
    children had used before the first reading.
    """
    ended: dict[int, float] = defaultdict(float)  # parent -> earlier usage of ended children
    for pid, usage in before.items():
        if pid not in after:
            ended[usage.parent] += usage.cpu_s + (usage.reaped_s or 0.0)
    total = 0.0
    for pid in own:
        now = after[pid]
        then = _earlier(before, pid, now)
        total += now.cpu_s - then.cpu_s
        if now.reaped_s is not None and then.reaped_s is not None:
            total += max(0.0, now.reaped_s - then.reaped_s - ended[pid])
    return total


def culprit(before: Mapping[int, Usage], after: Reading, above_s: float) -> int | None:
    """Return the foreign process that used the most CPU time, if it used more than `above_s`."""
    most, found = above_s, None
    for pid in after.processes.keys() - after.own:
        now = after.processes[pid]
        used = now.cpu_s - _earlier(before, pid, now).cpu_s
        if used > most:
            most, found = used, pid
    return found


def _earlier(before: Mapping[int, Usage], pid: int, now: Usage) -> Usage:
    """Return the earlier usage of a process, or zero if the process is new or reuses a pid."""
    then = before.get(pid)
    return then if then is not None and then.cpu_s <= now.cpu_s else Usage(now.parent, 0.0, 0.0)


class ProcessTree:
    """All processes of the machine, divided into our processes and foreign ones.

    A process is ours if it is in `own`, descends from a process in `own`, or is a service of the
    Ray cluster that started this process. A process keeps the parent that it had when it was first
    seen, so it stays ours after its parent has ended.
    """

    def __init__(self, own: set[int]) -> None:
        self._own = own
        self._parents: dict[int, int] = {}
        self._services: dict[int, bool] = {}
        self._raylet = os.getppid() if name_of(os.getppid()) == "raylet" else None
        session = re.search(r"session_[\w-]+", _command(self._raylet) if self._raylet else "")
        self._session = session[0] if session else None

    def read(self) -> tuple[dict[int, Usage], frozenset[int]]:
        """Return the CPU seconds that every process has used, and the pids of our processes."""
        times = {}
        for pid in [int(name) for name in os.listdir(PROC) if name.isdigit()]:
            # This clock id refers to the CPU clock of process `pid`; see clock_getcpuclockid(3).
            with contextlib.suppress(OSError):  # the process has ended
                times[pid] = time.clock_gettime_ns((~pid << 3) | 2) / 1e9
        for gone in self._parents.keys() - times.keys():
            del self._parents[gone]
            self._services.pop(gone, None)
        own = {pid for pid in times if self._is_own(pid)}
        usages = {}
        for pid, cpu_s in times.items():
            # The raylet is the parent of the workers of all trials, so the CPU time of its ended
            # children is not ours alone.
            reaped_s = _reaped_seconds(pid) if pid in own and pid != self._raylet else None
            usages[pid] = Usage(self._parent(pid), cpu_s, reaped_s)
        return usages, frozenset(own)

    def _is_own(self, pid: int) -> bool:
        while pid:
            if pid in self._own:
                return True
            parent = self._parent(pid)
            if parent == self._raylet:
                name = name_of(pid)
                return name in RAY_SERVICES or not name.startswith("ray::")
            if self._is_service(pid):
                return True
            pid = parent
        return False

    def _is_service(self, pid: int) -> bool:
        """Return True for a service of our Ray cluster: its command line names the session."""
        if self._session is None:
            return False
        if pid not in self._services:
            self._services[pid] = self._session in _command(pid)
        return self._services[pid]

    def _parent(self, pid: int) -> int:
        if pid not in self._parents:
            self._parents[pid] = int(fields[1]) if (fields := _stat(pid)) else 0
        return self._parents[pid]


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/<pid>/stat` from `state` on; empty for an ended process."""
    return _text(PROC / str(pid) / "stat").rpartition(")")[2].split()


def _reaped_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[13]) + int(fields[14])) / TICKS_PER_S if fields else 0.0


def name_of(pid: int) -> str:
    """Return the name of a process, at most 15 characters; empty if it has ended."""
    return _text(PROC / str(pid) / "comm").strip()


def _command(pid: int) -> str:
    return _text(PROC / str(pid) / "cmdline")


def shown_command(pid: int) -> str:
    """Return the first words of a process's command line, such as `python3 -m pip`.

    Return at most three words. Show only the last part of a path, and no option value that may be
    secret. If the first word does not have the form of `PLAIN_WORD`, return the name of the
    process. Return an empty string if the process has ended.
    """
    words = _command(pid).split("\0")[:3]
    # A URL may contain a token, so it is never shown.
    program, *arguments = [w if "://" in w else os.path.basename(w) for w in words]
    if not PLAIN_WORD.fullmatch(program):
        return name_of(pid)
    shown = [program]
    for word in arguments:
        before, is_option = shown[-1], word.startswith("-")
        is_value = before.startswith("-") and before not in RUNS and not is_option
        if not PLAIN_WORD.fullmatch(word) or (is_value and not FILE_NAME.fullmatch(word)):
            break
        # The value of a short option may follow without a space.
        is_short = is_option and not word.startswith("--") and word not in RUNS
        shown.append(word[:2] if is_short else word)
    return " ".join(shown)
