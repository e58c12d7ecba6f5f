"""The math task: file layouts, templates, answer forms, rewards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_trainable.config import GRPOConfig, TaskSettings
from grpo_trainable.generator.scorer import InlineScorer, make_scorer
from grpo_trainable.tasks import (
    Example,
    MathTask,
    Score,
    question_only_reward_fn,
    r1_zero_reward_fn,
)
from grpo_trainable.tasks.answers import boxed_answer, form_note, tagged_answer
from grpo_trainable.tasks.math import parse_problem, unmarked_answers
from grpo_trainable.tasks.math_reward import library_spelling
from grpo_trainable.tasks.prompts import build_task
from grpo_trainable.tasks.templates import R1_ZERO, TEMPLATES
from grpo_trainable.tasks.votes import canonical


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def sums(tmp_path):
    rows = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(200)]
    return write_jsonl(tmp_path / "sums.jsonl", rows)


def math_task(*, seed: int = 0, **settings) -> MathTask:
    return MathTask(TaskSettings(name="math", **{"equality": "exact", **settings}), seed)


# ---- Layouts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "question", "truth"),
    [
        # MATH: the problem and its solution.
        (
            {"problem": "What is $1+1$?", "level": "Level 1", "solution": r"It is $\boxed{2}$."},
            "What is $1+1$?",
            "2",
        ),
        (
            {"problem": "p", "solution": r"First \boxed{1}, so $\boxed{\frac{1}{2}}$."},
            "p",
            r"\frac{1}{2}",
        ),
        # MATH-500: the answer next to the solution.
        ({"problem": "p", "solution": r"\boxed{3}", "answer": r"\frac{3}{1}"}, "p", r"\frac{3}{1}"),
        # GSM8K: the answer after its calculation.
        ({"question": "q", "answer": "48/2 = <<48/2=24>>24 clips.\n#### 72"}, "q", "72"),
        ({"question": "q", "answer": "#### 1,080\n"}, "q", "1,080"),
        # The simplest files.
        ({"question": " q \n", "answer": "12"}, "q", "12"),
        ({"question": "q", "answer": 12}, "q", "12"),
        ({"question": "q", "answer": -0.5}, "q", "-0.5"),
    ],
)
def test_a_line_in_each_layout(row, question, truth):
    assert parse_problem(row) == Example(question, truth)


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"question": "q"}, None),
        ({"question": "q", "answer": ["1", {"b": None}]}, ["1", {"b": None}]),
        ({"question": "q", "answer": True}, True),
        ({"question": "q", "ground_truth": 3}, 3),
        ({"problem": "q", "solution": "It is 2."}, "It is 2."),
        ({"question": "q", "answer": "so\n#### 72", "level": 2}, "72"),
    ],
)
def test_the_answer_for_a_reward_of_ones_own_may_be_any_json_value(row, truth, tmp_path):
    assert parse_problem(row, own_reward=True) == Example("q", truth, row)
    path = write_jsonl(tmp_path / "own.jsonl", [row])
    own = math_task(train_file=path, eval_file=path, reward="mine:score", strict=True)
    assert own.train_example(0) == Example("User: q\nAssistant: <think>", truth, row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "1"}, "the field `problem` or `question` must be non-empty text"),
        (
            {"question": 3, "answer": "1"},
            "the field `problem` or `question` must be non-empty text",
        ),
        ({"question": "q"}, "the field `answer` or `solution` must be non-empty text"),
        (
            {"question": "q", "answer": " "},
            "the field `answer` or `solution` must be non-empty text",
        ),
        (
            {"question": "q", "answer": True},
            "the field `answer` or `solution` must be non-empty text",
        ),
        (
            {"question": "q", "answer": ["1"]},
            "the field `answer` or `solution` must be non-empty text",
        ),
        (
            {"problem": "p", "solution": "It is 2."},
            r"`solution` must have its answer in \boxed{} or",
        ),
        (
            {"problem": "p", "solution": r"\boxed{2"},
            r"`solution` must have its answer in \boxed{} or",
        ),
        (
            {"question": "q", "answer": "so ####  "},
            r"must have its answer in \boxed{} or after ####",
        ),
    ],
)
def test_a_bad_line_says_what_is_wrong(row, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_problem(row)
    path = write_jsonl(tmp_path / "bad.jsonl", [{"question": "q", "answer": "1"}, row])
    with pytest.raises(ValueError, match=rf"^task\.train_file={re.escape(path)}: line 2: "):
        math_task(train_file=path, strict=True)


def test_one_file_is_split_by_question_whatever_the_template(sums):
    tasks = [math_task(train_file=sums, template=name) for name in ("short", "r1_zero")]
    held_out = [{e.ground_truth for e in task.eval_examples(60)} for task in tasks]
    trained = [{task.train_example(i).ground_truth for i in range(400)} for task in tasks]
    assert held_out[0] == held_out[1]
    assert trained[0] == trained[1]
    assert not held_out[0] & trained[0]
    assert len(held_out[0] | trained[0]) == 200


def test_an_eval_file_is_held_out_whole_with_and_without_a_training_file(sums, tmp_path):
    rows = [{"question": f"How many, {i}?", "answer": str(i)} for i in range(12)]
    held_out = write_jsonl(tmp_path / "test.jsonl", rows)
    shipped = math_task()
    for settings, size, source in (
        ({}, shipped.train_size, "from the shipped problems"),
        ({"train_file": sums}, 200, "from sums.jsonl"),
    ):
        task = math_task(eval_file=held_out, **settings)
        assert (task.train_size, task.eval_size) == (size, 12)
        assert {e.ground_truth for e in task.eval_examples(12)} == {str(i) for i in range(12)}
        assert task.sources == (source, "all of test.jsonl")
    alone = math_task(eval_file=held_out)
    assert alone.train_example(3) == shipped.train_example(3)
    assert shipped.sources is None


def test_two_files_are_used_whole_and_the_order_follows_from_the_seed(sums, tmp_path):
    other = write_jsonl(tmp_path / "e.jsonl", [{"question": "One?", "answer": "1"}])
    task = math_task(train_file=sums, eval_file=other)
    first = [task.train_example(i).prompt for i in range(200)]
    assert len(set(first)) == 200
    again = math_task(train_file=sums, eval_file=other)
    assert [again.train_example(i).prompt for i in reversed(range(200))] == first[::-1]
    seeded = math_task(seed=1, train_file=sums, eval_file=other)
    assert [seeded.train_example(i).prompt for i in range(200)] != first
    assert task.eval_examples(2) == [Example("User: One?\nAssistant: <think>", "1")] * 2


# ---- Templates -------------------------------------------------------------------------------


def test_r1_zero_is_the_prompt_of_the_paper():
    assert R1_ZERO == (
        "A conversation between User and Assistant. The User asks a question, and the Assistant "
        "solves it. The Assistant first thinks about the reasoning process in the mind and then "
        "provides the User with the answer. The reasoning process is enclosed within <think> "
        "</think> and answer is enclosed within <answer> </answer> tags, respectively, i.e., "
        "<think> reasoning process here </think> <answer> answer here </answer>.\n"
        "User: {question}\nAssistant: <think>"
    )
    assert TEMPLATES["short"] == "User: {question}\nAssistant: <think>"


@pytest.mark.parametrize(
    ("text", "prompt", "tags"),
    [
        ("Q: {question}\nA:", "Q: What {question} is {x}?\nA:", False),
        (
            "{question}\nGive it in \\boxed{}.\n",
            "What {question} is {x}?\nGive it in \\boxed{}.",
            False,
        ),
        ("{question}\n<think>\n", "What {question} is {x}?\n<think>", True),
        (
            "Write <answer>5</answer>. {question}",
            "Write <answer>5</answer>. What {question} is {x}?",
            True,
        ),
    ],
)
def test_a_template_of_the_users_says_where_answers_are(tmp_path, text, prompt, tags):
    (tmp_path / "t.txt").write_text(text)
    rows = write_jsonl(
        tmp_path / "a.jsonl", [{"question": "What {question} is {x}?", "answer": "1"}]
    )
    task = math_task(train_file=rows, eval_file=rows, template=str(tmp_path / "t.txt"))
    assert task.train_example(0).prompt == prompt
    assert task.stop == (("</answer>",) if tags else ())
    assert task.reward("</think> <answer>1</answer>", "1").reward == float(tags)
    assert task.reward(r"\boxed{1}", "1").reward == float(not tags)


@pytest.mark.parametrize(
    ("template", "answer_in", "stop"),
    [
        ("r1_zero", "auto", ("</answer>",)),
        ("short", "auto", ("</answer>",)),
        ("question_only", "auto", ()),
        ("question_only", "tags", ("</answer>",)),
        ("r1_zero", "boxed", ()),
    ],
)
def test_where_answers_are_can_be_set(sums, template, answer_in, stop):
    assert math_task(train_file=sums, template=template, answer_in=answer_in).stop == stop


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"Question: {}", "must contain {question} in place of the question"),
        (b"{question} \xe9", "is not UTF-8"),
    ],
)
def test_a_bad_template_is_one_line(sums, tmp_path, content, reason):
    path = tmp_path / "t.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"task.template={path}: {reason}")):
        math_task(train_file=sums, template=str(path))


# ---- Answer forms ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (" 1 + 1 = 2. </think> <answer>2</answer>", "2"),
        ("</think> <answer> 2 </answer>", "2"),
        ("<think> 2 </think> <answer>2</answer>\nUser: next", "2"),
        ("</think> <answer>1</answer> no: </think> <answer>2</answer>", "2"),
        ("</think> <answer></answer>", ""),
        ("</think><answer>2</answer>", None),
        ("</think>\n<answer>2</answer>", None),
        ("<answer>2</answer>", None),
        ("</think> <answer>2", None),
        ("</think> 2 </answer>", None),
        ("2", None),
        ("", None),
    ],
)
def test_an_answer_between_tags(response, answer):
    assert tagged_answer(response) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $\boxed{2}$.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{ 2 }", "2"),
        (r"\fbox{3}", "3"),
        (r"$\boxed 5$", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed", None),
        (r"\boxedfoo{2}", None),
        ("2", None),
    ],
)
def test_an_answer_in_a_box(text, answer):
    assert boxed_answer(text) == answer


# ---- Rewards ---------------------------------------------------------------------------------

RIGHT = {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}
WRONG = {"reward": 0.0, "format_reward": 1.0, "answer_reward": 0.0}
NO_FORM = {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0}


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("4", "4", RIGHT),
        ("4", 4, RIGHT),
        ("1/2", 0.5, RIGHT),
        ("4", ["3", 4], RIGHT),
        ("5", ["3", 4], WRONG),
        ("5", "4", WRONG),
        ("4 or 5", "4", WRONG),
    ],
)
def test_the_three_categories_of_a_response(answer, truth, expected):
    assert r1_zero_reward_fn(f"so </think> <answer>{answer}</answer>", truth) == expected
    assert question_only_reward_fn(rf"so \boxed{{{answer}}}", truth) == expected
    assert r1_zero_reward_fn(f"so </think> {answer}", truth) == NO_FORM
    assert question_only_reward_fn(f"so {answer}", truth) == NO_FORM


@pytest.mark.parametrize(
    ("spellings", "text"),
    [
        (["1/2", "0.5", r"\frac{1}{2}", r"$\frac12$", "x = 0.50"], "1/2"),
        (["30%", r"30\%", "0.3", r"\frac{3}{10}"], "3/10"),
        (["1,000", "1000", "1000 apples", "1000.0"], "1000"),
        (["2, 1", "1 and 2", r"\{1,2\}", r"\{2, 1\}"], "{} 1, 2"),
        (["(1, 2)", r"\left(1,2\right)"], "() 1, 2"),
        ([r"2\le x<5", "[2,5)"], "[) 2, 5"),
        (["Monday", r"\text{monday}", " monday."], "monday"),
    ],
)
def test_equal_answers_vote_as_one_text(spellings, text):
    assert {canonical(spelling) for spelling in spellings} == {text}


def test_answers_that_differ_vote_apart_and_a_long_one_is_cut():
    different = ["1", "2", "-1", "(1,2)", "(2,1)", "[1,2]", "1,2", "x+1", "x-1"]

    assert len({canonical(answer) for answer in different}) == len(different)
    assert canonical("9" * 10_000) == "9" * 512


@pytest.mark.slow
def test_a_formula_votes_by_what_the_library_reads():
    pytest.importorskip("math_verify")
    assert canonical(r"\frac{x}{2}", library_spelling) == canonical(r"x/2", library_spelling)
    assert canonical(r"x+y", library_spelling) == canonical(r"y + x", library_spelling)
    assert canonical(r"x+y", library_spelling) != canonical(r"x-y", library_spelling)


@pytest.mark.parametrize(
    ("answer", "vote"), [(r"\frac{2}{4}", "1/2"), ("0.5", "1/2"), ("0.25", "1/4")]
)
def test_a_right_answer_votes_for_the_true_one_and_a_wrong_one_for_itself(sums, answer, vote):
    task = build_task(config(train_file=sums, template="r1_zero", equality="exact"))

    assert task.reward(f"</think> <answer>{answer}</answer>", "1/2").answer == vote
    assert task.reward(answer, "1/2").answer is None


@pytest.mark.slow
def test_plain_numbers_load_no_library():
    program = (
        "import sys\n"
        "from grpo_trainable.tasks import r1_zero_reward_fn\n"
        "assert r1_zero_reward_fn('</think> <answer>1/2</answer>', '0.5')['reward'] == 1\n"
        "assert r1_zero_reward_fn('</think> <answer>3</answer>', '0.5')['reward'] == 0\n"
        "assert not {'math_verify', 'sympy', 'reasoning_gym'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_math_verify_one_line_says_what_to_install(sums, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = (
        r"^task\.equality=math_verify: math-verify is missing; install it with: pip install "
        r"'grpo-trainable\[math\]', or set task\.equality=exact to compare numbers only$"
    )
    for attempt in (
        lambda: build_task(config(train_file=sums)),
        lambda: r1_zero_reward_fn(r"</think> <answer>\sqrt{8}</answer>", r"2\sqrt{2}"),
    ):
        with pytest.raises(ValueError, match=line):
            attempt()
    task = math_task(train_file=sums)
    assert task.reward(r"</think> <answer>\sqrt{8}</answer>", r"2\sqrt{2}") == Score(
        0.0, 1.0, 0.0, answer=r"\sqrt{8}"
    )
    assert task.reward("</think> <answer>2</answer>", "2") == Score(1.0, 1.0, 1.0, answer="2")


def config(**task) -> GRPOConfig:
    return GRPOConfig.from_dict({"task": {"name": "math", **task}})


def test_numbers_are_compared_in_the_generator(sums):
    trial = config(train_file=sums, equality="exact")
    assert not trial.task.is_scored_apart
    assert isinstance(make_scorer(trial, build_task(trial)), InlineScorer)
    assert config(train_file=sums).task.is_scored_apart


def test_without_a_file_the_problems_that_ship_are_asked():
    task = MathTask(TaskSettings(name="math"), seed=0)
    asked = [task.train_example(index).prompt for index in range(4096)]
    held_out = [example.prompt for example in task.eval_examples(768)]
    assert len(set(asked)) == 4096
    assert len(set(held_out)) == 768
    assert not set(asked) & set(held_out)
    assert all(prompt.endswith("<think>") for prompt in asked)


def gsm8k(path: Path, answers: list[str], start: int = 0) -> str:
    rows = [{"question": f"{start + i}?", "answer": text} for i, text in enumerate(answers)]
    return write_jsonl(path, rows)


def test_a_solution_without_its_mark_is_told_by_its_line(tmp_path):
    marked = ["1 + 1 = 2.\n#### 2"] * 4
    odd = gsm8k(tmp_path / "odd.jsonl", [*marked, "It is 2.", r"So \boxed{2}.", "Two."])
    assert unmarked_answers("train_file", odd) == (
        f"note: task.train_file={odd}: line 5 has no #### before its answer, so its whole text "
        "becomes the true answer (4 rows have the mark, 2 do not)"
    )
    assert unmarked_answers("train_file", gsm8k(tmp_path / "all.jsonl", marked)) is None
    # If most answers are bare and only a few have a mark, the file has a different layout.
    assert unmarked_answers("train_file", gsm8k(tmp_path / "bare.jsonl", ["2", "#### 2"])) is None


def test_problems_that_are_trained_on_and_held_out_are_counted(tmp_path):
    train = gsm8k(tmp_path / "train.jsonl", ["2"] * 10)
    held_out = gsm8k(tmp_path / "eval.jsonl", ["2"] * 4, start=7)
    settings = TaskSettings(name="math", train_file=train, eval_file=held_out, equality="exact")
    assert MathTask(settings, 0).notes() == [
        f"note: 3 of the 4 held-out prompts of task.eval_file={held_out} are also trained on, "
        f"because they are in task.train_file={train}"
    ]
    apart = replace(settings, eval_file=gsm8k(tmp_path / "apart.jsonl", ["2"], start=50))
    assert MathTask(apart, 0).notes() == []


def test_the_page_shows_every_template_as_it_is():
    page = (Path(__file__).parents[3] / "docs" / "howto" / "math.md").read_text()
    for name in ("r1_zero", "short"):
        assert f"```text\n{TEMPLATES[name]}\n```" in page
    assert TEMPLATES["question_only"] == "{question}"


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"template": "r1_zero"}, None),
        ({"template": "short"}, None),
        ({"template": "question_only"}, r"\boxed{}"),
        ({"template": "question_only", "answer_in": "tags"}, "</think> <answer>…</answer>"),
        ({"template": "r1_zero", "answer_in": "boxed"}, r"\boxed{}"),
    ],
)
def test_a_template_that_does_not_ask_for_an_answer_is_told(settings, wanted, tmp_path):
    note = form_note(TaskSettings(name="math", **settings))
    if wanted is None:
        assert note is None
        return
    template = settings["template"]
    assert note is not None
    assert note.startswith(
        f"note: task.template={template} does not ask for an answer in {wanted}, so "
    )
    mine = tmp_path / "mine.txt"
    mine.write_text(r"{question} Put it in \boxed{}.")
    assert form_note(TaskSettings(name="math", template=str(mine))) is None
