"""Trackers with their libraries: after SIGKILL and a resume, one run per trial, each step once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, SMALL, trial_directories, tune_command
from conftest import rows, wait_for
from tracker_files import REWARD, stored

from callbacks.trackers.tracked_run import TRACKERS
from grpo_trainable.plugins import missing_library

KEY = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import os, signal, sys
from pathlib import Path

from callbacks.trackers.tracked_run import TrackedTrial, open_run, send_rows

tracker, rounds, report = sys.argv[1:]
settings = {"arm": "sync", "optim": {"lr": 1e-4}}
for trial in ("a", "b"):
    described = TrackedTrial(experiment="lag", directory=trial, name="sync/0", settings=settings)
    run = open_run(tracker, described)
    send_rows(
        run,
        [
            {
                "training_iteration": n,
                "reward/train_mean": n / 8,
                "env/pass@1_mean": 0.5,
                "config": settings,
            }
            for n in range(1, int(rounds) + 1)
        ],
    )
    if not report:
        continue
    files = {name: Path(report, name) for name in ("report.html", "plots/a.png")}
    run.attach(files)
    run.close("finished")
if not report:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def environment(directory: Path) -> dict[str, str]:
    """Return an environment in which the trackers write only to `directory`."""
    home = {name: str(directory / "home") for name in ("HOME", "WANDB_DATA_DIR", "WANDB_CACHE_DIR")}
    return {
        **os.environ,
        **home,
        "WANDB_CONFIG_DIR": home["HOME"],
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": KEY,
        "WANDB_DIR": str(directory),
        "MLFLOW_TRACKING_URI": f"sqlite:///{directory}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(directory),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }


def installed(tracker: str) -> bool:
    return missing_library(tracker, "") is None


@pytest.mark.parametrize("tracker", TRACKERS)
def test_after_a_kill_each_run_is_continued_and_gets_the_report(
    tracker: str, tmp_path: Path
) -> None:
    if not installed(tracker):
        pytest.skip(f"needs the extra: pip install -e '.[{tracker}]'")
    (tmp_path / "plots").mkdir()
    for name in ("report.html", "plots/a.png"):
        (tmp_path / name).write_text(name)
    for rounds, report, status in (("5", "", -signal.SIGKILL), ("8", str(tmp_path), 0)):
        command = [sys.executable, "-c", SCRIPT, tracker, rounds, report]
        run = subprocess.run(
            command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True
        )
        assert run.returncode == status, run.stderr
    steps, files = stored(tracker, tmp_path)
    expected = [(n, n / 8) for n in range(1, 9)]
    assert steps == {"lag-a": expected, "lag-b": expected}
    for attached in files.values():
        assert attached == {"report.html", "plots/a.png"}


def test_a_killed_command_is_resumed_with_its_trackers(tmp_path: Path) -> None:
    trackers = [tracker for tracker in TRACKERS if installed(tracker)]
    if not trackers:
        pytest.skip("needs an extra: wandb, mlflow or trackio")
    argv = ["--space", "async_vs_sync", "--set", "arm=colocated_k1", *SMALL, "--name", "cut"]
    argv += ["--iterations", "8", "--checkpoint-every", "2"]
    argv += [word for tracker in trackers for word in ("--tracker", tracker)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options = {"cwd": tmp_path, "env": environment(tmp_path), **pipes}
    killed = subprocess.Popen(tune_command(*argv, storage=tmp_path / "storage"), **options)
    experiment = tmp_path / "storage" / "cut"

    def has_rows(count: int) -> bool:
        found = trial_directories(experiment)
        return bool(found) and len(rows(found[0])) >= count

    try:
        wait_for(lambda: has_rows(5) or killed.poll() is not None, 300)
    finally:
        killed.kill()
        printed, _ = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, printed
    resume = tune_command("--resume", "--name", "cut", storage=tmp_path / "storage")
    resumed = subprocess.run(resume, timeout=300, check=False, **options)
    assert resumed.returncode == 0, resumed.stdout

    (trial,) = trial_directories(experiment)
    expected = [(row["training_iteration"], row[REWARD]) for row in rows(trial)]
    assert [round_ for round_, _ in expected] == list(range(1, 9))
    for tracker in trackers:
        steps, files = stored(tracker, tmp_path)
        (found,) = steps.values()
        assert found == expected  # at lag 0, a repeated round equals its first version
        (attached,) = files.values()
        assert {"report.html", "report.json", "table.csv"} < attached
        assert f"{tracker}: the report is attached to 1 run" in resumed.stdout
    assert [path for path in tmp_path.rglob("*") if contains(path, KEY)] == []
    assert KEY not in printed + resumed.stdout


def contains(path: Path, key: str) -> bool:
    return path.is_file() and key.encode() in path.read_bytes()
