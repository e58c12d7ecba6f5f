"""Measure what is lost when something breaks, by injecting faults into the real program.

    python benchmarks/faults.py                            all faults; 2.5 hours on two cores
    python benchmarks/faults.py --fault "slow object store" --repeats 2
    sudo python benchmarks/faults.py --fault "cluster" --out faults_cluster.json

Each fault strikes a running `launch/tune.py` at a random moment. The trial has 16 rounds and a
checkpoint every 4 rounds. A trial survives if

- the command, or the command that resumes the trial, ends with status 0;
- each of the trial's output files contains every round once and in order;
- at lag 0, the rows and the last checkpoint equal those of an uninterrupted run, bit for bit.

The time to recover is the longest time without a new row. The JSON is written after every fault. If
a campaign is interrupted, the same command continues it, unless the commit has changed.

The faults that fill a disk need permission to mount one. The faults of a cluster need root, on
Linux with `ip`, `nsenter` and `unshare`: they simulate machines with network namespaces.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import psutil
from measure import ROOT, parser_of, provenance, read, run_benchmark, same_run, write
from survival import (
    CHECKPOINT_EVERY,
    FIRST,
    LAST,
    ROUNDS,
    SETTINGS,
    Experiment,
    Fault,
    Lost,
    Outcome,
    Running,
    check_accounts,
    check_rounds,
    fingerprint,
    interrupt,
    is_ours,
    judge,
    none_left,
)

from callbacks.trial_files import read_rows
from grpo_trainable.command_line import align
from grpo_trainable.storage.checkpointing import MANIFEST, checkpoint_round
from grpo_trainable.storage.object_store import fetched, stored_path

# ---- Processes that are killed or stopped ------------------------------------------------------


@contextmanager
def on_this_machine(arm: str, settings: Mapping[str, Any]) -> Iterator[Experiment]:
    with tempfile.TemporaryDirectory() as storage:
        yield Experiment(Path(storage), arm, **settings)


def at_a_random_moment(
    strike: Callable[[Any], object],
    arms: Sequence[str],
    settings: Mapping[str, Any] = {},
    place: Callable[..., AbstractContextManager[Experiment]] = on_this_machine,
) -> Callable[[random.Random, int], Outcome]:
    """Return a fault that strikes a running trial. Successive repeats use the arms in turn.

    If the fault ends the command, the trial is resumed. Otherwise the command must succeed without
    being resumed.
    """

    def struck_trial(rng: random.Random, repeat: int) -> Outcome:
        with place(arms[repeat % len(arms)], settings) as experiment:
            with experiment.start() as running:
                running.wait_for_rounds(rng.randint(FIRST, LAST))
                time.sleep(rng.random() * 0.3)
                struck = time.time()
                strike(running)
                before = len(experiment.rows())
                ended = running.process.poll() is not None
                if not ended:
                    running.ends_well()
            if ended:
                struck = time.time()
                experiment.resume()
            return judge(experiment, f"{experiment.arm}, round {before}", before, struck)

    return struck_trial


def kill(role: str) -> Callable[[Running], None]:
    return lambda running: running.process_of(role).kill()


def stop_generator(running: Running) -> None:
    """Suspend a generator, and wait until it is killed because of `resources.deadline_s`."""
    victim = running.process_of("Generator")
    victim.suspend()
    running.wait_for(lambda: not victim.is_running())


def kill_command(running: Running) -> None:
    """Kill the command, and wait until all of its processes have ended."""
    family = running.family()
    running.process.send_signal(signal.SIGKILL)
    running.output()
    none_left(family)


def kill_while_copying(running: Running) -> None:
    """Kill the Trainable when the directory of its next checkpoint appears in the storage path."""
    victim, trial = running.process_of("DetailedGRPO"), running.experiment.trial
    known = set(trial.glob("checkpoint_*"))
    running.wait_for(lambda: set(trial.glob("checkpoint_*")) - known, step_s=0.0002)
    victim.kill()


REPLAY = {"buffer_capacity": 3, "buffer_sampling": "uniform", "buffer.sample_batches": 2}
APART = ("sync", "async_k1")
AT_LAG_0 = ("sync", "colocated_k1")
COLOCATED = ("colocated_k1", "colocated_k4")
ALL = ("sync", "colocated_k1", "async_k1")
DEADLINE = {"resources.deadline_s": 15.0}
PROCESSES = (
    Fault("generator SIGKILL", 20, at_a_random_moment(kill("Generator"), APART)),
    Fault("generator SIGSTOP", 4, at_a_random_moment(stop_generator, APART, DEADLINE)),
    Fault("learner SIGKILL", 10, at_a_random_moment(kill("Learner"), APART)),
    Fault("colocated worker SIGKILL", 10, at_a_random_moment(kill("Colocated"), COLOCATED)),
    Fault("Trainable SIGKILL", 10, at_a_random_moment(kill("DetailedGRPO"), ALL)),
    Fault("driver SIGKILL, then --resume", 10, at_a_random_moment(kill_command, ALL)),
    Fault("Ctrl-C, then --resume", 10, at_a_random_moment(interrupt, AT_LAG_0)),
    Fault("the same, with a replay buffer", 10, at_a_random_moment(interrupt, AT_LAG_0, REPLAY)),
    Fault("SIGKILL while Tune copies", 6, at_a_random_moment(kill_while_copying, AT_LAG_0)),
)


# ---- Damaged checkpoints and full disks --------------------------------------------------------

STOPPED_AFTER = 9  # rounds; there are checkpoints of rounds 4, 8 and 9


@cache
def interrupted() -> Path:
    """Return the storage of an interrupted experiment. Its directory `kept` is an intact copy."""
    storage = Path(tempfile.mkdtemp(prefix="grpo-faults-"))
    experiment = Experiment(storage, "sync", **{"checkpoint.keep": "null"})
    with experiment.start() as running:
        running.wait_for_rounds(STOPPED_AFTER)
        interrupt(running)
    shutil.copytree(experiment.directory, storage / "kept")
    return storage


def damaged(how: Callable[[Path, random.Random], str], rng: random.Random, repeat: int) -> Outcome:
    """Damage the newest checkpoint of an interrupted experiment, and resume the experiment."""
    storage = interrupted()
    experiment = Experiment(storage, "sync")
    shutil.rmtree(experiment.directory)
    shutil.copytree(storage / "kept", experiment.directory)
    checkpoints = sorted(experiment.trial.glob("checkpoint_*"))
    previous = checkpoint_round(checkpoints[-2])
    done = how(checkpoints[-1], rng)
    before, struck = len(experiment.rows()), time.time()
    printed = experiment.resume()
    line = f"continuing from {checkpoints[-2].name} (round {previous})"
    if line not in printed:
        raise Lost(f"{done}; {line!r} was not printed")
    if experiment.rows()[previous]["iterations_since_restore"] != 1:
        raise Lost(f"{done}; the trial did not continue after round {previous}")
    return judge(experiment, done, before, struck)


def truncated(checkpoint: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(checkpoint.iterdir()))
    size = rng.randrange(path.stat().st_size - 1)
    os.truncate(path, size)
    return f"{path.name} cut to {size} bytes"


def flipped(checkpoint: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(path for path in checkpoint.iterdir() if path.name != MANIFEST))
    content = bytearray(path.read_bytes())
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {place} of {path.name} flipped"


def without_manifest(checkpoint: Path, rng: random.Random) -> str:
    (checkpoint / MANIFEST).unlink()
    return "no manifest"


def without_anything(checkpoint: Path, rng: random.Random) -> str:
    shutil.rmtree(checkpoint)
    return "no directory"


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", directory]
        done = subprocess.run(mount, capture_output=True, text=True)
        if done.returncode != 0:
            raise Lost(f"could not be tried: {done.stderr.strip()}")
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", directory], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk, and return the file that occupies the space."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    return filler


def full_disk(rng: random.Random, repeat: int) -> Outcome:
    """Fill the disk before a checkpoint is due, and free the space before the last checkpoint."""
    with small_disk(40) as storage:
        experiment = Experiment(storage, "sync")
        with experiment.start() as running:
            running.wait_for_rounds(rng.randint(CHECKPOINT_EVERY + 1, 2 * CHECKPOINT_EVERY - 1))
            before, filler = len(experiment.rows()), fill(storage)
            running.wait_for(lambda: "could not be written" in running.printed())
            filler.unlink()
            running.ends_well()
        whole = [checkpoint_round(p) for p in sorted(experiment.trial.glob("checkpoint_*"))]
        rounds = [row["training_iteration"] for row in experiment.rows()]
        failures = experiment.rows()[-1]["count/checkpoint_failures"]
        return Outcome(
            survived=rounds == list(range(1, ROUNDS + 1)) and failures > 0 and whole[-1] == ROUNDS,
            happened=f"disk full after round {before}: {failures:.0f} checkpoints not written, "
            f"rows {rounds[0]}-{rounds[-1]}, rounds with a whole checkpoint at the end: {whole}",
        )


DISKS = (
    Fault("newest checkpoint truncated", 5, partial(damaged, truncated)),
    Fault("newest checkpoint, flipped bit", 5, partial(damaged, flipped)),
    Fault("newest checkpoint, no manifest", 2, partial(damaged, without_manifest)),
    Fault("newest checkpoint gone", 2, partial(damaged, without_anything)),
    Fault("ENOSPC while checkpointing", 5, full_disk),
)


# ---- A slow object store -----------------------------------------------------------------------

KILLS = 5  # number of times that one experiment is killed
FEWEST, MOST = 10, 60  # rounds from a start to a kill
PUT_S = 0.05
BOUND_S = 10.0  # maximum delay until a row reaches the store
RUNS = "s3://bucket/runs"
SHORT_ROUNDS = {
    "rollout.prompts": 1,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 4,
    "eval.every": 100,
}


class InSlowStore(Experiment):
    """Trial that has short rounds and keeps its files in a slow store.

    Until the trial is fetched from the store, `rows` returns only the current command's rows.
    """

    checkpoint_every = 5
    longest_s = 480.0

    def __init__(self, directory: Path, arm: str, rounds: int) -> None:
        self.rounds = rounds
        super().__init__(directory, arm, RUNS, **SHORT_ROUNDS)
        self._sessions = directory
        self._began = 0.0

    def launch(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[Any]:
        self._began = time.time()
        environment = {**os.environ, "RAY_TMPDIR": str(self._sessions)}
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def rows(self) -> list[dict[str, Any]]:
        if self.directory.exists():
            return super().rows()
        here = self._sessions.glob("ray/session_2*/artifacts/*/*/*-mirrored/*/result.json")
        newest = max(here, key=os.path.getmtime, default=None)
        rows = [] if newest is None else read_rows(newest)
        return [row for row in rows if row["timestamp"] >= int(self._began)]


@contextmanager
def slow_store() -> Iterator[None]:
    """Serve an object store to this process and its children. A PUT takes `PUT_S` seconds."""
    sys.path.append(str(ROOT / "tests" / "integration" / "extras"))
    from s3_server import s3_store

    with s3_store() as store, patch.dict(os.environ, store.environment):
        store.make_bucket(stored_path(RUNS).path.partition("/")[0])
        store.refuses = lambda method, path: time.sleep(PUT_S) if method == "PUT" else None
        yield


def kill_again_and_again(rng: random.Random, repeat: int) -> Outcome:
    """Kill the command five times. Each resume must continue from a recent checkpoint."""
    arm = ("colocated_k1", "async_k1")[repeat % 2]
    kills = [rng.randint(FEWEST, MOST) for _ in range(KILLS)]
    with (
        tempfile.TemporaryDirectory(prefix="k", ignore_cleanup_errors=True) as directory,
        slow_store(),
    ):
        experiment = InSlowStore(Path(directory), arm, sum(kills) + FEWEST)
        command, before, done_again = experiment.command, [], []
        for rounds in kills:
            with Running(experiment, command) as running:
                running.wait_for(lambda: len(experiment.rows()) >= rounds, step_s=0.2)  # noqa: B023
                time.sleep(rng.random() * 0.3)
                kill_command(running)
            rows = experiment.rows()
            done_again += repeated_rounds(before, rows)
            command, before = experiment.resume_command, rows
        with Running(experiment, command) as running:
            running.ends_well()
        done_again += repeated_rounds(before, experiment.rows())
        with fetched(stored_path(RUNS) / experiment.directory.name) as copy:
            copy.rename(experiment.directory)
            check_rounds(experiment)
            check_accounts(experiment)
    round_s = sorted(row["time_this_iter_s"] for row in before)[len(before) // 2]
    happened = f"{arm}, rounds of {round_s:.2f} s, rounds repeated after each kill: {done_again}"
    return Outcome(survived=True, happened=happened, rounds_repeated=max(done_again))


def repeated_rounds(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[int]:
    """Return a list with the number of rounds that a kill cost, or [] if there was no kill yet.

    Raises:
        Lost: The kill cost more rounds than there are between two checkpoints and in the last
            `BOUND_S` seconds together.
    """
    if not before:
        return []
    last, start = before[-1]["training_iteration"], after[0]["training_iteration"] - 1
    recent = sum(row["timestamp"] >= before[-1]["timestamp"] - BOUND_S for row in before)
    allowed = InSlowStore.checkpoint_every + recent
    if last - start > allowed:
        raise Lost(f"killed at round {last}, continued from {start}: at most {allowed} may be lost")
    return [last - start]


STORES = (
    # The object store needs the extra `test-extras`.
    (Fault("driver SIGKILL, slow object store, then --resume", 10, kill_again_and_again),)
    if find_spec("moto")
    else ()
)


# ---- Failing reward functions ------------------------------------------------------------------

EVERY = 40  # on average, the reward function fails on one of this many responses
FAILURES = {
    "raises": "raise RuntimeError('the reward service is gone')",
    "hangs": "time.sleep(3600)",
    "returns NaN": "return float('nan')",
    "returns a list": "return [1.0, 2.0]",
}
REWARD = """
import time
from zlib import crc32

