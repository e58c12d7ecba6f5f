"""Judges in reward processes and in trials, against a local stub server."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import trial_config
from judge_stub import KEY, Reply, StubJudge, completion, inside, mentions

from grpo_trainable.config import ConfigError
from grpo_trainable.generator.scorer import ProcessScorer, check_reward
from grpo_trainable.protocol.calls import FailsAgain
from grpo_trainable.protocol.rollout import Rubric
from grpo_trainable.protocol.round_records import SCHEMAS, details_of
from grpo_trainable.tasks import RewardError, Score, ScoreRequest


def request(response: str, example: int = 0, **more: Any) -> ScoreRequest:
    return ScoreRequest(response, None, example=example, prompt="Say cat.", **more)


def test_process_scores_a_chunk_in_one_call_and_counts_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def answer(asked: str) -> Reply:
        if inside("response", asked) == "bad":
            return Reply(401, f"{KEY} is wrong")
        return mentions(asked)

    monkeypatch.setenv("STUB_KEY", KEY)
    with StubJudge(answer) as stub:
        reward = f"judge:{stub.file(tmp_path, key_variable='STUB_KEY', max_rubrics=2)}"
        with contextlib.closing(ProcessScorer(reward, deadline_s=60.0)) as scorer:
            good, bad, other = scorer.score(
                [request("a cat"), request("bad"), request("a rude cat", example=1)]
            )
        assert good == Score(2 / 3, None, 2 / 3, parts={"cat": 1.0, "rude": 0.0, "rubrics": 0.0})
        assert isinstance(other, Score)
        assert other.reward == pytest.approx(1 / 3)
        # The failed call was repeated, and known verdicts were not requested again.
        assert bad == RewardError("judge, criterion cat: HTTP 401: *** is wrong", repeats=True)
        assert bad.usage == {"calls": 4}
        assert good.usage == {"calls": 2, "cached": 2, "prompt_tokens": 20, "completion_tokens": 6}
        assert stub.keys == {f"Bearer {KEY}"}
    assert KEY not in "".join(capfd.readouterr())


def test_rubrics_travel_to_the_process_and_back(tmp_path: Path) -> None:
    def answer(asked: str) -> Reply:
        if asked.count("<response>") > 1:
            return completion('{"positive": ["mentions dog"]}')
        if inside("response", asked) == "a dog" and nonsense:
            return nonsense.pop()
        return mentions(asked)

    nonsense = [completion("I forgot.")]  # for the first call, which is then repeated
    with StubJudge(answer) as stub:
        reward = f"judge:{stub.file(tmp_path, max_rubrics=2)}"
        weights = {"cat": 1.0, "rubrics": 2.0}
        scorer = ProcessScorer(reward, deadline_s=60.0, weights=weights)
        with contextlib.closing(scorer):
            old = (Rubric("mentions cow", 1.0),)
            texts = ("a cat", "a dog", "a dog and a cow")
            first, *_, last = scorer.score([request(text, rubrics=old) for text in texts])
    assert isinstance(first, Score)
    assert isinstance(last, Score)
    assert first.rubrics == [["mentions cow", 1.0], ["mentions dog", 1.0]]
    assert (first.reward, last.reward) == (1.0, 2.0)  # the weighted sums of the parts


def test_judge_is_checked_before_anything_starts(tmp_path: Path) -> None:
    with StubJudge() as stub:
        reward = f"judge:{stub.file(tmp_path)}"
        with pytest.raises(ConfigError) as error:
            check_reward(reward, weighted=["dog"])
        assert str(error.value).endswith("has the parts cat, rude")
        stub.answers = lambda asked: Reply(404, "no such model")
        with pytest.raises(ConfigError) as error:
            check_reward(reward, weighted=["cat"])
        assert str(error.value) == (
            f"task.reward={reward}: {stub.endpoint} with model=stub: HTTP 404: no such model"
        )
    (tmp_path / "judge.yaml").write_text("model: m")
    with pytest.raises(ValueError, match=r"judge\.yaml: endpoint is missing"):
        check_reward(reward)


# ---- Trials ----------------------------------------------------------------------------------

WORDS = ("apple", "pear", "stone", "river", "cloud", "horse")


def drawn(text: str) -> int:
    """Return a number that depends only on the text."""
    return hashlib.sha256(text.encode()).digest()[0]


def recorded(asked: str) -> Reply:
    """Answer like a judge whose replies were recorded: equal questions get equal answers.

    For one in ten responses, the reply is nonsense.
    """
    if asked.count("<response>") > 1:
        return completion(json.dumps({"positive": [f"rubric {drawn(asked)}"]}))
    if drawn(inside("response", asked)) < 26:
        return completion("nonsense")
    return completion(json.dumps({"score": drawn(asked) % 3}))


def config_of(stub: StubJudge, directory: Path, **task: Any) -> dict[str, Any]:
    data = directory / "data.jsonl"
    data.write_text("".join(f"{json.dumps({'prompt': word})}\n" for word in WORDS))
    reward = f"judge:{stub.file(directory, max_rubrics=2, retries=0)}"
    files = {"train_file": str(data), "eval_file": str(data)}
    task = {"reward": reward, "max_error_rate": 0.9, **files, **task}
    return trial_config(placement="colocated", task=task)


def rewards(row: dict[str, Any]) -> list[tuple[str, float]]:
    details = details_of(row)
    assert details is not None
    table = pa.Table.from_pydict(details.rollouts, SCHEMAS["rollouts"]).to_pylist()
    return [(own["response"], own["reward"]) for own in table]


def rubrics_of(trial: Any) -> dict[str, Any]:
    return trial.trial.pipeline.state()["rubrics"]


def test_trial_with_a_failing_judge_continues_and_resumes_exactly(
    begun: Any, tmp_path: Path
) -> None:
    with StubJudge(recorded) as stub:
        trial = begun(config_of(stub, tmp_path))
        rows = [trial.train() for _ in range(2)]
        trial.save_checkpoint(str(tmp_path / "middle"))
        rows += [trial.train() for _ in range(2)]
        before = rubrics_of(trial)
        assert rows[-1]["count/reward_errors"] > 0
        assert rows[-1]["count/dropped_reward"] > 0
        assert rows[-1]["count/judge_calls"] > 100
        assert rows[-1]["count/judge_prompt_tokens"] >= 10 * 100
        assert before["rubrics"]
        assert all(len(own) <= 2 for _, own in before["rubrics"])

        resumed = begun(config_of(stub, tmp_path))
        resumed.load_checkpoint(str(tmp_path / "middle"))
        again = [resumed.train() for _ in range(2)]
        assert [rewards(row) for row in again] == [rewards(row) for row in rows[2:]]
        assert [row["reward/eval_mean"] for row in again] == [
            row["reward/eval_mean"] for row in rows[2:]
        ]
        assert rubrics_of(resumed) == before


def test_trial_ends_if_the_judge_refuses_every_call(begun: Any, tmp_path: Path) -> None:
    with StubJudge(lambda asked: Reply(401, "no")) as stub:
        trial = begun(config_of(stub, tmp_path, max_error_rate=0.1))
        with pytest.raises(FailsAgain, match=r"task\.max_error_rate=0\.1.*HTTP 401: no"):
            trial.train()
