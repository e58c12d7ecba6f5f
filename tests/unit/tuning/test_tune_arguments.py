"""Bad input ends with status 2 and one line that says what would be valid, before Ray starts."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import ray
from fake_hub import FakeHub

from callbacks.trackers import tracked_run
from grpo_trainable.config import CHECKS, GRPOConfig
from grpo_trainable.config.task import CommonTaskSettings
from grpo_trainable.models import directory as directory_module
from grpo_trainable.models.directory import SHIPPED_POLICY
from grpo_trainable.models.hf.files import NotOnTheHub
from launch import report, tune
from reports import EXPERIMENT_FILE
from search_spaces import SPACES
from search_spaces.presets import ALGORITHMS, PRESETS
from tuning import plan as plan_module
from tuning.checks import check_inputs, check_scoring, checks_of
from tuning.directories import held, is_running
from tuning.plan import Options, Plan
from tuning.schedulers import pbt_bounds, within_bounds


@pytest.fixture
def command(tmp_path, capsys, monkeypatch):
    """Return a function that runs the command with temporary storage, and without Ray.

    It returns the exit status, the standard output and the standard error.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("the command has started Ray"))

    def run(*argv: str) -> tuple[int, str, str]:
        status = tune.main([*argv, "--storage", str(tmp_path / "storage")])
        assert not ray.is_initialized()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_the_line_to_go_on_names_all_that_a_resume_does_not_find_in_the_experiment(tmp_path):
    argv = ["--space", "async_vs_sync", "--set", "arm=sync", "--max-failures", "0"]
    argv += ["--name", "far", "--storage", str(tmp_path), "--address", "10.0.0.5:6379"]
    line = tune.go_on(tune.plan_of(tune.parse_arguments(argv)))
    resumed = tune.parse_arguments(shlex.split(line.partition("tune.py")[2]))
    told = ("space", "name", "storage", "resume", "address")
    assert [getattr(resumed, option) for option in told] == [
        *("async_vs_sync", "far", str(tmp_path), "must", "10.0.0.5:6379")
    ]


def refused(result: tuple[int, str, str], *words: str) -> None:
    status, out, error = result
    assert status == 2
    assert out == ""
    assert error.count("\n") == 1
    for word in words:
        assert word in error


SPACE = ("--space", "async_vs_sync")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--space", "async_vs_snc"], ["async_vs_snc", "did you mean async_vs_sync?"]),
        ([], ["--space is missing; --preset grpo trains once", "async_vs_sync"]),
        ([*SPACE, "--bogus"], ["--bogus", "--help"]),
        ([*SPACE, "--learning_rate", "1e-5"], ["--learning_rate: not an option; TRL's learning"]),
        ([*SPACE, "--set", "optim.lrr=1"], ["optim.lrr", "did you mean optim.lr?"]),
        ([*SPACE, "--set", "optim.lr=fast"], ["optim.lr=fast", "a number >= 0"]),
        ([*SPACE, "--set", "optim.lr"], ["KEY=VALUE"]),
        ([*SPACE, "--set", "k=0"], ["k=0", "an integer >= 1"]),
        ([*SPACE, "--set", "k=1,2"], ["an integer >= 1; to compare several values, write"]),
        ([*SPACE, "--set", "lag=-1"], ["lag=-1", "an integer >= 0"]),
        ([*SPACE, "--set", "lag=1"], ["lag=1", "needs placement=disaggregated, got colocated"]),
        ([*SPACE, "--set", "rollout.group_size=1"], ["rollout.group_size=1", "must be >= 2"]),
        ([*SPACE, "--set", "rollout.temperature=0"], ["rollout.temperature=0", "> 0"]),
        (
            [*SPACE, "--set", "buffer_capacity=4", "--set", "buffer_sampling=recency"],
            ["buffer_capacity=4: must be <= buffer.sample_batches=2 with buffer_sampling=recency"],
        ),
        ([*SPACE, "--set", "transport=nixl"], ["transport=nixl"]),
        (
            ["--preset", "dapo", "--preset", "grpo"],
            ["--preset grpo: --preset dapo is given too; remove one of the two"],
        ),
        ([*SPACE, "--set", "arm=asynck1"], ["did you mean async_k1?"]),
        (
            [*SPACE, "--set", "arm=sync", "--set", "arm=async_k1"],
            ["--set arm=sync,async_k1 runs both arms"],
        ),
        ([*SPACE, "--set", "resources.worker_cpus=4096"], ["4096.1 CPUs", "resources.worker_cpus"]),
        (
            [*SPACE, "--set", "model.path=nowhere"],
            ["model.path=", "nowhere", "no such directory; valid: the directory of"],
        ),
        ([*SPACE, "--set", "task.keywords_file=nowhere"], ["task.keywords_file=", "nowhere"]),
        ([*SPACE, "--set", "task.reward=nowhere:f"], ["task.reward=nowhere:f", "nowhere"]),
        ([*SPACE, "--set", "task.reward=os.path:splitext"], ["takes (p); accepted: (response"]),
        ([*SPACE, "--set", "engine=nowhere:E"], ["engine=nowhere:E: cannot be imported"]),
        (
            [*SPACE, "--set", "arm=sync", "--set", "transport=nowhere:T"],
            ["transport=nowhere:T: cannot be imported"],
        ),
        (
            [*SPACE, "--set", "arm=sync", "--set", "transport=json:JSONDecoder"],
            [
                "transport=json:JSONDecoder: must be a "
                "grpo_trainable.config.transport_catalog.Transport"
            ],
        ),
        ([*SPACE, "--set", "rollout.max_new_tokens=128"], ["context is 128 tokens", "at most"]),
        ([*SPACE, "--iterations", "0"], ["--iterations", "an integer >= 1"]),
        ([*SPACE, "--iterations", "many"], ["--iterations", "an integer >= 1, got many"]),
        ([*SPACE, "--max-failures", "-3"], ["--max-failures", "an integer >= 0"]),
        ([*SPACE, "--seed", "-1"], ["--seed", "an integer >= 0"]),
        ([*SPACE, "--accept-changed-code"], ["--accept-changed-code needs --resume"]),
        ([*SPACE, "--name", "../elsewhere"], ["--name", "without slashes"]),
        ([*SPACE, "--max-concurrent", "0"], ["--max-concurrent", "an integer >= 1"]),
        ([*SPACE, "--iterations", "3", "--set", "rounds=4"], ["--iterations 3", "rounds=4"]),
        ([*SPACE, "--samples", "1000"], ["1000 samples", "nearest valid: 512 and 1024"]),
        (
            [*SPACE, "--samples", "3"],
            ["nearest valid: 512; for 3 seeds of each arm use --num-samples 3"],
        ),
        ([*SPACE, "--samples", "512", "--iterations", "3"], ["--iterations", "--samples"]),
        ([*SPACE, "--samples", "512", "--set", "rounds=4"], ["--samples 512", "rounds=4"]),
        ([*SPACE, "--scheduler", "pbt"], ["--scheduler pbt", "--set arm="]),
        ([*SPACE, "--scheduler", "pbt", "--set", "arm=sync"], ["--num-samples >= 2"]),
        (
            [
                *(*SPACE, "--scheduler", "pbt", "--num-samples", "2", "--set", "arm=sync"),
                *("--set", "optim.lr=1", "--set", "loss.clip=0.1"),
            ],
            ["optim.lr and loss.clip"],
        ),
        (
            [
                *(*SPACE, "--scheduler", "pbt", "--num-samples", "2", "--set", "arm=sync"),
                *("--set", "optim.lr=1", "--set", "loss.type=cispo"),
            ],
            ["--set fixes optim.lr, which pbt varies"],
        ),
        (
            [
                *(*SPACE, "--scheduler", "pbt", "--num-samples", "2", "--set", "arm=sync"),
                *("--iterations", "8"),
            ],
            ["--scheduler pbt", "no round before the last round (8) has", "lower eval.every (16)"],
        ),
        (
            [*SPACE, "--scheduler", "asha", "--iterations", "4"],
            ["--scheduler asha", "evaluated every 1024 responses and share no evaluation"],
        ),
        (
            [*SPACE, "--set", "loss.type=cispo", "--set", "loss.clip=0.3"],
            ["loss.clip=0.3: has no effect with loss.type=cispo", "arm colocated_k1"],
        ),
        ([*SPACE, "--margin", "0"], ["--margin: must be a number above 0"]),
        ([*SPACE, "--margin", "-0.1"], ["--margin: must be a number above 0, got"]),
        ([*SPACE, "--margin-relative=-1"], ["--margin-relative: must be a number above 0"]),
        ([*SPACE, "--margin", "1", "--margin-relative", "0.5"], ["not allowed with"]),
        ([*SPACE, "--baseline", "sync"], ["--baseline sync needs --margin or --margin-relative"]),
        (
            [*SPACE, "--margin-relative", "0.1", "--scheduler", "asha"],
            ["--margin-relative needs --scheduler fifo: asha"],
        ),
        ([*SPACE, "--margin", "0.1", "--baseline", "synk"], ["synk", "did you mean sync?"]),
        (["--resume"], ["--resume needs --name"]),
        (["--resume", "--name", "never_started", *SPACE], ["no experiment never_started"]),
        (
            ["--resume", "--name", "never_started"],
            ["no experiment never_started in ", "elsewhere, add --storage DIRECTORY"],
        ),
    ],
    ids=lambda value: " ".join(value[-2:]) if value and value[0].startswith("-") else "",
)
def test_bad_input_is_one_line_and_status_2(command, arguments, words):
    refused(command(*arguments), *words)