def reward(response, ground_truth):
    if crc32(response.encode()) % {every} == 0:
        {failure}
    return float("." in response)
"""


def reward_settings(storage: Path, failure: str, every: int) -> dict[str, Any]:
    """Write a reward function that fails on 1 in `every` responses, and return its settings."""
    file = storage / "rewards.py"
    file.write_text(REWARD.format(every=every, failure=FAILURES[failure]))
    return {"task.reward": f"{file}:reward", "task.reward_deadline_s": 1.0}


def failing_reward(failure: str, rng: random.Random, repeat: int) -> Outcome:
    """Make one in forty rewards fail. The run must continue and count the failures.

    A call that fails is repeated. It then fails again, because only the response decides whether a
    call fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        storage = Path(directory)
        settings = reward_settings(storage, failure, EVERY)
        experiment = Experiment(storage, APART[repeat % 2], **settings)
        with experiment.start() as running:
            running.ends_well()
        last = experiment.rows()[-1]
        errors, dropped = last["count/reward_errors"], last["count/dropped_reward"]
        closes = last["count/requested"] == last["count/trained"] + last["count/dropped"]
        return Outcome(
            survived=len(experiment.rows()) == ROUNDS and errors > 0 and closes,
            happened=f"{experiment.arm}: {errors:.0f} failures counted, {dropped:.0f} groups "
            f"dropped, {last['count/trained']:.0f} trained on",
        )


