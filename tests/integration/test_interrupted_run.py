"""An experiment that is killed, resumed with damaged checkpoints, interrupted and resumed again.

At the end, its files still contain every round exactly once.
"""

from __future__ import annotations

import csv
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from commands import SMALL, parts, spans, trial_directories, tune, tune_command
from conftest import rows, wait_for
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_trainable.storage.checkpointing import checkpoint_round
from reports.experiment import read_experiment

ROUNDS = 20
BETWEEN = 4  # rounds from one checkpoint to the next
EVALUATED = [0, 5, 10, 15, 20]
RESUME = ["--resume", "must", "--name", "cut"]
ROLES = ("Generator", "Learner", "DetailedGRPO")


@pytest.fixture(scope="module")
def start():
    """Yield a function that starts the command. Kill the processes that a failing test leaves."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, storage: Path) -> subprocess.Popen[str]:
        command = tune_command(*arguments, storage=storage)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=storage, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def actors(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes of actors among the descendants of a command.

    Ray's own processes are left out, because some of them notice late that their driver has ended.
    """
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            title = " ".join(child.cmdline())
        except psutil.Error:
            continue  # the process has ended meanwhile
        if any(f"ray::{role}" in title for role in ROLES):
            found.append(child)
    return found


def all_actors(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until the processes of all three actors have their titles, and return the processes."""
    return wait_for(lambda: found if len(found := actors(process)) == len(ROLES) else None, 120)


def noted(experiment: Path, checkpoint: str) -> bool:
    """Return True if Tune's snapshot, which is written once a second, names the checkpoint."""
    states = [path.read_text() for path in experiment.glob("experiment_state-*.json")]
    # In the snapshot, values that JSON cannot express are pickles in hexadecimal.
    return any(checkpoint in state or checkpoint.encode().hex() in state for state in states)


@dataclass
class Story:
    """Observations of the command and of the first of its two trials."""

    storage: Path
    outlived_the_driver: list[psutil.Process] = field(default_factory=list)
    rows_when_killed: int = 0
    status: int | None = None  # exit status of the interrupted command
    printed: str = ""
    outlived_the_interrupt: list[psutil.Process] = field(default_factory=list)
    rows_when_interrupted: int = 0
    saved_round: int = 0
    began: int = 0  # number of trials that had begun when the command was interrupted

    @property
    def experiment(self) -> Path:
        return self.storage / "cut"

    @property
    def first(self) -> Path:
        return trial_directories(self.experiment)[0]


@pytest.fixture(scope="module")
def killed(start, tmp_path_factory) -> Story:
    """Kill the driver after the third checkpoint. Damage the third and all later checkpoints.

    The generator stands still until Tune has noted that checkpoint, so the trial cannot end first.
    """
    story = Story(tmp_path_factory.mktemp("storage"))
    argv = ["--space", "async_vs_sync", "--name", "cut", "--set", "arm=async_k1", *SMALL]
    argv += ["--set", f"eval.every={EVALUATED[1]}", "--set", "checkpoint.keep=null"]
    argv += ["--iterations", str(ROUNDS), "--checkpoint-every", str(BETWEEN), "--num-samples", "2"]
    process = start(*argv, storage=story.storage)
    family = all_actors(process)
    (generator,) = (actor for actor in family if "ray::Generator" in " ".join(actor.cmdline()))
    wait_for(lambda: [*story.experiment.glob("*/checkpoint_000002/manifest.json")], 120)
    generator.suspend()
    wait_for(lambda: noted(story.experiment, "checkpoint_000002"), 120)
    generator.resume()
    process.kill()
    process.wait()
    _, story.outlived_the_driver = psutil.wait_procs(family, timeout=60)
    story.rows_when_killed = len(rows(story.first))
    _, _, *others = sorted(story.first.glob("checkpoint_*/manifest.json"))
    for path in others:  # the last checkpoint may have no manifest, and then needs no damage
        with (path.parent / "policy-00001-of-00001.safetensors").open("r+b") as file:
            file.truncate(1000)
    return story


@pytest.fixture(scope="module")
def interrupted(start, killed: Story) -> Story:
    """Resume the command, and send it SIGINT between two checkpoints."""
    process = start(*RESUME, storage=killed.storage)
    enough = 2 * BETWEEN + 2

    def goes_on() -> bool:
        history = rows(killed.first)
        return len(history) > enough and history[enough]["iterations_since_restore"] <= 3

    wait_for(goes_on, 120)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    killed.printed, _ = process.communicate(timeout=120)
    _, killed.outlived_the_interrupt = psutil.wait_procs(children, timeout=60)
    killed.status = process.returncode
    killed.began = len(trial_directories(killed.experiment))
    killed.rows_when_interrupted = len(rows(killed.first))
    killed.saved_round = checkpoint_round(max(killed.first.glob("checkpoint_*")))
    return killed


@pytest.fixture(scope="module")
def ended(interrupted: Story) -> Story:
    resumed = tune(*RESUME, storage=interrupted.storage)
    assert resumed.returncode == 0, resumed.stderr
    return interrupted


def test_actors_end_with_a_killed_driver(killed):
    assert not killed.outlived_the_driver
    assert 3 * BETWEEN <= killed.rows_when_killed < ROUNDS


def test_damaged_checkpoints_give_way_to_the_newest_whole_one(ended):
    last_whole = 2 * BETWEEN
    assert f"continuing from checkpoint_000001 (round {last_whole})" in ended.printed
    assert rows(ended.first)[last_whole]["iterations_since_restore"] == 1


def test_an_interrupt_saves_the_trial_that_runs_and_ends_everything(interrupted):
    assert interrupted.status == 130
    assert not interrupted.outlived_the_interrupt
    assert "interrupted: 0 of 2 trials done, 1 not started" in interrupted.printed
    assert f"saved after round {interrupted.saved_round} of {ROUNDS}" in interrupted.printed
    assert "--resume must --name cut" in interrupted.printed.splitlines()[-1]
    assert interrupted.began == 1
    assert interrupted.rows_when_interrupted < ROUNDS
    assert interrupted.saved_round == interrupted.rows_when_interrupted


def test_a_resume_goes_on_where_the_interrupt_saved_and_then_runs_the_other_trial(ended):
    first, second = (rows(trial) for trial in trial_directories(ended.experiment))
    assert first[ended.saved_round]["iterations_since_restore"] == 1
    assert second[0]["timestamp"] >= first[-1]["timestamp"]
    for history in (first, second):
        assert history[-1]["count/requested"] == history[-1]["count/trained"] == ROUNDS * 4


def test_no_round_is_there_twice_or_missing_in_any_file(ended):
    trial = ended.first
    every = list(range(1, ROUNDS + 1))
    assert [row["training_iteration"] for row in rows(trial)] == every
    with (trial / "progress.csv").open(newline="") as file:
        assert [int(row["training_iteration"]) for row in csv.DictReader(file)] == every
    for kind in ("rollouts", "versions"):
        assert sorted({entry["round"] for entry in parts(trial, kind)}) == every
    assert len(parts(trial, "rollouts")) == ROUNDS * 16
    held_out = [entry["round"] for entry in parts(trial, "evaluations")]
    assert held_out == [round_ for round_ in EVALUATED for _ in range(8)]
    assert len([span for span in spans(trial)["trial"] if span[0] == "round"]) == ROUNDS
    events = EventAccumulator(str(trial), {"scalars": 0, "histograms": 0, "tensors": 0})
    events.Reload()
    scalars = events.Tags()["scalars"]
    steps = {name: [event.step for event in events.Scalars(name)] for name in scalars}
    # This metric needs tokens that the learner's current weights sampled. At lag 1, only the first
    # round and rounds that a resume sampled again have such tokens.
    known = steps.pop("kl/sampler_mismatch_nats")
    assert known[0] == 1
    assert len(known) <= 3
    assert {name: own for name, own in steps.items() if own != every} == {}
    assert [event.step for event in events.Histograms("rollouts/reward")] == every
    texts = [event.step for event in events.Tensors("examples/held_out/text_summary")]
    assert texts == [1, *EVALUATED[1:]]
    records = read_experiment(ended.experiment).trials
    assert len(records) == 2
    for record in records:
        assert [row["training_iteration"] for row in record.rows] == every
        assert [round_ for round_, _, _ in record.evaluated()] == EVALUATED
