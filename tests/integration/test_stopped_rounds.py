"""Ctrl-C and SIGTERM in the middle of a round, in our command and in a user's own Tuner.

The test makes the engine or the loss hang, so each signal arrives at a known moment of a round.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import ROOT, SMALL, trial_directories, tune_command
from conftest import checkpoints, rows, untimed, wait_for

from grpo_trainable.storage.checkpointing import MANIFEST, STATE, checkpoint_round
from launch.tune import parse_arguments, plan_of

ROUNDS = 12
ENOUGH_S = 180.0  # much longer than the command takes to start

# While the file NAME exists, `hang(NAME)` does not return. After 1 s, it creates NAME-began. One
# second is long enough to be reported as lost work.
OWN = """
import time
from pathlib import Path

HERE = Path(__file__).parent


def hang(name):
    while (HERE / name).exists():
        time.sleep(1.0)
        (HERE / f"{name}-began").touch()


def score(response, ground_truth):
    return float(len(response) % 3)


def double_clip(log_probs, old_log_probs, advantages, mask, *, clip_low, clip_high):
    hang("loss")
    return -(log_probs - old_log_probs).exp().clamp(1 - clip_low, 1 + clip_high) * advantages


class Engine:
    def __init__(self, setup):
        # Processes that only score import this file too, and importing torch takes a second.
        from grpo_trainable.engines.torch_engine import build_torch_engine

        self._engine = build_torch_engine(setup)
        self.load = self._engine.load

    version = property(lambda self: self._engine.version)
    round = property(lambda self: self._engine.round)

    def generate(self, requests, between_tokens):
        hang("engine")
        return self._engine.generate(requests, between_tokens)
"""

# The script's arguments are the storage path, the config file and the file for the results.
OWN_TUNER = """
import json, sys
from pathlib import Path
import ray
from ray import tune
from callbacks import grpo_callbacks
from grpo_trainable.trainable import register

