"""The command launch/evaluate.py: its output, its files, and its one-line errors."""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from evaluations import generation
from policies import write_quick_policy

from grpo_trainable.tools.evaluation.generation import Generation
from launch import evaluate
from reports.evaluations.files import read_evaluation


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def command(tmp_path, capsys, monkeypatch):
    """Return a function that runs the command in a temporary directory.

    The function returns the exit status, the standard output and the standard error.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYON_NUM_THREADS", os.environ.get("RAYON_NUM_THREADS", "1"))

    def run(*argv: str) -> tuple[int, str, str]:
        threads = torch.get_num_threads()
        try:
            status = evaluate.main([*argv])
        finally:
            torch.set_num_threads(threads)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


SHORT = ("--set", "rollout.max_new_tokens=8", "--prompts", "4")


@pytest.mark.slow
def test_a_policy_is_evaluated_from_start_to_end(command, policy, tmp_path):
    status, out, error = command("--model", policy, *SHORT, "--samples", "3", "--out", "first")
    assert (status, error) == (0, "")
    assert f"directory {policy}, SHA-256" in out
    assert "task keyword: 4 held-out prompts × 3 responses, temperature 0.8, seed 0" in out
    assert out.startswith("prompts: 224 held out\n")
    assert out.splitlines()[-2:] == [
        str(tmp_path / "first" / "evaluation.html"),
        str(tmp_path / "first" / "evaluation.json"),
    ]
    data = json.loads((tmp_path / "first" / "evaluation.json").read_text())
    assert data["figures"].keys() >= {"reward", "pass@1", "pass@2", "pass@3", "response_tokens"}
    assert data["policy"]["path"] == policy
    assert data["config"]["rollout"]["max_new_tokens"] == 8
    assert data["command"].endswith("--out first")
    assert len(read_evaluation(tmp_path / "first").generations) == 12

    status, out, error = command(
        *("--model", policy, *SHORT, "--temperature", "0", "--out", "second"),
        *("--against", "first"),
    )
    assert (status, error) == (0, "")
    assert "× 1 response, greedy" in out
    assert "compared with first, over 4 prompts that both policies answered" in out
    against = json.loads((tmp_path / "second" / "evaluation.json").read_text())["against"]
    assert against["differences"]["reward"]["prompts"] == 4


def test_a_comparison_says_that_the_reward_has_changed(command, policy, tmp_path):
    (tmp_path / "mine.py").write_text("def score(response, ground_truth):\n    return 1.0\n")
    same = ("--model", policy, *SHORT, "--set", "task.reward=mine.py:score")
    assert command(*same, "--out", "first")[0] == 0
    assert "note:" not in command(*same, "--out", "second", "--against", "first")[1]

    (tmp_path / "mine.py").write_text("def score(response, ground_truth):\n    return 2.0\n")
    out = command(*same, "--out", "third", "--against", "first")[1]
    assert "task.reward (its file has changed)" in out
    data = json.loads((tmp_path / "third" / "evaluation.json").read_text())
    assert data["files"].keys() == {"task.reward"}
    assert data["against"]["changes"] == ["task.reward (its file has changed)"]


@pytest.mark.slow
def test_the_problems_that_ship_end_at_a_text_and_have_a_majority(command, tmp_path):
    status, out, error = command(
        *("--task", "math", "--prompts", "4", "--samples", "4", "--out", "sums")
    )
    assert (status, error) == (0, "")
    assert "majority@4" in out
    found = read_evaluation(tmp_path / "sums").generations
    assert len(found) == 16
    assert any(each.response.endswith("</answer>") and each.finished for each in found)


def test_a_dry_run_shows_the_settings_and_writes_nothing(command, tmp_path):
    status, out, _ = command("--dry-run", "json", "--samples", "5", "--prompts", "all")
    assert status == 0
    config = json.loads(out)
    assert config["eval"]["samples"] == 5
    assert config["eval"]["prompts"] > 100
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_a_table_of_the_settings_that_an_evaluation_reads(command):
    status, out, told = command("--dry-run", "--samples", "5")
    assert (status, told) == (0, "")
    chosen, _, by_default = out.partition("left at their defaults:\n")
    assert out.startswith("seed=0\n\n")
    assert "not at their defaults:\n  eval.samples=5" in chosen
    assert "  eval.temperature=0.8" in by_default
    assert "optim." not in out
    assert "resources.learner" not in out
    assert max(map(len, out.splitlines())) <= 100
    assert "prompts: " in out


@pytest.fixture
def problems(tmp_path) -> str:
    """Write a file of 12 problems. The split by hash holds out one of them."""
    lines = [json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) for i in range(12)]
    (tmp_path / "test.jsonl").write_text("\n".join(lines))
    return "test.jsonl"


@pytest.mark.parametrize(
    ("options", "prompts"),
    [
        (["--prompts", "all"], 12),
        ([], 12),
        (["--prompts", "5"], 5),
        (["--set", "eval.prompts=20"], 20),
    ],
)
def test_an_eval_file_is_held_out_as_a_whole(command, problems, options, prompts):
    math = ("--task", "math", "--set", "task.equality=exact")
    files = ("--set", f"task.eval_file={problems}")
    status, out, told = command(*math, *files, *options, "--dry-run", "json")
    assert status == 0
    assert json.loads(out)["eval"]["prompts"] == prompts
    used = f"; an evaluation uses {prompts} of them" if prompts < 12 else ""
    assert told == f"prompts: 12 held out (all of test.jsonl){used}\n"


def test_the_split_of_a_file_is_told_in_numbers(command, problems):
    math = ("--task", "math", "--set", "task.equality=exact")
    files = ("--set", f"task.train_file={problems}")
    status, out, told = command(*math, *files, "--prompts", "all", "--dry-run", "json")
    assert (status, json.loads(out)["eval"]["prompts"]) == (0, 1)
    assert told.startswith("prompts: 1 of 12 held out (by a hash of")


@pytest.mark.slow
def test_an_evaluation_begins_with_the_numbers_of_prompts(command, problems):
    math = ("--task", "math", "--set", "task.equality=exact", "--samples", "1")
    short = ("--set", "rollout.max_new_tokens=4", "--out", "tested")
    status, out, _ = command(*math, *short, "--set", f"task.eval_file={problems}")
    assert status == 0
    assert out.startswith("prompts: 12 held out (all of test.jsonl)\n")
    assert "task math: 12 held-out prompts of test.jsonl × 1 response" in out
    assert "repeat" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--checkpoint", "nowhere"], ["nowhere: is not a directory"]),
        (["--checkpoint", "empty"], ["empty: contains no checkpoint"]),
        (["--checkpoint", "checkpoint_000001"], ["manifest.json: is missing"]),
        (["--model", "nowhere"], ["model.path=", "nowhere: no such directory"]),
        (["--model", "a", "--checkpoint", "b"], ["not allowed with"]),
        (["--task", "maths"], ["task.name=maths"]),
        (["--set", "optim.lr=1"], ["optim.lr=1: has no effect on an evaluation"]),
        (["--samples", "0"], ["--samples", "must be an integer >= 1"]),
        (["--samples", "9", "--batch", "8"], ["--batch 8: must be >= 9, because all responses"]),
        (["--prompts", "some"], ["--prompts", "must be an integer >= 1, got some; or all"]),
        (["--temperature", "-1"], ["--temperature", ">= 0"]),
        (["--top-p", "2"], ["--top-p", "must be a number in [0, 1]"]),
        (["--top-p", "0"], ["eval.top_p=0.0: must be a number > 0 and <= 1"]),
        (["--temperature", "0", "--samples", "2"], ["eval.samples=2: must be 1"]),
        (["--set", "rollout.max_new_tokens=300"], ["context is 128 tokens", "valid: at most"]),
        (["--out", "full"], ["full: is not empty"]),
        (["--out", "full/file"], ["full/file: cannot be used"]),
        (["--against", "empty"], ["empty: contains no evaluation"]),
        (["--out", "s3://bucket"], ["--out s3://bucket", "a directory on this machine"]),
        (["--set", "engine=nowhere:E"], ["engine=nowhere:E", "cannot be imported"]),
        (["--bogus"], ["--bogus", "--help"]),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(arguments, words, command, tmp_path):
    for name in ("empty", "full", "checkpoint_000001"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    status, out, error = command(*arguments)
    assert (status, out) == (2, "")
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_nucleus_is_named_in_the_output(command, policy):
    status, out, _ = command("--model", policy, *SHORT, "--top-p", "0.9", "--out", "nucleus")
    assert status == 0
    assert "temperature 0.8, top_p 0.9, seed 0" in out


@pytest.mark.slow
def test_an_evaluation_of_other_prompts_is_no_comparison(command, policy, tmp_path):
    (tmp_path / "test.jsonl").write_text(json.dumps({"prompt": "Another", "answer": "a"}) + "\n")
    files = ("--set", "task.eval_file=test.jsonl", "--set", "task.train_file=test.jsonl")
    short = ("--set", "rollout.max_new_tokens=8", "--prompts", "1")
    assert command("--model", policy, *short, *files, "--out", "other")[0] == 0
    status, _, error = command("--model", policy, *SHORT, "--out", "mine", "--against", "other")
    assert status == 2
    assert "--against other: has no prompt in common with this evaluation" in error
    assert not (tmp_path / "mine").exists()


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as ended:
        evaluate.parse_arguments(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for word in ("--checkpoint", "evaluation.html", "examples:", "exit status", "pass@k"):
        assert word in out


def test_help_tells_the_default_temperature_of_each_task(capsys):
    with pytest.raises(SystemExit):
        evaluate.parse_arguments(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "likely token (default: the trial's, or 0.8; 1 for math, guess, calculator)" in out


class Stream(io.StringIO):
    """A standard error stream, with or without a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal


class TwoBatches:
    """An evaluator of two batches with three tokens each."""

    responses = 4

    def batches(self, between_tokens: Callable[[], None]) -> Iterator[list[Generation]]:
        for prompt in range(2):
            for _ in range(3):
                time.sleep(0.06)  # the bar is drawn at most every 50 ms
                between_tokens()
            yield [generation(prompt, index) for index in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_also_within_a_batch_and_without_a_terminal(terminal, monkeypatch):
    monkeypatch.setattr("sys.stderr", stream := Stream(terminal=terminal))
    monkeypatch.setattr(evaluate, "DRAWN_EVERY_S", 0.05)
    monkeypatch.setattr(evaluate, "LINE_EVERY_S", 0.05)
    assert len(evaluate._sampled(TwoBatches())) == 4
    drawn = stream.getvalue()
    if terminal:
        assert "token 2 of a batch:   0%" in drawn
        assert "token 3 of a batch: 100%" in drawn
        assert "4/4" in drawn
    else:
        last = drawn.splitlines()[-1]
        assert re.fullmatch(
            r"\d\d:\d\d:\d\d  2 of 4 responses, token 3 of a batch, \d+ threads?", last
        )


def test_only_settings_that_an_evaluation_reads_are_advised(command):
    told = command("--max_new_tokens", "3")[2]
    assert "not an option; write --set rollout.max_new_tokens=VALUE" in told
    assert "--set" not in command("--learning_rate", "3")[2]