def test_an_empty_keyword_file_is_refused(command, tmp_path):
    (tmp_path / "words.txt").write_text("\n# only a comment\n")

    refused(command(*SPACE, "--set", "task.keywords_file=words.txt"), "words.txt", "no keyword")


def test_a_keyword_file_that_is_not_utf8_names_the_line(command, tmp_path):
    (tmp_path / "words.txt").write_bytes(b"apple\nb\xff\n")

    refused(command(*SPACE, "--set", "task.keywords_file=words.txt"), "line 2 is not UTF-8")


def test_trials_too_short_for_their_lag_are_told_and_get_no_margin(command):
    short = ("--space", "lag_exact", "--dry-run", "--samples")
    few = "too few rounds for the lag of lag2, lag4, lag8, so the audit would fail"
    status, out, _ = command(*short, "128")
    assert status == 0
    assert f"note: {few}" in out
    assert "use --samples 384 or more" in out
    refused(
        command(*short, "320", "--margin", "0.1"), "--margin: too few rounds for the lag of lag8"
    )
    status, out, _ = command(*short, "384", "--margin", "0.1")
    assert status == 0
    assert "too few rounds" not in out


def test_an_existing_experiment_is_not_started_again(command, tmp_path):
    directory = tmp_path / "storage" / "mine"
    directory.mkdir(parents=True)
    (directory / EXPERIMENT_FILE).write_text("{}")

    refused(command(*SPACE, "--name", "mine"), "mine exists", "--resume")


def test_a_resume_with_another_setting_is_refused(command, tmp_path):
    directory = tmp_path / "storage" / "mine"
    directory.mkdir(parents=True)
    stored = {
        "space": "async_vs_sync",
        "fixed": {"rounds": 4},
        "num_samples": 1,
        "seed": 0,
        "scheduler": "fifo",
    }
    (directory / EXPERIMENT_FILE).write_text(json.dumps(stored))

    resume = ("--resume", "--name", "mine")
    refused(command(*resume, "--iterations", "5"), "rounds=5", "fixed at 4")
    refused(command(*resume, "--set", "optim.lr=1"), "optim.lr=1", "was not fixed")
    refused(command(*resume, "--num-samples", "3"), "--num-samples 3", "started with 1")
    refused(command(*resume, "--samples", "512"), "--samples 512", "started without it")
    refused(command(*resume, "--margin", "0.1"), "--margin 0.1", "started without it")


def test_a_margin_is_recorded_and_a_resume_keeps_it(started):
    plan = started("--margin-relative", "0.05", "--baseline", "sync")
    stored = json.loads((plan.directory / EXPERIMENT_FILE).read_text())
    assert (stored["margin"], stored["margin_relative"]) == (None, 0.05)
    assert stored["baseline"] == "sync"
    resumed = started(resume=True).options
    assert (resumed.margin_relative, resumed.baseline) == (0.05, "sync")


OWN_CALLBACK = "from ray.tune import Callback\n\n\nclass Mine(Callback):\n    pass\n"


def test_trackers_and_callbacks_are_recorded_and_a_resume_keeps_them(
    command, started, tmp_path, monkeypatch
):
    monkeypatch.setattr(tracked_run, "refuse_unusable", lambda tracker: None)
    (tmp_path / "mine.py").write_text(OWN_CALLBACK)
    trackers = ("--tracker", "wandb", "--tracker", "mlflow", "--tracker", "wandb")
    plan = started(*trackers, "--callback", "mine.py:Mine")
    stored = json.loads((plan.directory / EXPERIMENT_FILE).read_text())
    assert stored["trackers"] == ["wandb", "mlflow"]
    assert stored["callbacks"] == [f"{tmp_path / 'mine.py'}:Mine"]
    resumed = started(resume=True).options
    assert resumed.trackers == stored["trackers"]
    assert resumed.callbacks == stored["callbacks"]
    resume = ("--resume", "--name", "mine")
    refused(command(*resume, "--tracker", "trackio"), "--tracker trackio", "with wandb mlflow")


def test_a_missing_tracker_or_callback_is_one_line_before_anything_starts(
    command, tmp_path, monkeypatch
):
    def missing(tracker):
        raise tracked_run.TrackerError(f"{tracker}: the library is not installed; run: pip")

    monkeypatch.setattr(tracked_run, "refuse_unusable", missing)
    refused(command(*SPACE, "--tracker", "mlflow"), "--tracker mlflow: the library is not", "pip")
    refused(command(*SPACE, "--tracker", "comet"), "comet", "wandb", "trackio")
    refused(command(*SPACE, "--callback", "mine.py:Mine"), "--callback", "mine.py:Mine", "no file")


@pytest.mark.slow
def test_a_resume_of_an_experiment_that_still_runs_is_refused(command, started):
    plan = started()
    with held(plan.directory):
        refused(command("--resume", "--name", "mine"), "another command is running", "wait until")
        assert is_running(plan.directory)
    assert not is_running(plan.directory)
    started(resume=True)


