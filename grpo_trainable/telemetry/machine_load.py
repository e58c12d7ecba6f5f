"""How much of this machine's CPU time other work took from a trial.

Busy time is what the kernel does not report as idle, so it includes interrupts and the time that a
hypervisor gave to other virtual machines (steal). What the trial's own processes and Ray's services
used is subtracted; the rest went to others, whether or not this process can see them: inside a
container `/proc/stat` is still the host's. That took no more from the trial than its processes
waited for a core, which the kernel tells for each thread, and the hypervisor stole: on a machine
with idle cores nobody waits. Time in which a CPU quota stopped the trial counts too.

The trial's own usage comes from the processes' CPU clocks, in nanoseconds; only idle time has the
kernel's resolution of 10 ms. Other trials of the same Ray are other work.
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

# A round is disturbed when others took more than this share of it from the trial. A machine by
# itself takes one or two hundredths; one busy core beside a trial that keeps both cores of a
# machine busy gets a third.
DISTURBED_ABOVE = 0.1

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

# What may be shown of a command line: words of this form, and of options the values of those that
# say what a program runs, or that look like the name of a file. Others may be secret.
PLAIN_WORD = re.compile(r"[\w.+-]{1,40}")
RUNS = ("-m", "-jar")
FILE_NAME = re.compile(r"[\w.+-]*\w\.[A-Za-z]{1,4}")

# Children of the raylet that work for no trial in particular, by their names as the kernel cuts
# them. A child without a `ray::` name is a worker that starts.
RAY_SERVICES = ("ray::IDLE", "ray::DashboardA", "ray::RuntimeEnv")


@dataclass(frozen=True, slots=True)
class MachineProcess:
    """A process and the machine, or container, in which its number counts."""

    machine: str
    pid: int
    niceness: int = 0  # 0: as an ordinary process; 15, Ray's default for actors: after all others


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds of a process since it started."""

    parent: int
    cpu_s: float
    reaped_s: float | None = None  # CPU seconds of its children that have ended; None: not read


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What others took between two readings."""

    foreign_s: float  # core-seconds used by others, steal included
    waited_s: float | None  # for a core, by the trial's threads, steal included; None: not told
    denied_s: float  # core-seconds for which a CPU quota stopped this container
    cores: int  # how many the trial may run on
    quota: float  # how many cores it may use at a time
    seconds: float  # time between the readings
    culprit: int | None = None  # the process that used most of it; None: several, or out of sight

    @property
    def fraction(self) -> float:
        """The share of the machine's CPU time that others took from the trial, or of the quota's,
        from 0 to 1."""
        if not self.seconds:
            return 0.0
        # The kernel rounds the idle and the iowait time of each core, so this much may be nobody's.
        rounded_s = 2 * self.cores / TICKS_PER_S
        taken_s = max(0.0, self.foreign_s - rounded_s)
        if self.waited_s is not None:
            taken_s = min(taken_s, self.waited_s)
        share = taken_s / self.cores + self.denied_s / self.quota
        return min(1.0, share / self.seconds)

    def note(self, round_: int, *, counts: bool) -> str:
        """Tell the user about a disturbed round in one line. `counts`: its speed counts."""
        name = shown_command(self.culprit) if self.culprit else ""
        most = f", most of it process {self.culprit} ({name})" if name else ""
        asked = "counts all the same, as callbacks.leave_out_disturbed=false asks"
        how = asked if counts else "does not count"
        return (
            f"other work took {self.fraction:.0%} of this machine's CPU time in round {round_}"
            f"{most}; the speed of disturbed rounds {how} (time/disturbed_fraction)"
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters of the machine at one moment; only their differences mean something."""

    at: float
    idle_s: float  # the sum over all cores
    denied_s: float
    processes: Mapping[int, Usage]
    own: frozenset[int]
    stolen_s: float = 0.0  # by a hypervisor, the sum over all cores
    waited_s: Mapping[int, float] | None = None  # by process; None: the kernel does not tell


