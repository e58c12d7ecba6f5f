"""launch/evaluate.py with a user's rewards. test_finished_run.py evaluates checkpoints."""

from __future__ import annotations

import json

import pytest

from launch import evaluate
from reports.evaluations.files import read_evaluation

pytestmark = pytest.mark.usefixtures("in_this_process")
VOTES = '''
"""A reward for format and answer: a response's first word is its answer."""

def score(response, ground_truth):
    words = response.split()
    answer = words[0] if words else None
    right = float(answer is not None and answer[0] in "AOT")
    return {"reward": right, "format_reward": 1.0, "answer_reward": right, "answer": answer}

def fails(response, ground_truth):
    if len(response) % 2:
        raise ValueError("odd")
    return 1.0
'''


def test_answers_of_a_reward_of_ones_own_are_voted_on(tmp_path, capsys):
    (tmp_path / "votes.py").write_text(VOTES)
    status = evaluate.main(
        [
            *("--set", "task.reward=votes.py:score", "--samples", "4", "--prompts", "8"),
            *("--set", "rollout.max_new_tokens=16", "--out", "mine"),
        ]
    )
    out, error = capsys.readouterr()
    assert status == 0, error
    generations = read_evaluation(tmp_path / "mine").generations
    assert all(own.answer == own.response.split()[0] for own in generations)
    figures = json.loads((tmp_path / "mine" / "evaluation.json").read_text())["figures"]
    assert figures.keys() >= {"pass@4", "majority@1", "majority@2", "majority@4"}
    assert figures["majority@1"]["value"] == pytest.approx(figures["pass@1"]["value"])
    assert "majority@4" in out


def test_a_reward_that_fails_too_often_is_told_and_nothing_is_lost(tmp_path, capsys):
    (tmp_path / "votes.py").write_text(VOTES)
    status = evaluate.main(
        [
            *("--set", "task.reward=votes.py:fails", "--samples", "4", "--prompts", "8"),
            *("--set", "rollout.max_new_tokens=16", "--out", "mine"),
        ]
    )
    assert status == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert ": the reward failed on " in told
    record = read_evaluation(tmp_path / "mine")
    assert {own.error for own in record.errors} == {"ValueError: odd (votes.py, line 12)"}
    assert all((own.reward is None) == (len(own.response) % 2 == 1) for own in record.generations)
