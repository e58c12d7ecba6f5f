"""From the command to the first finished round of the default job: seconds, and whose CPU time.

Starts `launch/tune.py --space async_vs_sync` as a user does, looks for the first row of its first
trial, and interrupts it then. The row is found when it is in result.json, where anybody sees it.
CPU seconds are those of every process that the command had started by then, by what it is; what
ended before counts for who started it.

Beside it the least job of Ray Tune with an actor that imports torch (startup_floor.py), which is
what no start can be faster than, and with `--baseline DIRECTORY` a checkout of another commit. They
take turns, each time in the other order; the ratios are those of one turn. All run in the
environment that runs this. Some half a minute a repeat, on a machine that does nothing else.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measure import ROOT, parser_of, provenance, run_benchmark, write

from grpo_trainable.noise import PROC, TICKS_PER_S

NAME = "startup"
DEADLINE_S = 300.0
LOOK_EVERY_S = 0.01
FLOOR = str(ROOT / "benchmarks" / "startup_floor.py")
FIGURES = ("seconds", "trial_s", "cpu_s")
# What Ray calls an actor's process: ray::DetailedGRPO, ray::Learner.warm_up.
ACTOR = re.compile(r"ray::(\w+)")
ROLES = {"DetailedGRPO": "trial", "Learner": "learner", "Generator": "generator"}
ROLES |= {"Colocated": "worker", "IDLE": "spare worker"}


def main() -> None:
    parser = parser_of(
        __doc__, "startup.json", seed="of the first trial", counts={"repeats": (5, "of each job")}
    )
    parser.add_argument("--arm", help="of the space, alone (its order has another first arm)")
    parser.add_argument(
        "--baseline", type=Path, metavar="DIRECTORY", help="a checkout of another commit"
    )
    args = parser.parse_args()
    options = ["--seed", str(args.seed), *(["--set", f"arm={args.arm}"] if args.arm else [])]
    jobs = {"here": Job.of_tree(ROOT, options), "floor": Job(ROOT, (FLOOR,))}
    if args.baseline is not None:
        jobs["baseline"] = Job.of_tree(args.baseline.resolve(strict=True), options)
    starts: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    for job in jobs.values():
        start_of(job)  # not counted: Python compiles what has changed
    for repeat in range(args.repeats):
        for name in sorted(jobs, reverse=repeat % 2 == 0):
            found = start_of(jobs[name])
            starts[name].append(found)
            print(f"{repeat} {name:<8} {shown(found)}", flush=True)
    result = {
        **provenance(args),
        "workload": {"space": "async_vs_sync", "options": options},
        "starts": {name: summary(own) for name, own in starts.items()},
        "ratios": {
            other: ratios(starts["here"], starts[other]) for other in jobs if other != "here"
        },
    }
    if args.baseline is not None:
        result["baseline"] = commit_of(jobs["baseline"].tree)
    for name, own in result["starts"].items():
        print(f"\n{name}, medians: {shown({figure: own[figure]['median'] for figure in FIGURES})}")
        for process, cpu_s in own["cpu_s_by_process"].items():
            print(f"  {cpu_s:6.2f} CPU s  {process}")
    for other, found in result["ratios"].items():
        for figure, ratio in found.items():
            low, high = ratio["min"], ratio["max"]
            print(f"{figure}: {ratio['median']:.2f} x that of the {other} ({low:.2f}-{high:.2f})")
    write(args.out, result)


# ---- One start -------------------------------------------------------------------------------


class Job(NamedTuple):
    """A command of a checkout, without its name and storage."""

    tree: Path
    words: tuple[str, ...]

    @classmethod
    def of_tree(cls, tree: Path, options: Sequence[str]) -> Job:
        """The default job as this checkout has it."""
        script = str(tree / "launch" / "tune.py")
        return cls(tree, (script, "--space", "async_vs_sync", *options))


def start_of(job: Job) -> dict[str, Any]:
    """One start of a job: the seconds from the command until the first trial is set up, which
    starts its actors, and until its first row is written; CPU seconds by then."""
    with tempfile.TemporaryDirectory() as storage:
        command = [sys.executable, *job.words, "--name", NAME, "--storage", storage]
        environment = {**os.environ, "PYTHONPATH": str(job.tree)}
        begin = time.perf_counter()
        with (
            open(Path(storage, "printed"), "w+") as printed,
            subprocess.Popen(
                command, stdout=printed, stderr=subprocess.STDOUT, cwd=job.tree, env=environment
            ) as process,
        ):
            try:
                placed, rows = wait_for(process, Path(storage), least_bytes=0)
                end, _ = wait_for(process, Path(storage), least_bytes=1)
                cpu_s = cpu_seconds(process.pid)
            except NoRound as error:
                printed.seek(0)
                raise SystemExit(f"{' '.join(command)}: {error}\n{printed.read()}") from None
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(DEADLINE_S)
    return {
        "seconds": end - begin,
        "trial_s": placed - begin,
        "arm": rows.parent.name.partition("-")[0],
        "cpu_s": sum(cpu_s.values()),
        "cpu_s_by_process": cpu_s,
    }


class NoRound(RuntimeError):
    """Raised where the first round does not come."""


def wait_for(
    job: subprocess.Popen[bytes], storage: Path, *, least_bytes: int
) -> tuple[float, Path]:
    """When the first trial's rows were found to be so long, and their file."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and job.poll() is None:
        for path in storage.glob(f"{NAME}/*/result.json"):
            if path.stat().st_size >= least_bytes:
                return time.perf_counter(), path
        time.sleep(LOOK_EVERY_S)
    raise NoRound(f"no finished round in {DEADLINE_S:.0f} s, or the job has ended before")