def this_process() -> MachineProcess:
    """This process, as the meter of another machine would name it."""
    machine = ""
    with contextlib.suppress(OSError):  # a platform without /proc has no meter either
        machine = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        machine += os.readlink(PROC / "self/ns/pid")
    return MachineProcess(machine, os.getpid(), os.getpriority(os.PRIO_PROCESS, 0))


class Meter:
    """Measures what others took from this process, `own` processes and all their descendants."""

    def __init__(self, own: Iterable[int] = ()) -> None:
        self._here = this_process()
        self.own = {os.getpid(), *own}  # descendants not counted
        self._tree = ProcessTree(self.own)
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._cgroup = cpu_cgroup()
        self._before: Reading | None = None

    def add(self, other: MachineProcess) -> None:
        """Counts another process as the trial's own; one on another machine is not seen here."""
        if other.machine == self._here.machine:
            self.own.add(other.pid)

    def start_measuring(self) -> None:
        """Starts a measurement: what happened until now does not count."""
        self._before = self._read()

    def take(self) -> Disturbance | None:
        """What others took since `start_measuring` or the last `take`; None: that is unknown."""
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
    """What happened between two readings of a machine with so many cores."""
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
    """Return the core-seconds between two readings for which the trial waited or was robbed."""
    if before.waited_s is None or after.waited_s is None:
        return None
    # Threads that have ended take what they waited with them.
    then, now = before.waited_s, after.waited_s
    waited_s = sum(max(0.0, now[pid] - then[pid]) for pid in now.keys() & then.keys())
    return waited_s + max(0.0, after.stolen_s - before.stolen_s)


# ---- The machine -----------------------------------------------------------------------------


def idle_seconds(stat: str, cores: Iterable[int]) -> float | None:
    """Idle and iowait seconds of these cores since boot, from the text of `/proc/stat`.

    None where a core is not accounted for: sandboxes show zeros.
    """
    times = [_times(stat, core) for core in cores]
    if not all(map(any, times)):
        return None
    return sum(own[3] + own[4] for own in times) / TICKS_PER_S


def stolen_seconds(stat: str, cores: Iterable[int]) -> float:
    """Return the seconds since boot that a hypervisor took from these cores."""
    return sum(sum(_times(stat, core)[7:8]) for core in cores) / TICKS_PER_S


def _times(stat: str, core: int) -> list[int]:
    """Return the ticks of a core by what it did, as proc(5) lists them; none of an unknown one."""
    found = re.search(rf"^cpu{core} (.*)$", stat, re.MULTILINE)
    return [int(field) for field in found[1].split()] if found else []


def waited_seconds(pids: Iterable[int]) -> dict[int, float] | None:
    """Return how long the threads of each process have been ready to run and had no core.

    Returns:
        Core-seconds since each thread began, by process, without those that have ended; None where
        the kernel does not tell (it is built without CONFIG_SCHED_INFO, or this is a sandbox).
    """
    waited: dict[int, float] = {}
    for pid in pids:
        threads = [_text(path) for path in (PROC / str(pid) / "task").glob("*/schedstat")]
        if told := [line.split() for line in threads if line]:
            waited[pid] = sum(int(fields[1]) for fields in told) / 1e9
    return waited or None


def cpu_cgroup() -> Path | None:
    """The directory of this process's CPU controller; None without one."""
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
        # A container may show the host's path and mount only its own part.
        for directory in (root / path.lstrip("/"), root):
            if "throttled" in _text(directory / "cpu.stat"):
                return directory
    return None


def denied_seconds(cgroup: Path | None) -> float:
    """Core-seconds for which the quota has stopped processes of this group."""
    stat = _text(cgroup / "cpu.stat") if cgroup else ""
    for name, per_second in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
        if match := re.search(rf"^{name} (\d+)$", stat, re.MULTILINE):
            return int(match[1]) / per_second
    return 0.0


