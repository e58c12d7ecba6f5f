"""What is said before the trials: the first prompt, how many there are, what may not be meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_trainable.config import GRPOConfig
from grpo_trainable.tasks.templates import TEMPLATES, template_text
from grpo_trainable.tasks.truths import lines_without_mark, shared_questions
from search_spaces.presets import PRESETS
from tuning.advice import preset_notes, task_notes
from tuning.checks import check_inputs
from tuning.first_prompt import first_prompt, shortened

MATH = Path(__file__).resolve().parents[2] / "docs" / "howto" / "math.md"


def trial(**task: Any) -> GRPOConfig:
    return GRPOConfig.from_dict({"task": {"name": "math", **task}})


def problems(path: Path, *rows: dict[str, str]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_first_prompt_is_shown_with_its_true_answer():
    title, *text, truth = first_prompt(trial())
    assert title.startswith("the first prompt of arm custom, as its model reads it (")
    assert text[0].startswith("    User: ")
    assert text[-1] == "    Assistant: <think>"
    assert truth.startswith('its true answer: "')


def test_a_task_without_true_answers_shows_its_prompt_alone():
    lines = first_prompt(GRPOConfig.from_dict({"task": {"name": "guess"}}))
    assert len(lines) >= 2


def test_a_long_prompt_loses_its_middle():
    assert shortened("short", 10) == "short"
    assert shortened("a" * 30 + "b" * 30, 10) == "aaaaa\n[… 50 characters …]\nbbbbb"


def test_the_numbers_of_prompts_are_told():
    assert "prompts: 4,096 to train on, 768 held out" in check_inputs(trial())


def test_an_evaluation_that_asks_twice_is_noted():
    config = GRPOConfig.from_dict({"task": {"name": "math"}, "eval": {"prompts": 800}})
    note = "note: eval.prompts=800 asks some of the 768 held-out prompts more than once"
    assert note in check_inputs(config)


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ({"template": "short"}, False),
        ({"template": "boxed"}, False),
        ({"template": "question_only"}, True),
        ({"template": "question_only", "answer_in": "tags"}, False),
    ],
)
def test_a_template_that_asks_for_no_box_is_noted(settings: dict[str, str], noted: bool):
    notes = "".join(task_notes(trial(**settings)))
    assert (r"does not ask for the answer in \boxed{}" in notes) is noted


def test_a_system_message_may_ask_for_the_box(tmp_path: Path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[-1].content }}")
    config = GRPOConfig.from_dict(
        {
            "task": {"name": "math", "template": "question_only"},
            "model": {"chat_template": str(template), "system": r"Answer in \boxed{}."},
        }
    )
    assert list(task_notes(config)) == []


def test_a_conversation_within_a_conversation_is_noted(tmp_path: Path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[-1].content }}")
    for name, noted in (("r1_zero", True), ("boxed", False)):
        data = {
            "task": {"name": "math", "template": name},
            "model": {"chat_template": str(template)},
        }
        notes = "".join(task_notes(GRPOConfig.from_dict(data)))
        assert ("into a message of another" in notes) is noted


def test_other_tasks_have_no_such_notes():
    assert list(task_notes(GRPOConfig.from_dict({"task": {"name": "keyword"}}))) == []


def test_an_answer_without_the_mark_of_the_others_is_noted(tmp_path: Path):
    path = problems(
        tmp_path / "train.jsonl",
        {"question": "1 + 1?", "answer": "It is 2.\n#### 2"},
        {"question": "1 + 2?", "answer": "It is 3."},
        {"question": "1 + 3?", "answer": "It is 4.\n#### 4"},
    )
    assert lines_without_mark("train_file", path) == [2]
    (note,) = task_notes(trial(train_file=path))
    assert note.startswith(
        "note: task.train_file=train.jsonl: line 2 has no #### before its answer"
    )


def test_a_file_without_marks_is_not_noted(tmp_path: Path):
    path = problems(tmp_path / "train.jsonl", {"question": "1 + 1?", "answer": "2"})
    assert lines_without_mark("train_file", path) == []


def test_problems_on_both_sides_are_noted(tmp_path: Path):
    first, second = ({"question": f"1 + {n}?", "answer": str(1 + n)} for n in (1, 2))
    train = problems(tmp_path / "train.jsonl", first, second)
    heldout = problems(tmp_path / "heldout.jsonl", second)
    assert shared_questions(train, heldout) == 1
    (note,) = task_notes(trial(train_file=train, eval_file=heldout))
    assert note.startswith(
        "note: of the held-out problems, 1 stand in the file to train on as well"
    )


def test_the_course_preset_names_the_file_that_it_is_for(tmp_path: Path):
    wants = PRESETS["course_math"].wants
    (note,) = preset_notes(wants, trial())
    assert note == "note: the preset is for MATH: --set task.train_file=FILE names it"
    path = problems(tmp_path / "train.jsonl", {"question": "1 + 1?", "answer": "2"})
    assert list(preset_notes(wants, trial(train_file=path))) == []


def test_the_page_has_the_text_of_every_template():
    page = " ".join(MATH.read_text().replace("`", "").replace("<br>", " ").split())
    for name in TEMPLATES:
        for line in template_text(name).splitlines():
            assert line in page, name