def hopeless(failure: str | None, rng: random.Random, repeat: int) -> Outcome:
    """Make every reward fail or, if `failure` is None, make the loss overflow.

    The trial must end with a line that names the cause.
    """
    with tempfile.TemporaryDirectory() as directory:
        storage = Path(directory)
        cause, settings = "optim.max_skipped_steps=3", {"optim.lr": 1e6}
        if failure is not None:
            cause, settings = "task.max_error_rate", reward_settings(storage, failure, 1)
        start = time.monotonic()
        with Experiment(storage, "sync", **settings).start() as running:
            text = running.output()
            status = running.process.returncode
    line = next((line for line in text.splitlines() if line.startswith("failed: ")), "")
    return Outcome(
        survived=status == 1 and cause in line,
        happened=f"status {status} after {time.monotonic() - start:.0f} s: {line[:160]}",
    )


REWARDS = (
    *(Fault(f"reward {failure}", 2, partial(failing_reward, failure)) for failure in FAILURES),
    Fault("reward always raises", 1, partial(hopeless, "raises")),
    Fault("reward always hangs", 1, partial(hopeless, "hangs")),
    Fault("loss overflows", 1, partial(hopeless, None)),
)


# ---- Machines of a cluster ---------------------------------------------------------------------

sys.path.append(str(ROOT / "tests" / "cluster"))
from machines import Machine, missing  # noqa: E402
from ray_cluster import ray_cluster  # noqa: E402