def quota_cores(cgroup: Path | None) -> float:
    """Cores that the quota of this group allows at a time; infinite without one."""
    if cgroup is None:
        return float("inf")
    words = _text(cgroup / "cpu.max").split() or [
        _text(cgroup / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    ]
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return float("inf")  # "max", or -1
    return int(words[0]) / int(words[1])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# ---- Processes -------------------------------------------------------------------------------


def spent(before: Mapping[int, Usage], after: Mapping[int, Usage], own: Iterable[int]) -> float:
    """CPU seconds of the `own` processes between two readings of all processes.

    Children that ended in between are known by what their parent reaped, less what they had used
    before.
    """
    ended: dict[int, float] = defaultdict(float)  # what ended children had used, by parent
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
    """The foreign process that used most CPU time, if that was more than `above_s`."""
    most, found = above_s, None
    for pid in after.processes.keys() - after.own:
        now = after.processes[pid]
        used = now.cpu_s - _earlier(before, pid, now).cpu_s
        if used > most:
            most, found = used, pid
    return found


def _earlier(before: Mapping[int, Usage], pid: int, now: Usage) -> Usage:
    """The earlier reading of a process; none when it is new or its number was given away again."""
    then = before.get(pid)
    return then if then is not None and then.cpu_s <= now.cpu_s else Usage(now.parent, 0.0, 0.0)


class ProcessTree:
    """All processes, and which of them belong to `own` or to the Ray that started this one.

    A process keeps the parent it had when it was first seen: one whose parent ends is still ours.
    """

    def __init__(self, own: set[int]) -> None:
        self._own = own
        self._parents: dict[int, int] = {}
        self._services: dict[int, bool] = {}
        self._raylet = os.getppid() if name_of(os.getppid()) == "raylet" else None
        session = re.search(r"session_[\w-]+", _command(self._raylet) if self._raylet else "")
        self._session = session[0] if session else None

    def read(self) -> tuple[dict[int, Usage], frozenset[int]]:
        """CPU seconds of every process, and the numbers of ours."""
        times = {}
        for pid in [int(name) for name in os.listdir(PROC) if name.isdigit()]:
            # The CPU clock of another process; see clock_getcpuclockid(3).
            with contextlib.suppress(OSError):  # it has ended
                times[pid] = time.clock_gettime_ns((~pid << 3) | 2) / 1e9
        for gone in self._parents.keys() - times.keys():
            del self._parents[gone]
            self._services.pop(gone, None)
        own = {pid for pid in times if self._is_own(pid)}
        usages = {}
        for pid, cpu_s in times.items():
            # The raylet reaps workers of every trial.
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
        """Whether it is one of Ray's own: its command line names the session."""
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
    """The fields of `/proc/<pid>/stat` after the name, state first; empty when it has ended."""
    return _text(PROC / str(pid) / "stat").rpartition(")")[2].split()


def _reaped_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[13]) + int(fields[14])) / TICKS_PER_S if fields else 0.0


def name_of(pid: int) -> str:
    """The name of a process, at most 15 characters; empty when it has ended."""
    return _text(PROC / str(pid) / "comm").strip()


def _command(pid: int) -> str:
    return _text(PROC / str(pid) / "cmdline")


def shown_command(pid: int) -> str:
    """The first words of a process's command line, such as `python3 -m pip`.

    At most three; of paths the last part, and of options no value that may be secret. It is the
    process's name where the first word is of another form, and empty when the process has ended.
    """
    words = _command(pid).split("\0")[:3]
    # An address is shown nowhere: it may hold a token.
    program, *arguments = [w if "://" in w else os.path.basename(w) for w in words]
    if not PLAIN_WORD.fullmatch(program):
        return name_of(pid)
    shown = [program]
    for word in arguments:
        before, is_option = shown[-1], word.startswith("-")
        is_value = before.startswith("-") and before not in RUNS and not is_option
        if not PLAIN_WORD.fullmatch(word) or (is_value and not FILE_NAME.fullmatch(word)):
            break
        # A short option may be followed by its value without a space.
        is_short = is_option and not word.startswith("--") and word not in RUNS
        shown.append(word[:2] if is_short else word)
    return " ".join(shown)