def refuse_to_replace(*paths: object, **options: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.slow
def test_a_resume_that_cannot_write_is_refused(command, tmp_path, monkeypatch):
    directory = tmp_path / "storage" / "mine"
    directory.mkdir(parents=True)
    stored = {"space": "async_vs_sync", "fixed": {"rounds": 4}, "num_samples": 1, "seed": 0}
    (directory / EXPERIMENT_FILE).write_text(json.dumps({**stored, "scheduler": "fifo"}))
    # Permissions do not restrict root.
    monkeypatch.setattr(os, "replace", refuse_to_replace)

    refused(command("--resume", "--name", "mine"), "--storage", "cannot write")


@pytest.mark.parametrize("uri", ["s3://key:secret@bucket/runs", "gs://bucket", "file:///tmp/runs"])
def test_storage_that_is_a_uri_is_refused(capsys, tmp_path, monkeypatch, uri):
    monkeypatch.chdir(tmp_path)
    remedies = {"f": "give only its path", "g": "or s3://BUCKET", "s": "in the environment"}
    remedy = remedies[uri[0]]

    status = tune.main([*SPACE, "--storage", uri])
    refused((status, *capsys.readouterr()), "--storage", uri, remedy)
    status = report.main([uri])
    refused((status, *capsys.readouterr()), uri, remedy)
    assert list(tmp_path.iterdir()) == []


def test_a_reward_is_loaded_once_for_all_seeds_and_lengths():
    task = {"reward": "mine.py:score"}
    trials = [
        GRPOConfig.from_dict({"seed": seed, "rounds": rounds, "task": task})
        for seed in (0, 1)
        for rounds in (4, 8)
    ]
    checks = list(checks_of(trials, here=False))
    assert [trial for check, trial in checks if check is check_inputs] == trials
    assert [trial for check, trial in checks if check is check_scoring] == trials[:1]


def test_only_arms_that_were_asked_for_are_named_as_not_available(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from search_spaces.search_space import SearchSpace\n"
        'SPACE = SearchSpace(name="mine", question="which?", arms={"a": {}, "b": {"k": 2}},\n'
        '                    missing=lambda arm: "no b here" if arm == "b" else None)\n'
    )

    def noted(*argv: str) -> list[str]:
        plan = tune.plan_of(tune.parse_arguments(["--space", "mine.py:SPACE", *argv]))
        return [line for line in tune.notes(plan) if line.startswith("not available")]

    assert noted() == ["not available here: b (no b here)"]
    assert noted("--set", "arm=a") == []


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Return a function that plans and prepares an experiment or its resume."""
    monkeypatch.chdir(tmp_path)
    name = ("--name", "mine", "--storage", str(tmp_path / "storage"))

    def start(*argv: str, resume: bool = False) -> Plan:
        first = (*SPACE, "--set", "arm=sync")
        begin = ("--resume", "must") if resume else first
        plan = tune.plan_of(tune.parse_arguments([*begin, *name, *argv]))
        plan.check()
        plan.prepare_directory()
        return plan

    return start


def words(path: Path, *left_out: str) -> None:
    path.write_text("".join(f"{word}\n" for word in WORDS if word not in left_out))


WORDS = ("apple", "pear", "stone", "river", "cloud", "horse", "lamp", "tower", "coat", "wheel")


@pytest.mark.slow
def test_a_resume_refuses_a_data_file_that_has_changed(started, command, tmp_path):
    words(tmp_path / "words.txt")
    plan = started("--set", "task.keywords_file=words.txt")
    stored = json.loads((plan.directory / EXPERIMENT_FILE).read_text())
    content = (tmp_path / "words.txt").read_bytes()
    assert stored["inputs"]["task.keywords_file"] == hashlib.sha256(content).hexdigest()
    started(resume=True)

    words(tmp_path / "words.txt", "lamp")
    changed = command("--resume", "--name", "mine")
    refused(changed, "task.keywords_file", str(tmp_path / "words.txt"), "put back the file")
    (tmp_path / "words.txt").unlink()
    refused(command("--resume", "--name", "mine"), str(tmp_path / "words.txt"), "cannot be read")


@pytest.mark.slow
def test_a_resume_refuses_a_policy_and_a_reward_that_have_changed(started, command, tmp_path):
    policy, rewards = tmp_path / "policy", tmp_path / "rewards.py"
    shutil.copytree(SHIPPED_POLICY, policy)
    rewards.write_text("def score(response, ground_truth):\n    return 1.0\n")
    started("--set", "model.path=policy", "--set", "task.reward=rewards.py:score")
    started(resume=True)

    with (policy / "config.json").open("a") as file:
        file.write(" ")
    refused(command("--resume", "--name", "mine"), "model.path", str(policy / "config.json"))
    shutil.copy(SHIPPED_POLICY / "config.json", policy)
    rewards.write_text("def score(response, ground_truth):\n    return 0.0\n")
    with_row(tmp_path / "storage" / "mine")
    refused(command("--resume", "--name", "mine"), "task.reward", str(rewards))


def with_row(experiment: Path) -> None:
    """Make an experiment look as if a trial had finished a round."""
    (experiment / "sync-0-a").mkdir()
    (experiment / "sync-0-a" / "result.json").write_text('{"training_iteration": 1}\n')


def reward_file(path: Path, reward: float) -> str:
    """Write a reward function, and return the SHA-256 of the file."""
    path.write_text(f"def score(response, ground_truth):\n    return {reward}\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_code_may_be_mended_as_long_as_no_trial_has_a_row(started, tmp_path):
    old = reward_file(tmp_path / "rewards.py", 1.0)
    plan = started("--set", "task.reward=rewards.py:score")
    experiment = plan.directory / EXPERIMENT_FILE
    assert json.loads(experiment.read_text())["inputs"]["task.reward"] == old
    (plan.directory / "sync-0-a").mkdir()
    (plan.directory / "sync-0-a" / "result.json").touch()  # Tune's file is empty at first
    new = reward_file(tmp_path / "rewards.py", 0.5)
    resumed = started(resume=True)
    assert resumed.inputs["task.reward"] == new != old
    stored = json.loads(experiment.read_text())
    assert stored["inputs"]["task.reward"] == new
    assert stored["replaced"] == resumed.replaced == []


@pytest.mark.slow
def test_later_code_is_accepted_if_the_user_says_so_and_data_never_is(started, command, tmp_path):
    old, words_file = reward_file(tmp_path / "rewards.py", 1.0), tmp_path / "words.txt"
    words(words_file)
    settings = ("--set", "task.reward=rewards.py:score", "--set", "task.keywords_file=words.txt")
    plan = started(*settings)
    with_row(plan.directory)
    new = reward_file(tmp_path / "rewards.py", 0.5)
    resume = ("--resume", "--name", "mine")
    refused(
        command(*resume),
        f"task.reward: {tmp_path}/rewards.py has changed since this run started; put back the file",
        "or continue with the changed file: add --accept-changed-code",
    )
    for option in (("--accept-changed-code",), ()):  # the option is needed only once
        resumed = started(*option, resume=True)
        assert resumed.inputs["task.reward"] == new
        assert resumed.replaced == [old]

    words(words_file, "lamp")
    status, _, error = command(*resume, "--accept-changed-code")
    assert status == 2
    assert "task.keywords_file" in error
    assert "--accept-changed-code" not in error


@pytest.mark.slow
def test_a_checkpoint_counts_as_a_result_even_without_a_row(started, command, tmp_path):
    reward_file(tmp_path / "rewards.py", 1.0)
    plan = started("--set", "task.reward=rewards.py:score")
    (plan.directory / "sync-0-a" / "checkpoint_000000").mkdir(parents=True)
    reward_file(tmp_path / "rewards.py", 0.5)
    refused(command("--resume", "--name", "mine"), "--accept-changed-code")
    (tmp_path / "rewards.py").unlink()
    status, _, error = command("--resume", "--name", "mine")
    assert status == 2
    assert "--accept-changed-code" not in error


@pytest.mark.slow
def test_a_reward_must_suit_the_columns_of_the_prompts_and_its_weights(command, tmp_path):
    (tmp_path / "r.py").write_text(
        "def by_level(completions, level, **kwargs): return [0.0 for _ in completions]\n"
        "def by_words(completions, keywords, **kwargs): return [0.0 for _ in completions]\n"
        "def by_length(completions, **kwargs): return [0.0 for _ in completions]\n"
        "both = [by_words]\n"
    )
    sync = (*SPACE, "--set", "arm=sync", "--dry-run", "--set")
    refused(
        command(*sync, "task.reward=r.py:by_level"),
        f"task.reward={tmp_path}/r.py:by_level: needs the column level, which the prompts lack; "
        "they have the columns ground_truth, keywords",
    )
    assert command(*sync, "task.reward=r.py:by_words")[0] == 0
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "p {i}", "level": {i}}}\n' for i in range(20)))
    with_file = (*sync, f"task.train_file={data}", "--set")
    assert command(*with_file, "task.reward=r.py:by_level")[0] == 0
    refused(command(*with_file, "task.reward=r.py:by_words"), "needs the column keywords")
    weights = ("--set", 'task.reward_weights={"by_wrods": 1}')
    refused(
        command(*sync, "task.reward=r.py:both", *weights),
        "task.reward_weights: names by_wrods, but task.reward=",
    )
    one = ("task.reward=r.py:by_words", "--set")
    refused(
        command(*sync, *one, 'task.reward_weights={"by_words": 1}'),
        f"task.reward_weights: names by_words, but task.reward={tmp_path}/r.py:by_words has the "
        "parts answer",
    )
    assert command(*sync, *one, 'task.reward_weights={"answer": 1}')[0] == 0
    two = f'task.reward=["{tmp_path}/r.py:by_words", "{tmp_path}/r.py:by_length"]'
    for weights, noted in (('{"by_words": 1}', True), ('{"by_words": 1, "by_length": 0}', False)):
        status, out, _ = command(*sync, two, "--set", f"task.reward_weights={weights}")
        assert status == 0
        assert ("which therefore does not count: by_length" in out) == noted


@pytest.mark.slow
def test_an_experiment_of_before_there_were_digests_is_resumed(started):
    path = started().directory / EXPERIMENT_FILE
    stored = json.loads(path.read_text())
    for key in ("inputs", "max_failures", "max_concurrent"):
        del stored[key]
    path.write_text(json.dumps(stored))

    assert started(resume=True).limits == {
        "max_failures": 2,
        "max_concurrent": None,
        "budget": None,
    }
    assert "task.keywords_file" in json.loads(path.read_text())["inputs"]


@pytest.mark.slow
def test_the_experiment_names_its_trials_in_order(started):
    plan = started("--num-samples", "2")
    stored = json.loads((plan.directory / EXPERIMENT_FILE).read_text())
    assert stored["planned"] == [["sync", 0], ["sync", 1]]


@pytest.mark.slow
def test_a_resume_takes_its_own_limits_or_those_of_the_command_before(started):
    first = started("--max-failures", "0", "--max-concurrent", "3")
    assert first.limits == {"max_failures": 0, "max_concurrent": 3, "budget": None}
    assert started(resume=True).limits == first.limits
    changed = {"max_failures": 5, "max_concurrent": 1, "budget": None}
    assert started("--max-failures", "5", "--max-concurrent", "1", resume=True).limits == changed
    assert started(resume=True).limits == changed


SPACE_FILE = """\
from search_spaces import Column, SearchSpace
MINE = SearchSpace(
    name="mine",
    question="which learning rate?",
    arms={"slow": {"optim.lr": 1e-4}, "fast": {"optim.lr": 3e-4}},
    columns=(Column(name="norm", title="gradient norm", metric="optim/grad_norm"),),
)
"""


@pytest.fixture
def of_a_file(tmp_path, monkeypatch):
    """Prepare a started experiment whose space is in a file, and return the file."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my_space.py"
    file.write_text(SPACE_FILE)
    name = ["--name", "mine", "--storage", str(tmp_path / "storage")]
    plan = tune.plan_of(tune.parse_arguments(["--space", "my_space.py", *name]))
    plan.prepare_directory()
    return file


RESUME = ("--resume", "--name", "mine")

TASK_FILE = """\
from dataclasses import dataclass
from grpo_trainable.config import integer, path
from grpo_trainable.tasks import Example

class Sums:
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        largest: int = integer(9, minimum=1)
        words: str | None = path("words.txt")

    def __init__(self, settings, seed):
        pass

    def train_example(self, prompt_index):
        return Example("1 + 1 =", "2")

    def eval_examples(self, count):
        return [Example("1 + 1 =", "2")] * count

    def reward(self, response, ground_truth):
        return float(response == ground_truth)
"""


def test_the_users_files_and_the_defaults_of_their_task_are_stored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").write_text(TASK_FILE)
    (tmp_path / "words.txt").write_text("one\n")
    settings = ["--set", "task.name=sums.py:Sums", "--set", "task.largest=7"]
    where = ["--name", "sums", "--storage", str(tmp_path / "storage")]
    plan = tune.plan_of(tune.parse_arguments([*SPACE, *settings, *where]))
    plan.prepare_directory()
    stored = json.loads((plan.directory / EXPERIMENT_FILE).read_text())
    words = str(tmp_path / "words.txt")
    task = f"{tmp_path}/sums.py:Sums"
    assert stored["task_defaults"] == {task: {"task.largest": 9, "task.words": words}}
    assert stored["held_out_prompts"] is None  # the task states no number
    assert stored["own_files"] == {"task.name": f"{tmp_path}/sums.py", "task.words": words}
    assert stored["own_files"].keys() < stored["inputs"].keys()


def test_held_out_prompts_that_a_task_would_generate_are_not_counted(monkeypatch):
    class Generated:
        @property
        def eval_size(self) -> int:
            raise AssertionError("counting may take minutes")

    monkeypatch.setattr("grpo_trainable.tasks.prompts.build_task", lambda config: Generated())
    assert tune.plan_of(tune.parse_arguments(SPACE))._held_out_prompts() is None


def test_the_question_of_a_space_in_a_file_is_stored_with_the_experiment(of_a_file, tmp_path):
    stored = json.loads((tmp_path / "storage" / "mine" / EXPERIMENT_FILE).read_text())
    assert stored["space"] == "mine"
    assert stored["space_source"] == str(of_a_file)
    assert stored["question"]["arms"] == ["slow", "fast"]
    assert stored["question"]["columns"][0]["metric"] == "optim/grad_norm"
    assert stored["inputs"]["space"] == hashlib.sha256(SPACE_FILE.encode()).hexdigest()
    assert stored["own_files"] == {"space": str(of_a_file)}
    assert stored["task_defaults"] == {}
    assert stored["held_out_prompts"] == 224  # of the shipped words


def test_one_trial_is_counted_in_the_singular(command):
    _, out, _ = command(*SPACE, "--set", "arm=sync", "--dry-run")
    assert "\n1 trial:\n" in out


@pytest.mark.slow
def test_a_resume_finds_the_space_again_from_any_directory(of_a_file, command, monkeypatch):
    monkeypatch.chdir("/")
    status, out, _ = command(*RESUME, "--dry-run")
    assert status == 0
    assert out.startswith("mine: which learning rate?\n2 trials, ")
    assert command(*RESUME, "--space", f"{of_a_file}:MINE", "--dry-run")[1] == out


def test_a_resume_refuses_a_space_that_has_changed_and_runs_nothing_of_it(of_a_file, command):
    of_a_file.write_text("raise RuntimeError('this must not run')")
    refused(command(*RESUME), "--resume", str(of_a_file), "put the file back")
    of_a_file.unlink()
    refused(command(*RESUME), "--space", str(of_a_file), "cannot be read")


def test_a_resume_runs_no_space_that_somebody_else_may_have_named(of_a_file, command, tmp_path):
    (tmp_path / "storage" / "mine" / EXPERIMENT_FILE).chmod(0o666)
    of_a_file.write_text("raise RuntimeError('this must not run')")
    refused(command(*RESUME, "--dry-run"), "can be written by others")


def test_a_resume_names_the_ways_to_train_more(of_a_file, command):
    refused(command(*RESUME, "--num-samples", "9"), "with 1; --extend adds seeds")
    refused(command(*RESUME, "--set", "rounds=9"), "export it, and start a new experiment")


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--resume", "continue it with tune.Tuner.restore"),
        ("--extend", 'a new tune.Tuner with another name and "seed": tune.grid_search([…])'),
    ],
)
def test_a_resume_refuses_an_experiment_of_somebodys_own_tuner(option, instead, command, tmp_path):
    (tmp_path / "storage" / "own" / "trial").mkdir(parents=True)
    (tmp_path / "storage" / "own" / "trial" / "result.json").write_text("{}\n")
    refused(command(option, "--name", "own"), option, "own Tuner started", instead)
    status, _, error = command(*SPACE, "--name", "own")
    assert status == 2
    assert error.endswith("exists; choose another name\n")


