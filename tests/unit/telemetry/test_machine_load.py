"""CPU time that other work takes from a trial, computed by hand and measured.

The kernel counts idle time in whole ticks. Some tests begin a round at any phase of a tick.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainable.telemetry import machine_load
from grpo_trainable.telemetry.machine_load import (
    DISTURBED_ABOVE,
    Disturbance,
    MachineProcess,
    Meter,
    ProcessTree,
    Reading,
    Usage,
    cpu_cgroup,
    denied_seconds,
    disturbance,
    idle_seconds,
    quota_cores,
    shown_command,
    spent,
    stolen_seconds,
    this_process,
    waited_seconds,
)

STAT = """\
cpu  300 0 200 1000 50 0 0 30 0 0
cpu0 100 0 100 400 20 0 0 10 0 0
cpu1 200 0 100 600 30 0 0 20 0 0
intr 12345
"""


def test_idle_time_is_that_of_the_cores_the_trial_may_use():
    ticks = machine_load.TICKS_PER_S
    assert idle_seconds(STAT, {0, 1}) == (400 + 20 + 600 + 30) / ticks
    assert idle_seconds(STAT, {1}) == (600 + 30) / ticks


def test_a_platform_without_an_account_of_its_cores_has_no_figure():
    assert idle_seconds("cpu  0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0\n", {0}) is None
    assert idle_seconds(STAT, {0, 7}) is None


def test_a_meter_without_proc_gives_nothing(monkeypatch, tmp_path):
    meter = Meter()
    monkeypatch.setattr(machine_load, "PROC", tmp_path)
    meter.start_measuring()
    assert meter.take() is None


def test_other_work_by_hand():
    # Two cores for one second: 0.4 s idle and 0.9 s ours, so 0.7 s belong to others.
    before = Reading(10.0, 100.0, 2.0, {7: Usage(1, 5.0)}, frozenset({7}))
    after = Reading(11.0, 100.4, 2.0, {7: Usage(1, 5.9)}, frozenset({7}))
    got = disturbance(before, after, cores=2, quota=2)
    assert got.foreign_s == pytest.approx(0.7)
    # For each core, one tick of 10 ms is subtracted for idle time and one for iowait time.
    assert got.fraction == pytest.approx((0.7 - 0.04) / 2)


@pytest.mark.parametrize(
    ("cores", "own_s", "others_s", "waited_s", "stolen_s", "fraction"),
    [
        # seven busy cores of a large server take nothing from a trial on two cores
        (64, 2.0, 7.0, 0.01, 0.0, 0.01 / 64),
        (64, 8.0, 32.0, 0.1, 0.0, 0.1 / 64),
        (2, 1.0, 1.0, 0.5, 0.0, 0.25),
        (2, 1.0, 0.5, 0.4, 0.0, 0.2),  # a core was free, but at another time
        # most of the wait was for the trial's own threads
        (2, 1.9, 0.1, 0.5, 0.0, (0.1 - 0.04) / 2),
        (2, 1.0, 0.5, 0.0, 0.4, 0.2),  # another virtual machine took the time
    ],
)
def test_others_take_no_more_than_the_trial_waited_for(
    cores, own_s, others_s, waited_s, stolen_s, fraction
):
    before = Reading(0.0, 0.0, 0.0, {7: Usage(1, 0.0)}, frozenset({7}), 5.0, {7: 3.0})
    idle_s = cores - own_s - others_s
    after = Reading(
        *(1.0, idle_s, 0.0, {7: Usage(1, own_s)}, frozenset({7})),
        *(5.0 + stolen_s, {7: 3.0 + waited_s, 8: 9.0}),  # process 8 has just been added
    )
    assert disturbance(before, after, cores, cores).fraction == pytest.approx(fraction)


def test_what_was_stolen_is_that_of_the_cores_the_trial_may_use():
    assert stolen_seconds(STAT, {0, 1}) == (10 + 20) / machine_load.TICKS_PER_S
    assert stolen_seconds(STAT, {7}) == 0.0


def test_how_long_threads_wait_is_what_the_kernel_tells(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_load, "PROC", tmp_path)
    for thread, waited_ns in ((7, 1_500_000_000), (71, 250_000_000)):
        (tmp_path / f"7/task/{thread}").mkdir(parents=True)
        (tmp_path / f"7/task/{thread}/schedstat").write_text(f"99 {waited_ns} 3\n")
    assert waited_seconds([7, 8]) == {7: 1.75}
    assert waited_seconds([8]) is None


def test_time_that_a_quota_denied_counts_as_a_share_of_the_quota():
    # A container may use one of a machine's four cores, and was stopped for 0.3 s of 1 s.
    nothing: dict[int, Usage] = {}
    before = Reading(0.0, 0.0, 0.0, nothing, frozenset())
    after = Reading(1.0, 4.0, 0.3, nothing, frozenset())
    assert disturbance(before, after, cores=4, quota=1).fraction == pytest.approx(0.3)


def test_the_fraction_stays_between_0_and_1():
    assert Disturbance(0.0, None, 9.0, cores=2, quota=2, seconds=1.0).fraction == 1.0
    assert Disturbance(0.0, None, 0.0, cores=2, quota=2, seconds=0.0).fraction == 0.0


@pytest.mark.slow
@given(
    seconds=st.floats(0.1, 5.0),
    cores=st.integers(1, 64),
    busy=st.floats(0, 1),
    phases=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
)
def test_no_phase_of_the_ticks_marks_an_undisturbed_round(seconds, cores, busy, phases):
    # The worst case: the fields of all cores are rounded in the same direction.
    reading = ticked(seconds, cores, own=busy, others=0.0, phases=phases)
    assert reading.fraction <= 1e-9


@pytest.mark.slow
@given(
    seconds=st.floats(0.2, 5.0),
    phases=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
)
def test_one_busy_core_beside_two_is_marked_in_every_phase_of_the_ticks(seconds, phases):
    # The other process gets a third of a machine that the trial fills.
    assert ticked(seconds, 2, own=2 / 3, others=1 / 3, phases=phases).fraction > DISTURBED_ABOVE


def ticked(
    seconds: float, cores: int, *, own: float, others: float, phases: tuple[float, ...]
) -> Disturbance:
    """Return the disturbance that ticks show if the trial and others use these shares of all cores.

    At the start, idle and iowait are past the last whole tick by the fractions in `phases`.
    """
    idle_ticks = max(0.0, 1 - own - others) * seconds * machine_load.TICKS_PER_S
    waits = (idle_ticks * 0.9, idle_ticks * 0.1)  # idle, iowait
    shown = sum(int(phase + ticks) for phase, ticks in zip(phases, waits, strict=True))
    used = {7: Usage(1, own * seconds * cores)}
    return disturbance(
        Reading(0.0, 0.0, 0.0, {7: Usage(1, 0.0)}, frozenset({7})),
        Reading(seconds, cores * shown / machine_load.TICKS_PER_S, 0.0, used, frozenset({7})),
        cores,
        cores,
    )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # The process kept working, and reaped a child that was never seen.
        ({7: Usage(1, 5.0, 1.0)}, {7: Usage(1, 5.5, 1.25)}, 0.75),
        # A child of ours ended: of the 3 s reaped, 2.5 s had already been counted.
        (
            {7: Usage(1, 5.0, 1.0), 8: Usage(7, 2.0, 0.5)},
            {7: Usage(1, 5.0, 4.0)},
            0.5,
        ),
        # A process that started in between and has already reaped a child.
        ({}, {7: Usage(1, 0.5, 0.25)}, 0.75),
        # An idle worker that became our actor: its earlier time does not count as ours.
        ({7: Usage(1, 5.0)}, {7: Usage(1, 5.5, 9.0)}, 0.5),
        # The pid of the process was given to another process.
        ({7: Usage(1, 5.0, 0.0)}, {7: Usage(1, 0.25, 0.0)}, 0.25),
        # A child that nobody reaped, because its parent ignores child exits.
        ({7: Usage(1, 5.0, 0.0), 8: Usage(7, 2.0, 0.0)}, {7: Usage(1, 5.5, 0.0)}, 0.5),
    ],
)
def test_own_cpu_time_by_hand(before, after, expected):
    others = {99: Usage(1, 100.0)}
    assert spent({**before, **others}, {**after, 99: Usage(1, 200.0)}, {7}) == expected


@pytest.mark.parametrize(("used_s", "found"), [(0.6, 8), (0.4, None)])
def test_the_process_that_took_more_than_half_is_the_culprit(used_s, found):
    # One core for one second: others took 0.9 s, of which process 9 took a little.
    before = Reading(0.0, 0.0, 0.0, {7: Usage(1, 5.0), 8: Usage(1, 9.0)}, frozenset({7}))
    used = {7: Usage(1, 5.1), 8: Usage(1, 9.0 + used_s), 9: Usage(1, 0.05)}
    got = disturbance(before, Reading(1.0, 0.0, 0.0, used, frozenset({7})), cores=1, quota=1)
    assert got.foreign_s == pytest.approx(0.9)
    assert got.culprit == found


def test_the_note_names_a_culprit_that_still_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_load, "PROC", tmp_path)
    (tmp_path / "8").mkdir()
    (tmp_path / "8/comm").write_text("pip\n")
    fields = {"waited_s": None, "denied_s": 0.0, "cores": 2, "quota": 2, "seconds": 1.0}
    found = Disturbance(0.9, **fields, culprit=8)
    assert found.note(12, counts=False) == (
        "other work took 43% of this machine's CPU time in round 12, most of it in process 8 "
        "(pip); speeds exclude disturbed rounds (time/disturbed_fraction)"
    )
    assert found.note(12, counts=True).endswith(
        "speeds include disturbed rounds, because callbacks.leave_out_disturbed=false "
        "(time/disturbed_fraction)"
    )
    for unknown in (None, 9):
        note = Disturbance(0.86, **fields, culprit=unknown).note(12, counts=False)
        assert "round 12; speeds" in note


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["/usr/bin/python3", "-m", "pip", "install", "torch"], "python3 -m pip"),
        (["/home/me/.venv/bin/python", "/home/me/train.py", "--key=1"], "python train.py"),
        (["python", "-u", "eval/run.py"], "python -u run.py"),
        (["java", "-jar", "/opt/server.jar"], "java -jar server.jar"),
        (["git", "fetch", "origin"], "git fetch origin"),
        (["sshpass", "-p", "hunter2", "ssh"], "sshpass -p"),
        (["mysql", "-phunter2", "shop"], "mysql -p"),
        (["curl", "--user", "me:hunter2"], "curl --user"),
        (["curl", "https://host/hunter2"], "curl"),
        (["psql", "password=hunter2"], "psql"),
        (["python", "-c", "token = 'hunter2'"], "python -c"),
        (["ray::Generator.sample"], "comm"),
        (["postgres: shop 10.0.0.1 idle"], "comm"),
        (["x" * 41], "comm"),
        ([], "comm"),
    ],
)
def test_a_process_is_shown_by_the_first_words_of_its_command_without_secrets(
    monkeypatch, tmp_path, command, shown
):
    monkeypatch.setattr(machine_load, "PROC", tmp_path)
    (tmp_path / "8").mkdir()
    (tmp_path / "8/comm").write_text("comm\n")
    (tmp_path / "8/cmdline").write_text("".join(f"{word}\0" for word in command))
    assert shown_command(8) == shown
    assert shown_command(9) == ""


BUSY = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


def test_children_are_ours_whatever_their_session_and_orphans_of_others_are_not():
    child = subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True)
    shell = ["sh", "-c", '"$0" -c "$1" >/dev/null 2>&1 & echo $!', sys.executable, BUSY]
    orphan = int(subprocess.run(shell, stdout=subprocess.PIPE, text=True, check=True).stdout)
    try:
        usages, own = ProcessTree({os.getpid()}).read()
        assert {os.getpid(), child.pid} <= own
        assert orphan not in own
        assert usages[child.pid].parent == os.getpid()
        assert usages[orphan].cpu_s >= 0
    finally:
        child.kill()
        child.wait()
        os.kill(orphan, 9)


def test_a_process_is_ours_once_it_is_added_and_only_on_this_machine():
    shell = ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"]
    orphan = int(subprocess.run(shell, stdout=subprocess.PIPE, text=True, check=True).stdout)
    try:
        meter = Meter()
        meter.add(MachineProcess("another machine", orphan))
        assert orphan not in owned(meter)
        meter.add(MachineProcess(this_process().machine, orphan))
        assert orphan in owned(meter)
    finally:
        os.kill(orphan, 9)


def test_a_place_says_how_far_a_process_is_behind_others():
    script = (
        "from grpo_trainable.telemetry.machine_load import this_process; import os; os.nice(7); "
        "print(this_process().niceness)"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(child.stdout) == min(19, this_process().niceness + 7)


def owned(meter: Meter) -> frozenset[int]:
    reading = meter._read()
    assert reading is not None
    return reading.own


@pytest.mark.slow
def test_own_work_is_not_taken_for_that_of_others():
    """With nanosecond clocks, our own share is exact even on a busy machine."""
    meter = Meter()
    before = meter._read()
    spin = os.times().user + 0.1
    while os.times().user < spin:
        pass
    after = meter._read()
    assert before is not None
    assert after is not None
    assert spent(before.processes, after.processes, after.own) >= 0.09


WORKERS = {  # pid: (parent, name, command)
    1: (0, "init", ""),
    10: (1, "python", "python launch/tune.py"),
    11: (10, "gcs_server", "gcs_server --session-name=session_2026-01-01_9"),
    12: (10, "raylet", "raylet --session-name=session_2026-01-01_9"),
    20: (12, "ray::GRPO.train", "ray::GRPO.train"),
    21: (12, "ray::Generator.", "ray::Generator.sample"),
    22: (21, "python", "python -m score_worker"),
    23: (12, "ray::GRPO.train", "ray::GRPO.train"),
    24: (12, "ray::IDLE", "ray::IDLE"),
    25: (12, "ray::RuntimeEnv", "ray::RuntimeEnvAgent"),
    26: (12, "python", "python default_worker.py"),
    30: (1, "log_monitor", "python log_monitor.py --logs-dir=/tmp/ray/session_2026-01-01_9/logs"),
    31: (1, "python", "python train.py"),
    32: (31, "raylet", "raylet --session-name=session_2026-01-01_8"),
    33: (32, "ray::IDLE", "ray::IDLE"),
}


def test_of_ray_its_services_are_ours_and_other_trials_are_not(monkeypatch, tmp_path):
    for pid, (parent, name, command) in WORKERS.items():
        directory = tmp_path / str(pid)
        directory.mkdir()
        (directory / "comm").write_text(name + "\n")
        (directory / "cmdline").write_text(command.replace(" ", "\0"))
        (directory / "stat").write_text(f"{pid} ({name}) S {parent} " + "0 " * 30)
    monkeypatch.setattr(machine_load, "PROC", tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: 12)
    tree = ProcessTree({20, 21})
    ours = {pid for pid in WORKERS if tree._is_own(pid)}
    assert ours == {11, 12, 20, 21, 22, 24, 25, 26, 30}
    with_driver = ProcessTree({10, 20, 21})
    assert {pid for pid in WORKERS if with_driver._is_own(pid)} == ours | {10}


@pytest.mark.parametrize(
    ("membership", "directory", "files", "denied_s", "cores"),
    [
        (
            "0::/kube/pod",
            "kube/pod",
            {"cpu.stat": "usage_usec 5\nthrottled_usec 1500000\n", "cpu.max": "200000 100000\n"},
            1.5,
            2.0,
        ),
        (
            "0::/",
            "",
            {"cpu.stat": "throttled_usec 0\n", "cpu.max": "max 100000"},
            0.0,
            float("inf"),
        ),
        (
            "9:name=systemd:/\n4:cpu,cpuacct:/docker/1\n0::/",
            "cpu,cpuacct",  # only the container's part of the tree is mounted
            {
                "cpu.stat": "nr_throttled 3\nthrottled_time 250000000\n",
                "cpu.cfs_quota_us": "50000\n",
                "cpu.cfs_period_us": "100000\n",
            },
            0.25,
            0.5,
        ),
        (
            "1:cpu:/",
            "cpu",
            {
                "cpu.stat": "throttled_time 0\n",
                "cpu.cfs_quota_us": "-1\n",
                "cpu.cfs_period_us": "1",
            },
            0.0,
            float("inf"),
        ),
    ],
)
def test_quota_and_the_time_it_denied(
    membership, directory, files, denied_s, cores, monkeypatch, tmp_path
):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(membership + "\n")
    (groups / directory).mkdir(parents=True)
    for name, text in files.items():
        (groups / directory / name).write_text(text)
    monkeypatch.setattr(machine_load, "PROC", proc)
    monkeypatch.setattr(machine_load, "CGROUPS", groups)
    found = cpu_cgroup()
    assert found == groups / directory
    assert denied_seconds(found) == denied_s
    assert quota_cores(found) == cores


def test_without_a_cpu_controller_nothing_is_denied(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_load, "PROC", tmp_path)
    assert cpu_cgroup() is None
    assert (denied_seconds(None), quota_cores(None)) == (0.0, float("inf"))
