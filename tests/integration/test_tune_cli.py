"""The command as a user runs it: in a process of its own, with a Ray of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    *("--set", "eval.prompts=8", "--set", "eval.samples=1", "--set", "rollout.prompts=4"),
    *("--set", "rollout.max_new_tokens=12"),
]


def command(*arguments: str, storage: Path) -> list[str]:
    script = str(ROOT / "launch" / "tune.py")
    return [sys.executable, script, *arguments, "--storage", str(storage)]


def run(*arguments: str, storage: Path, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """The command from start to end, in the storage's directory."""
    return subprocess.run(
        command(*arguments, storage=storage),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=storage,
        check=False,
    )


def rows(trial: Path) -> list[dict]:
    return [json.loads(line) for line in (trial / "result.json").read_text().splitlines()]


def trial_directories(experiment: Path) -> list[Path]:
    return sorted(path.parent for path in experiment.glob("*/result.json"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two arms, four rounds: the experiment's directory and what was printed."""
    storage = tmp_path_factory.mktemp("storage")
    argv = ["--space", "async_vs_sync", "--name", "short", "--iterations", "4", *SMALL]
    # k=1 merges the colocated arms into one; with lag=1 fixed that arm would be refused.
    done = run(*argv, "--set", "k=1", "--set", "eval.every=2", storage=storage)
    assert done.returncode == 0, done.stderr
    return storage / "short", done.stdout


def test_every_arm_ends_and_the_table_compares_them(finished):
    experiment, out = finished

    assert len(trial_directories(experiment)) == 3
    table = {line.split()[0]: line for line in out[out.index("arm  ") :].splitlines() if line}
    assert {"colocated_k1", "sync", "async_k1"} <= table.keys()
    assert "1.00x" in table["colocated_k1"]
    assert "tensorboard --logdir" in out


def test_result_json_and_tensorboard_hold_the_same_names_and_values(finished):
    experiment, _ = finished
    for trial in trial_directories(experiment):
        results = rows(trial)
        assert [row["training_iteration"] for row in results] == [1, 2, 3, 4]

        events = EventAccumulator(str(trial))
        events.Reload()
        scalars = {tag.removeprefix("ray/tune/") for tag in events.Tags()["scalars"]}
        for name in ("reward/eval_mean", "time/rollout_s", "lag/max", "version/learner"):
            assert name in scalars
            logged = [event.value for event in events.Scalars(f"ray/tune/{name}")]
            assert logged == pytest.approx([row[name] for row in results], rel=1e-5)


def test_hparams_are_what_was_searched(finished):
    experiment, _ = finished
    trial = trial_directories(experiment)[0]
    events = EventAccumulator(str(trial))
    events.Reload()

    plugin = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for name in (b"arm", b"seed"):
        assert name in plugin


def test_params_json_has_every_key_in_its_own_place(finished):
    experiment, _ = finished
    for trial in trial_directories(experiment):
        params = json.loads((trial / "params.json").read_text())
        assert params["rounds"] == 4
        assert params["optim"]["lr"] == 2e-4
        assert params["arm"] in trial.name


def test_ctrl_c_ends_everything_and_resume_finishes_from_the_last_checkpoint(tmp_path):
    argv = ["--space", "async_vs_sync", "--name", "cut", "--set", "arm=async_k1", *SMALL]
    process = subprocess.Popen(
        command(*argv, "--iterations", "40", "--checkpoint-every", "2", storage=tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    wait_for(lambda: list((tmp_path / "cut").glob("*/checkpoint_*/manifest.json")), 120)
    children = psutil.Process(process.pid).children(recursive=True)

    interrupted = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=25)
    _, alive = psutil.wait_procs(children, timeout=25 - (time.monotonic() - interrupted))

    assert process.returncode == 130
    assert not alive
    assert "--resume must --name cut" in out

    (trial,) = trial_directories(tmp_path / "cut")
    before = len(rows(trial))
    assert before < 40
    resumed = run("--resume", "must", "--name", "cut", storage=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    iterations = [row["training_iteration"] for row in rows(trial)]
    assert iterations[-1] == 40
    assert set(iterations) == set(range(1, 41))
    # It went on from a checkpoint: not from the start.
    assert iterations.count(1) == 1
    last = rows(trial)[-1]
    assert last["count/requested"] == last["count/trained"] == 40 * 4


def wait_for(condition, timeout_s: float):
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)
    return found


def test_a_trial_that_fails_is_named_and_the_status_is_1(tmp_path):
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def broken(response, ground_truth):\n    raise RuntimeError('no reward')\n")
    argv = ["--space", "async_vs_sync", "--name", "broken", "--set", "arm=colocated_k1", *SMALL]

    done = run(
        *argv,
        *("--iterations", "2", "--max-failures", "0"),
        *("--set", "task.reward=rewards.py:broken"),
        storage=tmp_path,
        timeout_s=120,
    )

    assert done.returncode == 1
    assert "failed: " in done.stdout
    assert "no reward" in done.stdout