def test_a_resume_refuses_another_space(of_a_file, command, tmp_path):
    refused(command(*RESUME, "--space", "lag"), "--space lag", f"was started with {of_a_file}")
    other = tmp_path / "other.py"
    other.write_text(SPACE_FILE.replace("3e-4", "5e-4"))
    refused(command(*RESUME, "--space", "other.py"), str(other), "put the file back")


def tune_state(directory: Path) -> list[Path]:
    """Write the files of Tune that a resume unpickles."""
    (directory / "trial").mkdir()
    names = ("tuner.pkl", "experiment_state-1.json", "searcher-state-1.pkl", "trial/error.pkl")
    files = [directory / name for name in names]
    for file in files:
        file.write_bytes(b"pickle")
    return [directory, directory / "trial", directory / EXPERIMENT_FILE, *files]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0o020, 0o002], ids=["group", "everybody"])
def test_a_resume_refuses_state_that_others_can_write_and_says_how_to_mend_it(
    started, command, mode
):
    directory = started().directory
    for path in tune_state(directory):
        started(resume=True)
        path.chmod(path.stat().st_mode | mode)
        out = command("--resume", "--name", "mine")
        refused(out, f"{path} can be written by others", f"chmod -R go-w {directory}")
        subprocess.run(["chmod", "-R", "go-w", directory], check=True)


