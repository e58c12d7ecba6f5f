"""Notes about the prompts of a trial before it starts."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_trainable.config import GRPOConfig
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.tasks.prompts import Prompts, build_task
from tuning.prompt_notes import about_prompts


def told(**settings: Any) -> list[str]:
    trial = GRPOConfig.from_dict(settings)
    task = build_task(trial)
    return list(about_prompts(trial, task, Prompts(trial, task, read_tokenizer(None))))


NUMBERS = "prompts: 3 to train on (from train_file), 2 held out (all of eval_file)"


@pytest.fixture
def sums(tmp_path) -> dict[str, str]:
    """Return the settings of a task with 3 problems for training and 2 held out."""
    files = {}
    for key, first, count in (("train_file", 0, 3), ("eval_file", 3, 2)):
        lines = [f'{{"question": "{first + i} + 1?", "answer": "2"}}\n' for i in range(count)]
        (tmp_path / key).write_text("".join(lines))
        files[key] = str(tmp_path / key)
    return {"name": "math", "equality": "exact", **files}


def test_the_numbers_of_prompts_are_told_and_that_they_repeat(sums):
    assert told(task=sums, eval={"prompts": 2}) == [
        "prompts: 3 to train on in several passes (from train_file), 2 held out (all of eval_file)"
    ]
    once = {"rounds": 1, "rollout": {"prompts": 3}}
    assert told(task=sums, eval={"prompts": 3}, **once) == [
        NUMBERS,
        "note: eval.prompts=3 requests 3 held-out prompts, but there are only 2, so some are used "
        "several times; eval.prompts=2 uses each once",
    ]


def test_each_task_of_a_mix_has_its_own_numbers(sums):
    both = {label: {**sums, "weight": 1} for label in ("sums", "more")}
    lines = told(task={"name": "mix", "mix": both}, eval={"prompts": 5})
    assert lines[0] == NUMBERS.replace("prompts", "prompts of sums")
    note = "note: eval.prompts=5 requests 3 held-out prompts of sums, but there are only 2"
    assert note in lines[1]
    assert lines[2:] == [NUMBERS.replace("prompts", "prompts of more")]


def test_the_last_evaluation_repeats_no_prompt(sums):
    assert told(task=sums, eval={"prompts": 1, "final_prompts": 2})
    both = {label: {**sums, "weight": 1} for label in ("sums", "more")}
    for task, prompts, needs in (
        (sums, 3, "needs 3 held-out prompts, but there are only 2"),
        ({"name": "mix", "mix": both}, 5, "needs 3 held-out prompts of sums, but there are only 2"),
    ):
        with pytest.raises(ValueError, match=f"^eval.final_prompts={prompts}: {needs}; lower eval"):
            told(task=task, eval={"prompts": 2, "final_prompts": prompts})


def test_a_prompt_inside_a_prompt_is_told(sums, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}\nassistant:")
    model = {"chat_template": str(tmp_path / "chat.jinja")}
    for template, notes in (("r1_zero", 1), ("short", 1), ("question_only", 0)):
        lines = told(task={**sums, "template": template}, model=model, eval={"prompts": 2})
        assert (
            len([line for line in lines if "each prompt ends up inside another prompt" in line])
            == notes
        )


def test_the_split_of_a_file_is_told_in_numbers(sums, tmp_path):
    lines = [f'{{"question": "{i} + 1?", "answer": "{i + 1}"}}\n' for i in range(12)]
    (tmp_path / "some.jsonl").write_text("".join(lines))
    task = {"name": "math", "equality": "exact"}
    assert told(task={**task, "train_file": f"{tmp_path}/some.jsonl"}, eval={"prompts": 1}) == [
        "prompts: 11 to train on in several passes (from some.jsonl), 1 held out (by a hash of "
        "each prompt; task.eval_file=FILE holds out a whole file)"
    ]
    assert told(task={**task, "eval_file": f"{tmp_path}/some.jsonl"}, eval={"prompts": 12}) == [
        "prompts: 4,096 to train on (from the shipped problems), 12 held out (all of some.jsonl)"
    ]
    assert told(task=task) == ["prompts: 4,096 to train on, 768 held out"]