def cpu_seconds(root: int) -> dict[str, float]:
    """CPU seconds of a process and of all that it has started, by what they are."""
    seconds: Counter[str] = Counter()
    parents = {pid: int(stat_of(pid)[1]) for pid in map(int, filter(str.isdigit, os.listdir(PROC)))}
    for pid in parents:
        if is_below(pid, root, parents):
            # Its own, and those of the children that it has reaped; see proc_pid_stat(5).
            ticks = sum(map(int, stat_of(pid)[11:15]))
            seconds["command" if pid == root else role_of(pid)] += ticks / TICKS_PER_S
    return dict(seconds.most_common())


def is_below(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid and pid != root:
        pid = parents.get(pid, 0)
    return pid == root


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; zeros where the process has just ended."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 50


def role_of(pid: int) -> str:
    """What a process of Ray is: an actor's, or the name of the program."""
    try:
        words = (PROC / str(pid) / "cmdline").read_text().split("\0")
    except OSError:
        return "ended"
    if actor := ACTOR.match(words[0]):
        return ROLES.get(actor[1], actor[1])
    scripts = [word for word in words if word.endswith(".py")]
    return "/".join(Path((scripts or words)[0]).parts[-2:])


# ---- All of them -----------------------------------------------------------------------------


def summary(starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    processes = {name for start in starts for name in start["cpu_s_by_process"]}
    by_process = {
        name: statistics.median(start["cpu_s_by_process"].get(name, 0.0) for start in starts)
        for name in processes
    }
    return {
        **{name: spread([start[name] for start in starts]) for name in FIGURES},
        "cpu_s_by_process": dict(sorted(by_process.items(), key=lambda item: -item[1])),
        "arm": sorted({start["arm"] for start in starts}),
    }


def ratios(ours: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What one start comes to beside the other of its turn."""
    turns = list(zip(ours, others, strict=True))
    return {
        figure: spread([own[figure] / other[figure] for own, other in turns]) for figure in FIGURES
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }


def shown(figures: dict[str, Any]) -> str:
    return (
        f"{figures['seconds']:6.2f} s to the first finished round, {figures['trial_s']:5.2f} s of "
        f"them until the trial is set up; {figures['cpu_s']:6.2f} CPU s"
    )


def commit_of(tree: Path) -> dict[str, Any]:
    """The commit of another checkout, and whether its files are as committed there."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(tree), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
    }


if __name__ == "__main__":
    run_benchmark(main)