@pytest.mark.slow
def test_a_resume_refuses_state_that_is_a_link(started, command, tmp_path):
    directory = started().directory
    for path in tune_state(directory)[1:]:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        refused(command("--resume", "--name", "mine"), f"{path} is a link")
        path.unlink()
        (tmp_path / "elsewhere").rename(path)


def test_a_resume_refuses_what_belongs_to_another_user(started, command, monkeypatch):
    directory = started().directory
    monkeypatch.setattr(os, "getuid", lambda: directory.stat().st_uid + 1)

    refused(command("--resume", "--name", "mine"), f"{directory} belongs to another user")


@pytest.mark.slow
def test_an_experiment_of_a_shared_group_can_be_resumed(started, command):
    before = os.umask(0o002)  # the umask on machines where each user has a private group
    try:
        command("--list")
        directory = started().directory
    finally:
        os.umask(before)

    assert [oct(path.stat().st_mode & 0o777) for path in directory.rglob("*")] == ["0o644"]
    assert oct(directory.stat().st_mode & 0o777) == "0o755"
    started(resume=True)


def test_pbt_explores_within_its_bounds():
    config = {"optim": {"lr": 2e-3}, "loss": {"clip": 0.01, "type": "dapo"}, "k": 2}
    assert within_bounds(pbt_bounds(GRPOConfig()), config) == {
        "optim": {"lr": 1e-3},
        "loss": {"clip": 0.05, "type": "dapo"},
        "k": 2,
    }


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        ({"optim.lrr": (1e-5, 1e-3)}, "optim.lrr is not in the trial's config"),
        ({"optim.lr": (1e-3, 1e-5)}, "optim.lr: the minimum 0.001 is above the maximum 1e-05"),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused(bounds: dict[str, tuple[float, float]], told: str):
    with pytest.raises(ValueError, match=f"^within_bounds: {told}$"):
        within_bounds(bounds, {"optim": {"lr": 2e-3}})


def test_pbt_varies_what_the_loss_reads_around_its_default():
    def bounds(**loss):
        return pbt_bounds(GRPOConfig.from_dict({"loss": loss}))

    lr = {"optim.lr": (1e-5, 1e-3)}
    assert bounds() == bounds(type="dapo") == {**lr, "loss.clip": (0.05, 0.4)}
    assert bounds(type="gspo")["loss.clip"] == pytest.approx((7.5e-5, 6e-4))
    assert bounds(type="cispo") == bounds(type="reinforce_with_baseline") == lr


@pytest.mark.parametrize(("rank", "bounds"), [(None, (1e-6, 1e-5)), (8, (1e-5, 1e-4))])
def test_pbt_keeps_the_learning_rate_near_that_of_a_hugging_face_model(tmp_path, rank, bounds):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model = {"path": str(tmp_path), "lora_rank": rank}
    found = pbt_bounds(GRPOConfig.from_dict({"model": model}))["optim.lr"]
    assert found == pytest.approx(bounds)
    given = GRPOConfig.from_dict({"model": model, "optim": {"lr": 2e-6}})
    assert pbt_bounds(given)["optim.lr"] == pytest.approx((4e-7, 4e-6))


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_unwritable_storage_is_refused(command, tmp_path):
    (tmp_path / "storage").mkdir(mode=0o500)

    refused(command(*SPACE), "--storage", "cannot write")


def test_a_file_in_the_place_of_the_storage_is_refused(command, tmp_path):
    (tmp_path / "storage").write_text("")

    for dry in ((), ("--dry-run",)):
        refused(command(*SPACE, *dry), "--storage", "cannot write")


def test_a_storage_on_a_file_system_that_accepts_no_files_is_refused(capsys):
    status = tune.main([*SPACE, "--storage", "/proc/runs", "--dry-run"])
    refused((status, *capsys.readouterr()), "--storage /proc/runs: cannot write there")


