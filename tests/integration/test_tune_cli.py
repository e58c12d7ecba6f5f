"""The command as a user runs it: in a process of its own, with a Ray of its own."""

from __future__ import annotations

import csv
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from conftest import wait_for
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_trainable.checkpointing import checkpoint_round
from grpo_trainable.config import GRPOConfig
from grpo_trainable.metrics import NAMES, SOMETIMES
from grpo_trainable.tasks.keyword import NOUNS_FILE
from reports.experiment import read_experiment

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
    merged = ("--set", "k=1", "--set", "resources.worker_cpus=0.95")
    done = run(*argv, *merged, "--set", "eval.every=2", storage=storage)
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
        scalars = set(events.Tags()["scalars"])
        assert scalars == NAMES & results[0].keys()
        for name in scalars:
            logged = [event.value for event in events.Scalars(name)]
            told = [row[name] for row in results if name in row]
            assert logged == pytest.approx(told, rel=1e-5)
            assert len(told) == len(results) or name in SOMETIMES


def test_every_logged_number_is_a_metric_with_a_name(finished):
    experiment, _ = finished
    # Tune's own, and what ends a trial.
    tune = {"done", "should_checkpoint", "iterations_since_restore", "timestamp", "pid"}
    tune |= {"training_iteration", "time_this_iter_s", "time_total_s", "time_since_restore"}
    for trial in trial_directories(experiment):
        for row in rows(trial):
            numbers = {name for name, value in row.items() if isinstance(value, int | float)}
            assert numbers - tune - SOMETIMES == NAMES - SOMETIMES


def parts(trial: Path, kind: str) -> list[dict]:
    paths = sorted((trial / kind).glob("part-*.parquet"))
    return [entry for path in paths for entry in pq.read_table(path).to_pylist()]


def test_rollouts_versions_and_evaluations_agree_with_the_rows(finished):
    experiment, _ = finished
    for trial in trial_directories(experiment):
        rollouts, results = parts(trial, "rollouts"), rows(trial)
        for row in results:
            of_round = [r for r in rollouts if r["round"] == row["training_iteration"]]
            assert len(of_round) == 16
            rewards = [response["reward"] for response in of_round]
            assert sum(rewards) / 16 == pytest.approx(row["reward/train_mean"])
            assert max(r["lag"] for r in of_round) == row["lag/max"]
            drift = [r["policy_log_prob"] - r["reference_log_prob"] for r in of_round]
            assert sum(drift) / 16 == pytest.approx(row["kl/reference_nats"], abs=1e-3)
        held_out = parts(trial, "evaluations")
        assert sorted({entry["round"] for entry in held_out}) == [0, 2, 4]
        prompts = [
            [entry["prompt"] for entry in held_out if entry["round"] == round_]
            for round_ in (0, 2, 4)
        ]
        assert prompts[0] == prompts[1] == prompts[2]
        learner = [v["version"] for v in parts(trial, "versions") if v["side"] == "learner"]
        assert learner == [row["version/learner"] for row in results]