CABLE_S = 20.0  # duration for which a cable is unplugged: longer than the deadline of `DEADLINE`
# A machine has two CPUs, so it has room for one actor. One of the three machines stays free.
ONE_PER_MACHINE: dict[str, Any] = {"resources.learner_cpus": 1.9, "resources.generator_cpus": 1.9}


class OnCluster(Experiment):
    """Trial on a cluster of three machines. A fourth machine runs Ray's head and the command."""

    longest_s = 480.0

    def __init__(self, cluster: Any, storage: Path, arm: str, settings: Mapping[str, Any]) -> None:
        self.cluster = cluster
        super().__init__(storage, arm, **settings)
        for command in (self.command, self.resume_command):
            command += ["--address", cluster.address]

    def launch(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[Any]:
        return self.cluster.machines[0].start(command, self.cluster.environment, stdout=log)

    def family(self, command: int) -> list[psutil.Process]:
        return [process for machine in self.cluster.machines[1:] for process in on(machine)]

    def uninterrupted(self) -> tuple[Any, ...]:
        return uninterrupted_on_cluster(self.arm, tuple(sorted(self.settings.items())))

    def machine_of(self, role: str) -> Machine:
        """Return the machine that runs an actor."""
        for machine in self.cluster.machines[1:]:
            if any(is_ours(process, role) for process in on(machine)):
                return machine
        raise Lost(f"no process of {role} was found")


def on(machine: Machine) -> list[psutil.Process]:
    """Return the processes of a machine."""
    found = []
    for pid in machine.processes():
        with suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return found


@contextmanager
def on_cluster(arm: str, settings: Mapping[str, Any]) -> Iterator[Experiment]:
    if (why := missing()) is not None:
        raise Lost(f"could not be tried: {why}")
    with (
        ray_cluster(4, head_cpus=0) as cluster,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as storage,
    ):
        yield OnCluster(cluster, Path(storage), arm, settings)


@cache
def uninterrupted_on_cluster(arm: str, settings: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
    with on_cluster(arm, dict(settings)) as experiment, experiment.start() as running:
        running.ends_well()
        return fingerprint(experiment)


def lose_machine(role: str) -> Callable[[Any], None]:
    """Return a fault in which an actor's machine loses power and does not come back."""
    return lambda running: running.experiment.machine_of(role).kill()


def unplug(role: str) -> Callable[[Any], None]:
    """Return a fault that unplugs the cable of an actor's machine, and plugs it in again."""

    def strike(running: Any) -> None:
        machine = running.experiment.machine_of(role)
        machine.cut()
        time.sleep(CABLE_S)
        machine.connect()

    return strike


def lose_all_machines(running: Any) -> None:
    """Let the power of all machines fail, and start the cluster again."""
    cluster = running.experiment.cluster
    for machine in cluster.machines:
        machine.kill()
    running.output()
    cluster.begin()
    cluster.join(*cluster.machines[1:])


def of_cluster(name: str, strike: Callable[[Any], object]) -> Fault:
    settings = {**ONE_PER_MACHINE, **DEADLINE}
    return Fault(f"cluster: {name}", 5, at_a_random_moment(strike, APART, settings, on_cluster))


CLUSTER = (
    of_cluster("generator SIGKILL", kill("Generator")),
    of_cluster("learner SIGKILL", kill("Learner")),
    of_cluster("the generator's machine is lost", lose_machine("Generator")),
    of_cluster("the learner's machine is lost", lose_machine("Learner")),
    of_cluster("the generator's cable is unplugged for 20 s", unplug("Generator")),
    of_cluster("the learner's cable is unplugged for 20 s", unplug("Learner")),
    of_cluster("all machines are lost, then --resume", lose_all_machines),
)


# ---- The campaign ------------------------------------------------------------------------------

FAULTS = (*PROCESSES, *STORES, *DISKS, *REWARDS, *CLUSTER)
HEADER = ["fault", "survived", "bit-exact", "recovery s (max)", "rounds repeated (max)"]


def main() -> None:
    parser = parser_of(__doc__, "faults.json", seed="seed for the random moments of the faults")
    parser.add_argument(
        "--fault", action="append", help="run the faults whose names contain this text (all)"
    )
    parser.add_argument("--repeats", type=int, help="maximum number of repeats of each fault")
    args = parser.parse_args()
    chosen = [f for f in FAULTS if not args.fault or any(part in f.name for part in args.fault)]
    if not chosen:
        parser.error(f"--fault: no fault matches; valid: {', '.join(f.name for f in FAULTS)}")
    about = {**provenance(args), "workload": {"rounds": ROUNDS, **SETTINGS}}
    about["workload"]["checkpoint.every"] = CHECKPOINT_EVERY
    kept = read(args.out)
    done = kept["faults"] if same_run(kept, about, "workload") else {}
    outcomes = {name: [Outcome(**outcome) for outcome in list_] for name, list_ in done.items()}
    for fault in chosen:
        repeats = min(fault.repeats, args.repeats or fault.repeats)
        for repeat in range(len(outcomes.get(fault.name, ())), repeats):
            outcome = attempt(fault, random.Random(f"{args.seed}/{fault.name}/{repeat}"), repeat)
            outcomes.setdefault(fault.name, []).append(outcome)
            verdict = "survived" if outcome.survived else "LOST"
            print(f"{fault.name} {repeat}: {verdict}; {outcome.happened}", flush=True)
            write(args.out, {**about, "faults": as_json(outcomes)}, quiet=True)
    print()
    print(align([HEADER, *(row(name, list_) for name, list_ in outcomes.items())]))
    write(args.out, {**about, "faults": as_json(outcomes)})


def as_json(outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    return {name: [asdict(outcome) for outcome in list_] for name, list_ in outcomes.items()}


def attempt(fault: Fault, rng: random.Random, repeat: int) -> Outcome:
    try:
        return fault.strike(rng, repeat)
    except Lost as error:
        return Outcome(survived=False, happened=str(error))
    except Exception:
        # An error in one trial must not end the campaign. The output and the JSON show the error.
        return Outcome(survived=False, happened=traceback.format_exc())


def row(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    seconds = [o.recovered_s for o in outcomes if o.recovered_s is not None]
    promised = [o.exact for o in outcomes if o.exact is not None]
    repeated = [o.rounds_repeated for o in outcomes if o.rounds_repeated is not None]
    return [
        name,
        f"{sum(o.survived for o in outcomes)} of {len(outcomes)}",
        f"{sum(promised)} of {len(promised)}" if promised else "",
        f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else "",
        str(max(repeated, default="")),
    ]


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    run_benchmark(main)