def test_a_store_that_cannot_be_reached_is_refused(capsys, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # accepts no connection, because nobody listens
        port = unused.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        status = tune.main([*SPACE, "--storage", "s3://bucket/runs", "--dry-run"])
    refused((status, *capsys.readouterr()), "--storage s3://bucket/runs: NETWORK_CONNECTION")


def test_list_prints_every_space_and_every_preset_on_a_line(command):
    status, out, _ = command("--list")

    spaces, presets = out.removeprefix("with --space:\n").split("\nwith --preset:\n")
    assert status == 0
    assert [line.split()[0] for line in spaces.splitlines()] == list(SPACES)
    assert [line.split()[0] for line in presets.splitlines()] == list(PRESETS)
    assert "GRPO (https://arxiv.org/abs/2402.03300)\n" in presets


@pytest.mark.slow
def test_dry_run_json_prints_every_resolved_config_and_starts_nothing(command, tmp_path):
    dry = ("--dry-run", "json")
    status, out, _ = command(*SPACE, *dry, "--num-samples", "2", "--iterations", "5")

    configs = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert {config["rounds"] for config in configs} == {5}
    # Trials run in blocks of one seed.
    assert [config["seed"] for config in configs] == [0] * 8 + [1] * 8
    blocks = [[config["arm"] for config in configs[start : start + 8]] for start in (0, 8)]
    assert sorted(blocks[0]) == sorted(blocks[1])
    assert blocks[0] != blocks[1]
    assert not (tmp_path / "storage").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        ["--set", "task.keywords_file=nowhere"],
        ["--set", "engine=nowhere:E"],
        ["--set", "resources.worker_cpus=4096"],
        ["--set", "arm=sync", "--set", "transport=nowhere:T"],
        ["--scheduler", "pbt"],
        ["--name", "there"],
        ["--resume", "--name", "never_started"],
    ],
    ids=" ".join,
)
def test_a_dry_run_ends_as_the_command_would(command, tmp_path, wrong):
    (tmp_path / "storage" / "there").mkdir(parents=True)

    found = command(*SPACE, *wrong, "--dry-run")
    refused(found)
    assert command(*SPACE, *wrong) == found


def test_a_preset_alone_is_one_trial_of_its_settings(command):
    status, out, error = command("--preset", "course_keyword", "--dry-run", "json")

    (trial,) = map(json.loads, out.splitlines())
    told = (status, trial["arm"], trial["rounds"], trial["optim"]["lr"])
    assert told == (0, "course_keyword", 100, 5e-4)
    assert trial["rollout"]["group_size"] == 4
    assert trial["loss"]["advantage_eps"] == 1e-8
    assert error == ""


@pytest.mark.slow
def test_set_wins_over_an_arm_and_an_arm_over_a_preset(command):
    chosen = ("--preset", "course_keyword", "--space", "async_vs_sync", "--set", "arm=async_k4")
    _, out, _ = command(*chosen, "--set", "optim.lr=0.25", "--dry-run", "json")

    trial = json.loads(out)
    assert trial["optim"]["lr"] == 0.25  # from --set; the preset has 5e-4
    assert (trial["rounds"], trial["lag"]) == (24, 1)  # from the arm; the preset has 100 rounds


def test_an_error_about_a_setting_of_the_preset_names_the_preset(command):
    preset = ("--preset", "pipeline_rl", "--set", "placement=colocated")
    of_preset = (
        "; weight_update comes from --preset pipeline_rl, and --set weight_update=… overrides it"
    )
    refused(
        command(*preset),
        "weight_update=in_flight: has no effect with placement=colocated",
        of_preset,
    )
    _, _, error = command(*preset, "--set", "weight_update=in_flight")
    assert "weight_update=in_flight: has no effect" in error
    assert "--preset" not in error

    # The preset sets 4, which is shown as 4.0.
    of_preset = "; loss.clip_high comes from --preset pipeline_rl"
    refused(
        command("--preset", "pipeline_rl", "--set", "loss.type=sapo"), "loss.clip_high", of_preset
    )
    # The error comes from a trial of an arm that does not have this setting.
    in_arm = ("--space", "async_vs_sync", "--set", "arm=sync", "--set", "model.preset=games")
    of_preset = "; rollout.max_new_tokens comes from --preset course_keyword"
    refused(command("--preset", "course_keyword", *in_arm), "rollout.max_new_tokens=60", of_preset)


def test_a_preset_too_large_for_this_machine_is_shown_and_refused_with_its_parts(
    command, monkeypatch
):
    monkeypatch.setattr(plan_module, "machine_bytes", lambda: 25_000_000_000)
    preset = ("--preset", "course_math")

    refused(command(*preset), "48.4 GB", "25.0 GB", "optimizer moments 12.3 GB", "KV cache 9.4 GB")
    status, out, error = command(*preset, "--dry-run")
    assert status == 2
    assert "model.path=Qwen/Qwen2.5-Math-1.5B" in out
    assert "rollout.max_new_tokens=1024" in out
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_dry_run_ends_with_what_it_found(command):
    _, out, _ = command("--space", "async_vs_sync", "--num-samples", "2", "--dry-run")
    *_, trials, checked = out.splitlines()
    assert trials.startswith("16 trials (8 arms × 2 seeds), which differ in arm, seed, placement")
    assert checked == "all checks passed, nothing was started"
    unequal = ("--space", "async_vs_sync", "--iterations", "4", "--dry-run")
    _, out, _ = command(*unequal)
    assert out.splitlines()[-1] == "all checks passed, nothing was started; 1 note above"


def test_a_preset_for_a_file_shows_its_trial_and_asks_for_the_file(command, monkeypatch, tmp_path):
    monkeypatch.setattr(plan_module, "machine_bytes", lambda: 64_000_000_000)
    preset = ("--preset", "course_math")

    refused(command(*preset), "--preset course_math: task.train_file is not set")
    status, out, error = command(*preset, "--dry-run")
    assert (status, error.count("\n")) == (2, 1)
    assert "memory of a trial: about 48.4 GB of 64.0 GB" in out
    # Another task does not need this file.
    _, _, error = command(*preset, "--set", "task.name=keyword", "--set", "model.path=none")
    assert "task.train_file" not in error


def test_a_dry_run_tells_the_memory_of_a_model_that_cannot_be_had(command, monkeypatch, tmp_path):
    def offline(path: str) -> Path:
        raise NotOnTheHub(f"{path}: no such directory, and it cannot be downloaded")

    monkeypatch.setattr(plan_module, "machine_bytes", lambda: 64_000_000_000)
    monkeypatch.setattr(directory_module, "local_directory", offline)
    (tmp_path / "math.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    given = ("--preset", "course_math", "--set", "task.train_file=math.jsonl")

    refused(command(*given), "model.path=Qwen/Qwen2.5-Math-1.5B: no such directory")
    status, out, error = command(*given, "--dry-run")
    assert (status, error.count("\n")) == (2, 1)
    assert "memory of a trial: about 48." in out


@pytest.mark.slow
def test_a_dry_run_tells_the_memory_that_a_trial_takes(command):
    _, out, _ = command(*SPACE, "--dry-run")

    (line,) = [line for line in out.splitlines() if line.startswith("memory of a trial: about ")]
    assert "sampling weights 4 MB" in line


def test_defaults_of_a_model_on_the_hub_need_its_small_files(monkeypatch, tmp_path):
    hub = FakeHub(tmp_path / "hub", monkeypatch)
    for name in ("org/name", "Qwen/Qwen2.5-Math-1.5B"):
        hub.add(name, chat_template="{{ messages }}")
    arguments = ["--space", "async_vs_sync", "--storage", str(tmp_path)]
    planned = tune.plan_of(tune.parse_arguments([*arguments, "--set", "model.path=org/name"]))
    assert hub.fetched == ["org/name"]
    assert {trial.model.chat_template for trial in planned.trials} == {"on"}
    tune.plan_of(tune.parse_arguments(["--preset", "course_math", "--storage", str(tmp_path)]))
    assert hub.fetched == ["org/name", "Qwen/Qwen2.5-Math-1.5B"]


def test_defaults_of_adapters_are_those_of_the_model_that_they_name(monkeypatch, tmp_path):
    hub = FakeHub(tmp_path / "hub", monkeypatch)
    hub.add("org/chat", chat_template="{{ messages }}")
    adapters = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**adapters, "base_model_name_or_path": "org/chat"}))
    arguments = ["--space", "async_vs_sync", "--storage", str(tmp_path)]
    settings = ["--set", f"model.path={tmp_path}", "--set", "task.name=math"]
    planned = tune.plan_of(tune.parse_arguments([*arguments, *settings]))
    assert hub.fetched == ["org/chat"]
    found = {(trial.model.chat_template, trial.task.template) for trial in planned.trials}
    assert found == {("on", "boxed")}