def spans(trial: Path) -> dict[str, list[tuple[str, float, float]]]:
    """(stage, start, end) by actor, of the trace."""
    events = json.loads((trial / "trace.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    by_actor: dict[str, list[tuple[str, float, float]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            span = (event["name"], event["ts"], event["ts"] + event["dur"])
            by_actor[names[event["tid"]]].append(span)
    return by_actor


def overlap(first: list[tuple], second: list[tuple]) -> float:
    return sum(
        max(0.0, min(a[2], b[2]) - max(a[1], b[1])) for a, b in itertools.product(first, second)
    )


def test_trace_shows_what_ran_beside_what(finished):
    experiment, _ = finished
    for trial in trial_directories(experiment):
        by_actor = spans(trial)
        everything = [span for spans in by_actor.values() for span in spans]
        rollouts, steps = (
            [span for span in everything if span[0] == name] for name in ("rollout", "optimize")
        )
        assert rollouts
        assert steps
        asynchronous = "async" in trial.name
        assert (overlap(rollouts, steps) > 0) == asynchronous
        expected = {"trial", "worker"} if "colocated" in trial.name else {"trial", "learner"}
        assert expected <= by_actor.keys()
        # An actor does one thing at a time.
        for actor, own in by_actor.items():
            own.sort(key=lambda span: span[1])
            for before, after in itertools.pairwise(own):
                assert after[1] >= before[2] - 1, (actor, before, after)  # microseconds


def test_snapshots_of_tune_hold_no_details(finished):
    experiment, _ = finished
    (state,) = experiment.glob("experiment_state-*.json")
    # What is not JSON stands in it as pickle, in hexadecimal.
    assert b"RoundDetails".hex() not in state.read_text()


def test_report_is_written_and_its_path_is_printed(finished):
    experiment, out = finished
    assert f"report: {experiment / 'report.html'}" in out
    page = (experiment / "report.html").read_text()
    for arm in ("colocated_k1", "sync", "async_k1"):
        assert arm in page


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


OWN_SPACE = """\
from search_spaces import Column, SearchSpace
from search_spaces.columns import SPEED

RATES = SearchSpace(
    name="rates",
    question="which of two learning rates learns more?",
    arms={
        rate: {"placement": "colocated", "optim.lr": float(rate)} for rate in ("1e-4", "5e-4")
    },
    columns=(Column(name="lr", title="rate", metric="optim/lr", form="{:.0e}"), SPEED),
)
"""


def test_a_space_of_ones_own_is_run_and_reported_on_without_its_file(tmp_path):
    file = tmp_path / "elsewhere" / "my_space.py"
    file.parent.mkdir()
    file.write_text(OWN_SPACE)
    options = ["--name", "own", "--iterations", "2", "--set", "eval.every=2", *SMALL]
    done = run("--space", "elsewhere/my_space.py", *options, storage=tmp_path)
    assert done.returncode == 0, done.stderr

    experiment = tmp_path / "own"
    assert len(trial_directories(experiment)) == 2
    assert "rates: which of two learning rates learns more?" in done.stdout
    shutil.rmtree(file.parent)
    (experiment / "report.html").unlink()
    script = str(ROOT / "launch" / "report.py")
    again = subprocess.run(
        [sys.executable, script, str(experiment)], capture_output=True, text=True
    )
    assert again.stderr == ""
    page = (experiment / "report.html").read_text()
    assert "<h1>Which of two learning rates learns more?</h1>" in page
    for words in ("rate", "1e-04", "5e-04", "samples/s"):
        assert f">{words}" in page
    assert page.index(">1e-04") < page.index(">5e-04")  # the question's order of arms


def test_interrupts_save_every_trial_end_everything_and_resume_goes_on(tmp_path):
    argv = ["--space", "async_vs_sync", "--name", "cut", "--set", "arm=async_k1", *SMALL]
    # No checkpoint is due before the end, and the second trial has not begun when the first is cut.
    argv += ["--iterations", "30", "--checkpoint-every", "1000", "--num-samples", "2"]
    resume = ["--resume", "must", "--name", "cut"]
    saved_rounds = [0]
    for number, arguments in ((signal.SIGINT, argv), (signal.SIGTERM, resume)):
        process = subprocess.Popen(
            command(*arguments, storage=tmp_path), stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        enough = saved_rounds[-1] + 2
        wait_for(
            lambda n=enough: any(len(rows(t)) > n for t in trial_directories(tmp_path / "cut")), 120
        )
        children = psutil.Process(process.pid).children(recursive=True)

        interrupted = time.monotonic()
        process.send_signal(number)
        out, _ = process.communicate(timeout=25)
        _, alive = psutil.wait_procs(children, timeout=25 - (time.monotonic() - interrupted))

        assert process.returncode == 130
        assert not alive
        assert "--resume must --name cut" in out
        (trial,) = trial_directories(tmp_path / "cut")
        before = len(rows(trial))
        assert before < 30
        saved_rounds.append(checkpoint_round(max(trial.glob("checkpoint_*"))))
        assert saved_rounds[-1] >= before - 1  # a row may come in while the experiment ends

    resumed = run(*resume, storage=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    both = trial_directories(tmp_path / "cut")
    assert [[row["training_iteration"] for row in rows(t)] for t in both] == [[*range(1, 31)]] * 2
    # They ran one after the other, and nothing that was saved was done again.
    assert rows(both[1])[0]["timestamp"] >= rows(trial)[-1]["timestamp"]
    for saved in saved_rounds:
        assert rows(trial)[saved]["iterations_since_restore"] == 1
    end = rows(trial)[-1]
    assert end["count/requested"] == end["count/trained"] == 30 * 4


def test_second_interrupt_stops_at_once_and_leaves_no_actor(tmp_path):
    # Rounds of half a minute: the first interrupt alone would wait for one.
    argv = ["--space", "async_vs_sync", "--name", "twice", "--set", "arm=sync"]
    argv += ["--set", "rollout.prompts=512", "--set", "eval.prompts=4"]
    process = subprocess.Popen(
        command(*argv, storage=tmp_path), stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    family = psutil.Process(process.pid)
    wait_for(lambda: any(is_ours(child) for child in family.children(recursive=True)), 120)
    time.sleep(3)
    children = [child for child in family.children(recursive=True) if is_ours(child)]
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode == 130
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def is_ours(process: psutil.Process) -> bool:
    """Not one of Ray's own, of which some take long to notice that their driver is gone."""
    try:
        title = " ".join(process.cmdline())
    except psutil.Error:
        return False  # it ended meanwhile
    return any(f"ray::{role}" in title for role in ("Generator", "Learner", "DetailedGRPO"))


def test_after_a_killed_driver_no_round_is_there_twice_or_missing(tmp_path):
    argv = ["--space", "async_vs_sync", "--name", "killed", *SMALL, "--set", "arm=sync"]
    argv += ["--set", "eval.every=2"]
    process = subprocess.Popen(
        command(*argv, "--iterations", "40", "--checkpoint-every", "3", storage=tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    experiment = tmp_path / "killed"
    wait_for(lambda: list(experiment.glob("*/checkpoint_000002/manifest.json")), 120)
    children = psutil.Process(process.pid).children(recursive=True)
    actors = [child for child in children if is_ours(child)]
    assert len(actors) == 3
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(actors, timeout=20)
    assert not alive
    (trial,) = trial_directories(experiment)
    before = len(rows(trial))
    assert 6 <= before < 40

    resumed = run("--resume", "must", "--name", "killed", storage=tmp_path)

    assert resumed.returncode == 0, resumed.stderr
    every = list(range(1, 41))
    evaluated = list(range(0, 41, 2))
    results = rows(trial)
    assert [row["training_iteration"] for row in results] == every
    assert results[before]["iterations_since_restore"] < before  # it did not start over
    with (trial / "progress.csv").open(newline="") as file:
        assert [int(row["training_iteration"]) for row in csv.DictReader(file)] == every
    for kind in ("rollouts", "versions"):
        assert sorted({entry["round"] for entry in parts(trial, kind)}) == every
    assert len(parts(trial, "rollouts")) == 40 * 16
    held_out = [entry["round"] for entry in parts(trial, "evaluations")]
    assert held_out == [round_ for round_ in evaluated for _ in range(8)]
    rounds = [span for span in spans(trial)["trial"] if span[0] == "round"]
    assert len(rounds) == 40
    events = EventAccumulator(str(trial), {"scalars": 0, "histograms": 0, "tensors": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        assert [event.step for event in events.Scalars(name)] == every
    assert [event.step for event in events.Histograms("rollouts/reward")] == every
    texts = [event.step for event in events.Tensors("examples/held_out/text_summary")]
    assert texts == [1, *evaluated[1:]]
    (record,) = read_experiment(experiment).trials
    assert [row["training_iteration"] for row in record.rows] == every
    assert [round_ for round_, _, _ in record.evaluated()] == evaluated


def test_damaged_checkpoints_give_way_to_the_newest_whole_one(tmp_path):
    argv = ["--space", "async_vs_sync", "--name", "torn", *SMALL, "--set", "arm=sync"]
    argv += ["--set", "checkpoint.keep=null", "--checkpoint-every", "2", "--iterations", "30"]
    process = subprocess.Popen(
        command(*argv, storage=tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    # A snapshot of Tune is taken every second: it notes one of those that are damaged below.
    wait_for(lambda: list((tmp_path / "torn").glob("*/checkpoint_000006/manifest.json")), 120)
    process.kill()
    process.wait()
    (trial,) = trial_directories(tmp_path / "torn")
    whole = trial / "checkpoint_000001"
    for path in set(trial.glob("checkpoint_*")) - {trial / "checkpoint_000000", whole}:
        with (path / "policy-00001-of-00001.safetensors").open("r+b") as file:
            file.truncate(1000)

    resumed = run("--resume", "must", "--name", "torn", storage=tmp_path)

    assert resumed.returncode == 0, resumed.stderr
    assert "going on from checkpoint_000001 (round 4)" in resumed.stdout
    results = rows(trial)
    assert [row["training_iteration"] for row in results] == list(range(1, 31))
    assert results[4]["iterations_since_restore"] == 1


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
    assert failures(tmp_path / "broken") == 1

    # As often as the resume says, whatever the first command said.
    resume = ["--resume", "must", "--name", "broken", "--max-failures", "1"]
    done = run(*resume, storage=tmp_path)
    assert done.returncode == 1
    assert failures(tmp_path / "broken") == 1 + 2


def test_a_file_that_is_edited_meanwhile_ends_the_later_trials_and_is_named(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text(NOUNS_FILE.read_text())
    argv = ["--space", "async_vs_sync", "--name", "edited", "--set", "arm=colocated_k1", *SMALL]
    argv += ["--set", "task.keywords_file=words.txt", "--num-samples", "2", "--iterations", "2"]
    process = subprocess.Popen(
        command(*argv, "--max-failures", "0", storage=tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    experiment = tmp_path / "edited"
    wait_for(lambda: trial_directories(experiment), 120)
    with words.open("a") as file:
        file.write("one more\n")
    out, _ = process.communicate(timeout=120)

    assert process.returncode == 1
    (line,) = [line for line in out.splitlines() if line.startswith("failed: ")]
    assert f"task.keywords_file: {words} is not what it was when this run started" in line
    for params in experiment.glob("*/params.json"):
        config = json.loads(params.read_text())
        assert GRPOConfig.from_dict(config).to_dict() == config

    words.write_text(NOUNS_FILE.read_text())
    done = run("--resume", "--name", "edited", storage=tmp_path)
    assert done.returncode == 0, done.stderr
    trained = [
        [row["training_iteration"] for row in rows(t)] for t in trial_directories(experiment)
    ]
    assert trained == [[1, 2]] * 2


def test_a_wrong_loss_of_the_users_is_one_line_before_ray_starts(tmp_path):
    (tmp_path / "losses.py").write_text(
        "def mean(log_probs, old_log_probs, advantages, mask, *, clip_low, clip_high):\n"
        "    return -(advantages * log_probs).mean()\n"
    )

    done = run(
        *("--space", "async_vs_sync", "--name", "mean", "--set", "loss.type=losses.py:mean"),
        storage=tmp_path,
    )

    assert done.returncode == 2
    assert re.fullmatch(
        r".*loss\.type=.*losses\.py:mean: the loss, one number a token .*shape \(\)[^\n]*\n",
        done.stderr,
    )
    assert not (tmp_path / "mean").exists()


def failures(experiment: Path) -> int:
    (errors,) = experiment.glob("*/error.txt")
    return max(map(int, re.findall(r"Failure # (\d+)", errors.read_text())))


TASK = """
import random
from dataclasses import dataclass

from grpo_trainable.config import text
from grpo_trainable.tasks import Example, keyword_prompt


class Letters:
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        letters: str = text("e")

    def __init__(self, settings, seed):
        self.letters, self.seed = settings.letters, seed

    def train_example(self, prompt_index):
        word = random.Random(f"{self.seed} {prompt_index}").choice(["cat", "drum", "fox"])
        return Example(keyword_prompt([word]), word)

    def eval_examples(self, count):
        return [Example(keyword_prompt(["hen"]), "hen")] * count

    def reward(self, response, ground_truth):
        if "fox" in ground_truth:
            raise RuntimeError("no foxes")
        return sum(letter in self.letters for letter in response) / max(1, len(response))
"""


def test_a_task_from_outside_the_repository_trains_and_its_file_is_guarded(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    argv = ["--space", "async_vs_sync", "--name", "letters", "--set", "arm=async_k1", *SMALL]
    own = ["--set", "task.name=mine.py:Letters", "--set", "task.letters=aeiou"]
    allowed = ["--set", "task.max_error_rate=0.9", "--iterations", "3"]

    done = run(*argv, *own, *allowed, storage=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "report: " in done.stdout
    (trial,) = trial_directories(tmp_path / "letters")
    params = json.loads((trial / "params.json").read_text())
    assert params["task"]["name"] == f"{tmp_path}/mine.py:Letters"
    assert params["task"]["letters"] == "aeiou"
    assert "keywords_file" not in params["task"]
    parts = [pq.read_table(path).to_pylist() for path in sorted(trial.glob("rollouts/*.parquet"))]
    responses = [row for part in parts for row in part]
    assert len(responses) % 4 == 0
    for row in responses:
        vowels = sum(letter in "aeiou" for letter in row["response"])
        assert row["reward"] == pytest.approx(vowels / max(1, len(row["response"])))
    # What the task refuses to score is dropped, and counted.
    last = rows(trial)[-1]
    assert last["count/reward_errors"] > 0
    assert not any("fox" in row["prompt"] for row in responses)
    assert 0 < last["reward/eval_mean"] < 1

    (tmp_path / "mine.py").write_text(TASK + "# changed\n")
    refused = run("--resume", "must", "--name", "letters", storage=tmp_path)
    assert refused.returncode == 2
    assert "mine.py is not what it was when this run started" in refused.stderr
