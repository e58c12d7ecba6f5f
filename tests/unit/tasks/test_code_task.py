"""The code task: file layouts, prompts, the program in a response. No program runs here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.environments.unit_tests import count_tests
from grpo_trainable.generator.scorer import _unverified
from grpo_trainable.tasks import CodeReward, CodeTask, Score
from grpo_trainable.tasks.code import STOPS, completion, last_block, parse_problem
from grpo_trainable.tasks.prompts import build_task

HUMANEVAL = {
    "task_id": "demo/0",
    "prompt": 'import math\n\ndef one():\n    return 1\n\ndef area(r):\n    """Area."""\n',
    "entry_point": "area",
    "canonical_solution": "    return math.pi * r * r\n",
    "test": "\ndef check(candidate):\n    assert candidate(0) == 0\n    assert True\n",
}
MBPP = {
    "task_id": 2,
    "text": "Write a function double(n).",
    "code": "def double(n):\n    return 2 * n",
    "test_list": ["assert double(1) == 2", "assert double(2) == 4"],
    "test_setup_code": "",
}


@pytest.fixture
def problems(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes rows to a file, and returns the path of the file."""

    def write(*rows: Any, name: str = "problems.jsonl") -> str:
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, rows)))
        return str(path)

    return write


def code_task(train_file: str, eval_file: str | None = None, **settings: Any) -> CodeTask:
    task = {"name": "code", "train_file": train_file, "eval_file": eval_file, **settings}
    built = build_task(GRPOConfig.from_dict({"task": task}))
    assert isinstance(built, CodeTask)
    return built


# ---- Layouts ---------------------------------------------------------------------------------


def test_a_completion_continues_the_prompt_of_humaneval() -> None:
    example = parse_problem(HUMANEVAL, in_block=False)
    assert example.prompt == HUMANEVAL["prompt"]
    assert example.ground_truth == {
        "layout": "HumanEval",
        "head": HUMANEVAL["prompt"],
        "tests": "def check(candidate):\n    assert candidate(0) == 0\n    assert True\n\n"
        "check(area)\n",
    }


def test_a_block_replaces_the_entry_point_and_keeps_what_precedes_it() -> None:
    example = parse_problem(HUMANEVAL, in_block=True)
    assert isinstance(example.prompt, str)
    assert example.prompt.endswith(f"code block:\n```python\n{HUMANEVAL['prompt'].strip()}\n```\n")
    assert isinstance(example.ground_truth, dict)
    assert example.ground_truth["head"] == "import math\n\ndef one():\n    return 1\n\n"


def test_mbpp_shows_the_tests_and_sets_them_up() -> None:
    row = {**MBPP, "test_setup_code": "two = 2", "test_imports": ["import math"]}
    example = parse_problem(row, in_block=False)
    assert example.prompt == (
        "You are an expert Python programmer, and here is your task: Write a function double(n). "
        "Your code should pass these tests:\n\nassert double(1) == 2\nassert double(2) == 4\n"
        "[BEGIN]\n"
    )
    tests = "import math\ntwo = 2\nassert double(1) == 2\nassert double(2) == 4\n"
    assert example.ground_truth == {"layout": "MBPP", "head": "", "tests": tests}
    asked = parse_problem(row, in_block=True)
    assert isinstance(asked.prompt, str)
    assert asked.prompt.endswith(
        "code block:\nWrite a function double(n).\nYour code should pass these tests:\n\n"
        "assert double(1) == 2\nassert double(2) == 4\n"
    )


def test_the_sanitized_mbpp_has_its_text_in_prompt() -> None:
    row = {"prompt": "Double n.", "test_list": ["assert double(1) == 2"], "test_imports": []}
    assert "Double n." in str(parse_problem(row, in_block=False).prompt)


def test_only_a_users_reward_gets_the_row() -> None:
    assert parse_problem(MBPP, in_block=True).columns == {}
    assert parse_problem(MBPP, in_block=True, own_reward=True).columns == MBPP


@pytest.mark.parametrize(
    ("row", "mistake"),
    [
        ({"question": "1 + 1?", "answer": "2"}, "must have the fields `prompt`, `entry_point` and"),
        ({**HUMANEVAL, "prompt": " "}, "the field `prompt` must be non-empty text"),
        ({**HUMANEVAL, "entry_point": None}, "the field `entry_point` must be non-empty text"),
        (
            {**HUMANEVAL, "entry_point": "are"},
            "entry_point=are: `prompt` does not define this function",
        ),
        ({**HUMANEVAL, "test": "assert area(0) == 0"}, "`test` must define the function check"),
        (
            {**HUMANEVAL, "test": "def check(candidate):\n    assert True"},
            "the tests have no assert statement",
        ),
        ({**HUMANEVAL, "test": "def check(candidate) assert 1"}, "the tests are not valid Python"),
        ({**MBPP, "text": 3}, "the field `text` must be non-empty text"),
        ({**MBPP, "test_list": []}, "the field `test_list` must not be empty"),
        ({**MBPP, "test_list": "assert double(1) == 2"}, "`test_list` must be a list of texts"),
        ({**MBPP, "test_list": ["double(1) == 2"]}, "the tests have no assert statement"),
        ({**MBPP, "test_list": ["assert double(1) =="]}, "the tests are not valid Python"),
        ({**MBPP, "test_imports": [3]}, "the field `test_imports` must be a list of texts"),
        ({**MBPP, "test_setup_code": 3}, "the field `test_setup_code` must be text"),
    ],
)
def test_a_row_in_another_layout_is_one_line(
    problems: Callable[..., str], row: dict[str, Any], mistake: str
) -> None:
    file = problems(row)
    with pytest.raises(ValueError, match=r"^task\.train_file=.*: has no valid row; line 1: ") as no:
        code_task(file)
    assert mistake in str(no.value)
    assert "\n" not in str(no.value)
    mixed = problems(MBPP, row)
    with pytest.raises(ValueError, match=r"^task\.train_file=.*: line 2: "):
        code_task(mixed, strict=True)