@pytest.mark.slow
def test_a_trial_of_another_program_fetches_the_small_files_too(monkeypatch, tmp_path):
    from grpo_trainable import trial

    hub = FakeHub(tmp_path, monkeypatch)
    hub.add("org/name", chat_template="{{ messages }}")
    config = trial.resolved({"model": {"path": "org/name", "system": "Be short."}})
    assert (config.model.path, config.model.chat_template) == ("org/name", "on")
    assert hub.fetched == ["org/name"]


def test_help_lists_the_presets(capsys):
    with pytest.raises(SystemExit):
        tune.main(["--help"])

    words = {word.rstrip(",") for word in capsys.readouterr().out.split()}
    assert words >= PRESETS.keys()


def test_an_unknown_preset_is_refused_by_name(command):
    refused(command("--preset", "course_mth"), "course_mth", "did you mean course_math?")
    refused(command("--preset", "drgrpo"), "drgrpo", "did you mean dr_grpo?")


def test_a_preset_with_a_lag_is_one_asynchronous_trial(command):
    _, out, _ = command("--preset", "areal", "--dry-run", "json")

    trial = json.loads(out)
    assert (trial["arm"], trial["placement"], trial["lag"]) == ("areal", "disaggregated", 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_dry_run_shows_the_settings_of_a_preset(command, name):
    status, out, _ = command("--preset", name, "--dry-run")

    chosen, _ = out.split("left at their defaults in every trial:")
    assert status == 0
    assert {f"{key}=" for key in ALGORITHMS[name].settings} <= set(re.findall(r"[\w.]+=", chosen))


@pytest.mark.slow
def test_a_resumed_experiment_keeps_its_preset(command, tmp_path):
    named = ("--preset", "course_keyword", "--name", "mine")
    plan = Plan(Options(preset="course_keyword", name="mine", storage=str(tmp_path / "storage")))
    plan.prepare_directory()

    resume = ("--resume", "--name", "mine", "--dry-run", "json")
    status, out, _ = command(*resume)
    assert (status, json.loads(out)["rounds"]) == (0, 100)
    assert command(*resume, *named)[0] == 0
    # the options in the form that the command prints
    assert command(*resume, "--space", "course_keyword")[1] == out
    refused(command(*resume, "--preset", "course_math"), "was started with course_keyword")
    refused(command(*named), "--name mine", "exists")


def test_a_dry_run_shows_in_what_the_trials_differ_and_writes_nothing(of_a_file, command, tmp_path):
    status, out, error = command("--space", "my_space.py", "--dry-run", "--set", "rounds=8")

    question, count, _, *table = out.splitlines()
    assert (status, error) == (0, "")
    assert question == "mine: which learning rate?"
    assert count == "2 trials, in the order in which they start:"
    assert table[0] == "arm   seed  optim.lr"
    assert set(table[1:3]) == {"slow     0    0.0001", "fast     0    0.0003"}
    assert table[3:6] == ["", "the same in every trial:", "  rounds=8"]
    assert [path.name for path in (tmp_path / "storage").iterdir()] == ["mine"]  # from `of_a_file`


@pytest.mark.slow
def test_as_many_seeds_as_a_round_has_responses_are_pointed_out():
    def notes(seeds: int) -> str:
        words = [*SPACE, "--set", "arm=sync", "--num-samples", str(seeds)]
        return "\n".join(tune.notes(tune.plan_of(tune.parse_arguments(words))))

    assert notes(63) == ""
    assert notes(64) == (
        "note: --num-samples 64 requests 64 seeds of every arm; for trials of 64 responses use "
        "--samples 64"
    )


def test_the_versions_of_optional_packages_are_stored_if_they_are_installed(monkeypatch):
    def version(name: str) -> str:
        if name == "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(importlib.metadata, "version", version)
    packages = plan_module.surroundings()["packages"]
    assert packages["transformers"] == packages["torch"] == "1.2"
    assert "vllm" not in packages


def test_a_missing_matplotlib_is_noted_before_the_trials_start(monkeypatch):
    plan = tune.plan_of(tune.parse_arguments([*SPACE, "--set", "arm=sync"]))
    assert tune.notes(plan) == []

    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert tune.notes(plan) == [
        "note: no report will be written, because matplotlib is missing; install it with: "
        "pip install -e '.[report]'"
    ]


def test_settings_are_shown_for_a_terminal(command):
    status, out, _ = command("--settings")
    assert status == 0
    assert [line.split("=")[0] for line in out.splitlines() if line[0] != " "] == list(CHECKS)
    assert max(map(len, out.splitlines())) <= 100

    _, clip, _ = command("--settings", "clip")
    assert "loss.clip_high=none\n    " in clip
    assert "optim.grad_clip=" in clip
    assert "optim.lr=" not in clip
    refused(command("--settings", "clipx"), "clipx")


# ---- Paths in the arms of a user's space -------------------------------------------------------

ARMS = """\
from search_spaces import SearchSpace
MINE = SearchSpace(
    name="mine",
    question="which words?",
    arms={"few": {"task.keywords_file": "words.txt"}, "all": {"task.name": "keyword"}},
)
"""


@pytest.fixture
def arms(tmp_path, monkeypatch):
    """Write a space's file next to the word list that one of its arms names.

    The command runs in another directory.
    """
    (tmp_path / "spaces").mkdir()
    file = tmp_path / "spaces" / "my_arms.py"
    file.write_text(ARMS)
    words(tmp_path / "spaces" / "words.txt")
    monkeypatch.chdir(tmp_path)
    return file


def keywords_files(out: str) -> dict[str, str | None]:
    configs = [json.loads(line) for line in out.splitlines()]
    return {config["arm"]: config["task"]["keywords_file"] for config in configs}


@pytest.mark.slow
def test_a_relative_path_in_an_arm_means_the_directory_of_its_file(command, arms, monkeypatch):
    by_arm = {"few": str(arms.with_name("words.txt")), "all": None}
    dry = ("--dry-run", "json")
    assert keywords_files(command("--space", "spaces/my_arms.py", *dry)[1]) == by_arm
    assert keywords_files(command("--space", "spaces/my_arms.py:MINE", *dry)[1]) == by_arm
    words(arms.parent.parent / "mine.txt")
    given = ("--set", "task.keywords_file=mine.txt")
    found = keywords_files(command("--space", "spaces/my_arms.py", *given, *dry)[1])
    assert set(found.values()) == {str(arms.parent.parent / "mine.txt")}


@pytest.mark.slow
def test_a_resume_from_another_directory_reads_the_paths_of_its_arms(command, arms, monkeypatch):
    name = ["--name", "mine", "--storage", str(arms.parent.parent / "storage")]
    plan = tune.plan_of(tune.parse_arguments(["--space", "spaces/my_arms.py", *name]))
    plan.prepare_directory()
    monkeypatch.chdir("/")
    assert command(*RESUME, "--dry-run")[0] == 0
    words(arms.with_name("words.txt"), "lamp")
    refused(command(*RESUME), str(arms.with_name("words.txt")), "put back the file")


def test_a_file_that_an_arm_names_is_missed_with_the_arms_name(command, arms):
    arms.with_name("words.txt").unlink()
    missing = command("--space", "spaces/my_arms.py")
    refused(missing, f"task.keywords_file={arms.parent}/words.txt: ", "(arm few of mine)")
    given = command("--space", "spaces/my_arms.py", "--set", "task.keywords_file=nowhere")
    refused(given, f"task.keywords_file={arms.parent.parent}/nowhere: ")
    assert "(arm" not in given[2]


@pytest.mark.slow
def test_paths_of_a_task_of_ones_own_in_an_arm_mean_the_directory_of_the_space(command, arms):
    arms.with_name("mine.py").write_text(TASK)
    own = '{"task.name": "mine.py:Mine", "task.words": "words.txt"}'
    arms.write_text(ARMS.replace('{"task.keywords_file": "words.txt"}', own))
    status, out, error = command("--space", "spaces/my_arms.py", "--dry-run", "json")
    assert (status, error) == (0, "")
    (task,) = [json.loads(line)["task"] for line in out.splitlines() if "Mine" in line]
    assert task["name"] == f"{arms.parent}/mine.py:Mine"
    assert task["words"] == f"{arms.parent}/words.txt"
    arms.with_name("words.txt").unlink()
    missing = command("--space", "spaces/my_arms.py")
    refused(missing, f"task.words: {arms.parent}/words.txt cannot be read", "(arm few of mine)")


def test_trials_run_one_at_a_time_unless_a_scheduler_needs_several():
    def limit(*words: str) -> int:
        return tune.plan_of(tune.parse_arguments([*SPACE, *words])).max_concurrent

    assert limit() == 1
    assert limit("--max-concurrent", "3") == 3
    assert limit("--scheduler", "asha") == limit("--scheduler", "pbt") == 0
    assert limit("--scheduler", "asha", "--max-concurrent", "2") == 2


@pytest.mark.slow
def test_relative_paths_mean_the_callers_directory(command, tmp_path):
    words(tmp_path / "words.txt")
    dry = ("--dry-run", "json", "--set", "task.keywords_file=words.txt")
    _, out, _ = command(*SPACE, *dry)

    config = json.loads(out.splitlines()[0])
    assert config["task"]["keywords_file"] == str(tmp_path / "words.txt")


# ---- A user's task -----------------------------------------------------------------------------

TASK = """
from dataclasses import dataclass
from pathlib import Path
from grpo_trainable.config import integer, path, text
from grpo_trainable.tasks import Example

Path(__file__).with_name("imported").touch()

class Mine:
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        letter: str = text("a")
        size: int = integer(1, minimum=1)
        words: str | None = path(None)

    def __init__(self, settings, seed):
        if settings.size == 13:
            raise RuntimeError("no luck")

    def train_example(self, prompt_index):
        return Example("Write\\n", prompt_index)

    def eval_examples(self, count):
        return [Example("Write\\n", 0)] * count

    def reward(self, response, ground_truth):
        return 1.0
"""
MINE = ("--set", "arm=sync", "--set", "task.name=mine.py:Mine")


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    return tmp_path / "mine.py"


@pytest.mark.slow
def test_settings_of_a_custom_task_are_set_like_any_other(command, mine, tmp_path):
    own = ("--set", "task.letter=7", "--set", "task.words=words.txt", "--set", "task.strict=true")
    words(tmp_path / "words.txt")
    _, out, _ = command(*SPACE, "--dry-run", "json", *own, *MINE)

    task = json.loads(out)["task"]
    assert task == {
        **{field.name: field.default for field in fields(CommonTaskSettings)},
        "name": f"{mine}:Mine",
        "strict": True,
        "letter": "7",
        "size": 1,
        "words": str(tmp_path / "words.txt"),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("task.size=0", ["task.size=0: must be an integer >= 1"]),
        ("task.leter=b", ["task.leter: unknown key; did you mean task.letter?"]),
        ("task.keywords_file=w", ["task.keywords_file: unknown key; "]),
        ("task.size=13", ["mine.py:Mine: cannot be created: RuntimeError: no luck"]),
        ("task.words=nowhere", ["task.words: ", "nowhere cannot be read"]),
        ("task.name=mine.py:Yours", ["mine.py:Yours: cannot be imported", "'Yours'; it has Mine"]),
        ("task.name=yours.py:Mine", ["yours.py:Mine: cannot", "FileNotFoundError: no file"]),
        ("task.name=os:getcwd", ["task.name=os:getcwd: must be a class, got a builtin_function"]),
        (
            "task.name=mine",
            [
                "task.name=mine: must be one of keyword, math, reasoning_gym, code, guess, "
                "calculator, control, mix, or module:Class"
            ],
        ),
    ],
)
def test_a_wrong_task_or_setting_is_one_line_and_status_2(command, mine, setting, words):
    given = MINE[:2] if setting.startswith("task.name=") else MINE
    refused(command(*SPACE, *given, "--set", setting), *words)