storage, config, results = sys.argv[1:]
register()
# Without an address, Ray would join a cluster of this machine, or wait for one that has ended.
ray.init(address="local", include_dashboard=False)
tuner = tune.Tuner(
    "GRPO",
    param_space=json.loads(Path(config).read_text()),
    run_config=tune.RunConfig(
        name="own", storage_path=storage, callbacks=grpo_callbacks(), verbose=1
    ),
)
(result,) = tuner.fit()
Path(results).write_text(json.dumps({"checkpoint": result.checkpoint.path}))
"""


class Experiment:
    """An experiment in a directory that also contains a user's file with the code `OWN`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.errors = directory / "errors.txt"
        (directory / "own.py").write_text(OWN)
        self.process: subprocess.Popen[str] | None = None

    def start(self, command: list[str]) -> psutil.Process:
        """Start a command whose standard error is written to a file."""
        with self.errors.open("w") as errors:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(
                command,
                cwd=self.directory,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
        return psutil.Process(self.process.pid)

    def start_command(self, arm: str) -> psutil.Process:
        command = tune_command(*self.arguments(arm), storage=self.directory)
        return self.start(command)

    def arguments(self, arm: str) -> list[str]:
        file = self.directory / "own.py"
        own = {
            "engine": f"{file}:Engine",
            "loss.type": f"{file}:double_clip",
            "task.reward": f"{file}:score",
            "task.reward_deadline_s": "300",
            "eval.every": "1000",  # evaluate only before the first round and after the last
        }
        settings = [part for key, value in own.items() for part in ("--set", f"{key}={value}")]
        argv = ["--space", "async_vs_sync", "--name", "own", "--set", f"arm={arm}", *SMALL]
        argv += [*settings, "--iterations", str(ROUNDS), "--checkpoint-every", "1000"]
        return argv

    @property
    def trial(self) -> Path:
        (trial,) = trial_directories(self.directory / "own")
        return trial

    def hang_in(self, name: str) -> int:
        """Wait for the second row, then make `name` hang. Return the number of rows."""
        directory = self.directory / "own"
        wait_for(lambda: any(len(rows(t)) >= 2 for t in trial_directories(directory)), ENOUGH_S)
        (self.directory / name).touch()
        wait_for((self.directory / f"{name}-began").exists, ENOUGH_S)
        finished = len(rows(self.trial))
        assert finished < ROUNDS
        return finished

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group, as a terminal, `timeout` and Slurm do."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def close_output(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.stdout.close()

    def wait(self) -> int:
        """Wait until the command ends, and return its exit status."""
        assert self.process is not None
        return self.process.wait(timeout=ENOUGH_S)

    def end(self) -> tuple[int, str]:
        """Wait until the command ends. Return its exit status and its standard output."""
        assert self.process is not None
        printed, _ = self.process.communicate(timeout=ENOUGH_S)
        return self.process.returncode, printed


@pytest.fixture
def experiment(tmp_path: Path) -> Iterator[Experiment]:
    experiment = Experiment(tmp_path)
    yield experiment
    if experiment.process is not None:
        experiment.process.kill()


def tensors(checkpoint: Path) -> dict[str, str]:
    """Return the digests of a checkpoint's tensors."""
    digests = json.loads((checkpoint / MANIFEST).read_text())["files"]
    return {name: digest for name, digest in digests.items() if name != STATE}


def run_to_the_end(
    begun: Any, experiment: Experiment, checkpoint: Path | None = None
) -> tuple[list[dict[str, float]], dict[str, str]]:
    """Run the trial of `experiment` to its end, in this session's Ray.

    Args:
        begun: The fixture `begun`.
        experiment: The experiment.
        checkpoint: The checkpoint to continue from; None to begin with round 1.

    Returns:
        The new rows without times, and the digests of the last checkpoint's tensors.
    """
    (trial,) = plan_of(parse_arguments(experiment.arguments("colocated_k1"))).trials
    running = begun(trial.to_dict())
    if checkpoint is not None:
        running.restore(str(checkpoint))
    history = [running.train()]
    while not history[-1]["done"]:
        history.append(running.train())
    last = experiment.directory / f"after-{len(history)}-rounds"
    running.save_checkpoint(str(last))
    return [untimed(row) for row in history], tensors(last)


def test_the_command_abandons_a_round_that_samples_and_its_checkpoint_repeats_it(
    begun: Any, experiment: Experiment
) -> None:
    """A colocated worker samples and trains. It saves a checkpoint while its engine hangs.

    Nobody reads the output, as with `python launch/tune.py | tee log`: a signal also ends `tee`.
    """
    experiment.start_command("colocated_k1")
    finished = experiment.hang_in("engine")
    experiment.close_output()
    experiment.signal(signal.SIGTERM)
    assert experiment.wait() == 130
    told = experiment.errors.read_text()
    assert told.startswith("SIGTERM: every trial stops and saves its last finished round")
    assert f"colocated_k1/0: saved after round {finished} of {ROUNDS}; lost: " in told
    assert f"s of work on round {finished + 1}\n" in told
    assert len(rows(experiment.trial)) == finished
    (checkpoint,) = checkpoints(experiment.trial)
    assert checkpoint_round(checkpoint) == finished

    (experiment.directory / "engine").unlink()
    before = [untimed(row) for row in rows(experiment.trial)]
    resumed, weights = run_to_the_end(begun, experiment, checkpoint)
    assert (before + resumed, weights) == run_to_the_end(begun, experiment)


def test_a_users_tuner_finishes_gradient_steps_that_have_begun_and_saves_them(
    experiment: Experiment,
) -> None:
    """Nobody reads the output, as with `python my_tuner.py | tee log`: Ctrl-C also ends `tee`."""
    script, found = experiment.directory / "my_tuner.py", experiment.directory / "results.json"
    script.write_text(OWN_TUNER)
    config = experiment.directory / "config.json"
    (trial,) = plan_of(parse_arguments(experiment.arguments("sync"))).trials
    config.write_text(json.dumps(trial.to_dict()))
    arguments = [str(experiment.directory), str(config), str(found)]
    experiment.start([sys.executable, str(script), *arguments])
    finished = experiment.hang_in("loss")
    experiment.close_output()
    experiment.signal(signal.SIGINT)
    begun = f"sync/0: round {finished + 1} has begun its gradient steps and is finished first: "
    wait_for(lambda: begun in experiment.errors.read_text(), ENOUGH_S)
    (experiment.directory / "loss").unlink()
    assert experiment.wait() == 0
    told = experiment.errors.read_text()
    assert "SIGINT: every trial stops and saves its last finished round" in told
    assert f"sync/0: saved after round {finished + 1} of {ROUNDS}\n" in told
    (checkpoint,) = checkpoints(experiment.trial)
    assert json.loads(found.read_text())["checkpoint"] == str(checkpoint)
    assert checkpoint_round(checkpoint) == len(rows(experiment.trial)) == finished + 1


def test_a_second_signal_ends_at_once_says_what_is_lost_and_leaves_no_actor(
    experiment: Experiment,
) -> None:
    command = experiment.start_command("sync")
    finished = experiment.hang_in("loss")
    family = command.children(recursive=True)
    experiment.signal(signal.SIGTERM)
    wait_for(lambda: "is finished first" in experiment.errors.read_text(), ENOUGH_S)
    experiment.signal(signal.SIGINT)
    status, printed = experiment.end()
    assert status == 130
    *_, again, lost = experiment.errors.read_text().splitlines()
    assert again == "interrupted again: stopping at once"
    assert lost == (
        f"sync/0: not saved: continues from round 0; lost: rounds 1 to {finished} and the work on "
        f"round {finished + 1}"
    )
    assert "--resume must --name own" in printed.splitlines()[-1]
    assert checkpoints(experiment.trial) == []
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