def test_asserted_constants_are_no_tests() -> None:
    assert count_tests("assert True, 'runs'\nfor i in range(9):\n    assert i < 9\nassert f()") == 2


# ---- Responses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "block"),
    [
        ("First:\n```python\na = 1\n```\nBetter:\n```py\na = 2\n```\nDone.", "a = 2\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("1. So:\n   ```python\n   if b:\n       a = 1\n   ```\n", "if b:\n    a = 1\n"),
        ("```python\n```", ""),
        ("a = 1", None),
        ("```python\na = 1", None),
        ("Use `a = 1`, not ```a = 2```.", None),
    ],
)
def test_the_last_complete_block_is_the_code(response: str, block: str | None) -> None:
    assert last_block(response) == block


@pytest.mark.parametrize(
    ("response", "layout", "code"),
    [
        ("    return 1\n\ndef", "HumanEval", "    return 1\n"),
        ("    return 1\nprint(1)\n# end", "HumanEval", "    return 1"),
        ("    return 1\n    # indented\n", "HumanEval", "    return 1\n    # indented\n"),
        ("def a(): ...\ndef b(): ...\n[DONE] x", "MBPP", "def a(): ...\ndef b(): ...\n"),
    ],
)
def test_a_completion_ends_at_the_first_stop(response: str, layout: str, code: str) -> None:
    assert completion(response, STOPS[layout]) == code


def test_a_response_without_a_block_earns_nothing_and_runs_nothing() -> None:
    task = GRPOConfig.from_dict({"task": {"name": "code", "train_file": "/p", "code_in": "block"}})
    truth = parse_problem(MBPP, in_block=True).ground_truth
    assert CodeReward(task.task).reward("def double(n): ...", truth) == Score(0.0, 0.0, 0.0)


def test_a_response_whose_tests_give_no_result_counts_as_wrong() -> None:
    task = GRPOConfig.from_dict({"task": {"name": "code", "train_file": "/p"}}).task
    score = _unverified(task)
    assert score is not None
    assert score("<answer>1</answer>") == Score(0.0, 0.0, 0.0, verified=False)


# ---- The task ----------------------------------------------------------------------------------


def test_responses_stop_where_no_layout_goes_on(problems: Callable[..., str]) -> None:
    human = problems(HUMANEVAL, name="human.jsonl")
    mbpp = problems(MBPP, name="mbpp.jsonl")
    assert code_task(human, human).stop == STOPS["HumanEval"]
    assert code_task(mbpp, mbpp).stop == ("[DONE]",)
    assert code_task(mbpp, human).stop == ()
    assert code_task(human, human, code_in="block").stop == ()


def test_problems_of_both_files_are_counted_and_shared_ones_noted(
    problems: Callable[..., str],
) -> None:
    mbpp = problems(MBPP, HUMANEVAL)
    task = code_task(mbpp, mbpp)
    assert (task.train_size, task.eval_size) == (2, 2)
    (note,) = task.notes()
    assert note.startswith("note: 2 of the 2 held-out prompts of task.eval_file=")
    assert code_task(mbpp, problems({**MBPP, "text": "Other."}, name="other")).notes() == []


def test_an_example_depends_on_the_seed_and_the_index_alone(problems: Callable[..., str]) -> None:
    file = problems(*({**MBPP, "text": f"Problem {i}."} for i in range(50)))
    prompts = [code_task(file).train_example(i).prompt for i in range(20)]
    assert [code_task(file).train_example(i).prompt for i in reversed(range(20))] == prompts[::-1]
    held_out = {example.prompt for example in code_task(file).eval_examples(50)}
    assert not held_out & set(prompts)


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        (
            {"task": {"train_file": None}},
            "task.train_file=none: task.name=code needs a file of problems in the layout of "
            "HumanEval or MBPP (docs/howto/code.md)",
        ),
        (
            {"model": {"chat_template": "on"}},
            "task.code_in=completion: must be block with model.chat_template=on: a chat model "
            "answers a prompt instead of continuing it",
        ),
        (
            {"task": {"reward_deadline_s": 5}},
            "task.reward_deadline_s=5.0: must be >= 6 with task.name=code, because the sandbox "
            "takes 3 s to end a program that sleeps",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(sections: dict[str, Any], error: str) -> None:
    task = {"name": "code", "train_file": "/p", **sections.get("task", {})}
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.from_dict({**sections, "task": task})
    assert str(caught.value) == error


def test_a_third_of_the_deadline_is_the_limit_on_cpu_time() -> None:
    def limit(**task: Any) -> int:
        given = {"name": "code", "train_file": "/p", **task}
        return CodeReward(GRPOConfig.from_dict({"task": given}).task)._cpu_s

    assert (limit(), limit(reward_deadline_s=6), limit(reward_deadline_s=100)) == (3, 2, 33)