@pytest.mark.slow
def test_a_resume_refuses_a_task_that_has_changed(started, command, mine):
    own = ("--set", "task.name=mine.py:Mine", "--set", "task.size=3")
    first = started(*own)
    assert started(resume=True).trials == first.trials

    mine.with_name("imported").unlink()
    mine.write_text(TASK.replace("1.0", "0.0"))
    with_row(first.directory)
    resume = ("--resume", "--name", "mine")
    refused(command(*resume), "--resume: task.name: ", str(mine), "put back the file")
    refused(command(*resume, "--set", "task.size=3"), "task.name", "--accept-changed-code")
    assert not mine.with_name("imported").exists(), "it was imported before it was compared"
    assert command(*resume, "--accept-changed-code", "--dry-run")[0] == 0


@pytest.mark.slow
def test_a_resume_takes_settings_of_its_task_and_refuses_another_task(started, command, mine):
    started("--set", "task.name=mine.py:Mine", "--set", "task.size=3")
    started("--set", "task.size=3", resume=True)
    mine.with_name("other.py").write_text(TASK)
    resume = ("--resume", "--name", "mine")
    refused(command(*resume, "--set", "task.size=4"), "task.size=4", "was fixed at 3")
    refused(command(*resume, "--set", "task.name=other.py:Mine"), "task.name was fixed at")


@pytest.mark.slow
def test_a_resume_loads_no_class_that_state_of_others_may_have_named(started, command, mine):
    path = started("--set", "task.name=mine.py:Mine").directory / EXPERIMENT_FILE
    mine.with_name("imported").unlink()
    mine.write_text(TASK + "# loaded anew\n")
    path.chmod(0o666)

    refused(command("--resume", "--name", "mine"), f"{path} can be written by others")
    assert not mine.with_name("imported").exists()


@pytest.mark.slow
def test_a_wrong_loss_of_the_users_is_refused(command, tmp_path):
    (tmp_path / "losses.py").write_text(
        "def mean(log_probs, old_log_probs, advantages, mask, *, clip_low, clip_high):\n"
        "    return -(advantages * log_probs).mean()\n"
    )
    result = command(*SPACE, "--name", "mean", "--set", "loss.type=losses.py:mean")
    refused(result, "losses.py:mean: the loss, one number per token", "shape ()")
    assert not (tmp_path / "storage" / "mean").exists()
