"""The reasoning_gym task; tests that need the library are skipped when it is not installed."""

from __future__ import annotations

import importlib.util
import json

import pytest

from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.tasks.prompt_files import is_held_out
from grpo_trainable.tasks.prompts import build_task

needs_reasoning_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="needs reasoning-gym: pip install 'grpo-trainable[gym]'",
)
DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def config(seed: int = 0, **task) -> GRPOConfig:
    options = json.dumps(task.pop("options", {}))
    task = {"name": "reasoning_gym", "options": options, **task}
    return GRPOConfig.from_dict({"seed": seed, "task": task})


def sums(seed: int = 0, **task):
    return build_task(config(seed, **{"dataset": "chain_sum", "options": DIGITS, **task}))


def test_a_data_set_must_be_named():
    with pytest.raises(ConfigError) as caught:
        config()
    assert str(caught.value) == (
        "task.dataset=none: task.name=reasoning_gym needs the name of a data set, such as chain_sum"
    )


@pytest.mark.parametrize("options", ["[]", "3", "{", '{"seed": 3}', '{"size": 5}'])
def test_options_are_a_json_object_without_what_the_task_chooses(options):
    with pytest.raises(ConfigError, match=r"^task\.options=.*must be a JSON object without seed"):
        GRPOConfig.from_dict({"task": {"name": "reasoning_gym", "options": options}})


def test_without_the_library_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = r"^task\.name=reasoning_gym: reasoning-gym is missing; install it with: pip install "
    with pytest.raises(ValueError, match=line + r"'grpo-trainable\[gym\]'$"):
        build_task(config(dataset="chain_sum"))


@pytest.mark.slow
@needs_reasoning_gym
@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ({"dataset": "no_such_set"}, r"task\.dataset=no_such_set task\.options={}: ValueError: "),
        ({"dataset": "chain_sum", "options": {"terms": 2}}, "TypeError: .*terms"),
        ({"dataset": "chain_sum", "options": {"min_terms": 0}}, "AssertionError: min_terms must"),
    ],
)
def test_a_data_set_that_cannot_be_made_is_one_line(task, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        build_task(config(**task))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@needs_reasoning_gym
def test_an_example_follows_from_seed_and_index_and_seeds_differ():
    task = sums(seed=3)
    forwards = [task.train_example(i) for i in range(50)]
    again = sums(seed=3)
    assert [again.train_example(i) for i in reversed(range(50))] == forwards[::-1]
    assert [sums(seed=4).train_example(i) for i in range(50)] != forwards
    assert all(e.prompt.startswith("User: ") for e in forwards)
    assert all(e.prompt.endswith("\nAssistant: <think>") for e in forwards)


@pytest.mark.slow
@needs_reasoning_gym
def test_no_question_that_is_trained_on_is_held_out():
    """There are only 200 different sums, so nearly all would be on both sides of a random split."""
    task = sums()
    trained = {task.train_example(i).ground_truth["question"] for i in range(500)}
    held_out = {example.ground_truth["question"] for example in task.eval_examples(100)}
    assert not trained & held_out
    assert not any(map(is_held_out, trained))
    assert all(map(is_held_out, held_out))
    assert sums(seed=9).eval_examples(100)[:40] == task.eval_examples(40)


@pytest.mark.slow
@needs_reasoning_gym
def test_a_pass_takes_each_problem_about_once_in_an_order_of_its_own():
    task = sums(size=100, options={"min_digits": 4})
    passes = [[task.train_example(100 * n + i).prompt for i in range(100)] for n in range(2)]
    held_out = {example.prompt for example in task.eval_examples(100)}
    assert passes[0] != passes[1]
    for prompts in passes:
        assert len(set(prompts)) > 60
        assert not held_out & set(prompts)
    assert 5 < len(held_out) < 40
    assert len(held_out | set(passes[0]) | set(passes[1])) > 90


@pytest.mark.slow
@needs_reasoning_gym
def test_a_data_set_without_problems_of_both_sides_is_refused():
    task = sums(size=1)
    only = is_held_out(task._problems.question(0))
    side = "to train on" if only else "to hold out"
    with pytest.raises(
        ValueError,
        match=f"^task.dataset=chain_sum task.size=1: .*{side} among 1; raise task.size$",
    ):
        task.train_example(0) if only else task.eval_examples(1)


@pytest.mark.slow
@needs_reasoning_gym
def test_the_data_set_scores_the_answer_and_the_form_comes_first():
    task = sums(template="question_only")
    example = task.train_example(0)
    answer = example.ground_truth["answer"]
    right = task.reward(rf"\boxed{{{answer}}}", example.ground_truth)
    assert (right.reward, right.format_reward, right.answer_reward) == (1.0, 1.0, 1.0)
    assert task.reward(r"\boxed{no number}", example.ground_truth).reward < 1
    assert task.reward(answer, example.ground_truth).format_reward == 0
    json.dumps(example.ground_truth, allow_nan=False)


@needs_reasoning_gym
def test_a_vote_is_for_the_answer_and_a_right_one_for_the_true_one():
    task = sums(template="question_only")
    truth = task.train_example(0).ground_truth
    answers = [truth["answer"], "no  number", "no number", "007", "7.0"]
    votes = [task.reward(rf"\boxed{{{answer}}}", truth).answer for answer in answers]

    assert votes == [truth["answer"], "no number", "no number", "7", "7"]
    assert task.reward("no box", truth).answer is None


@needs_reasoning_gym
def test_an_answer_that_the_data_sets_function_cannot_take_is_wrong_and_counted(monkeypatch):
    task = sums()
    truth = task.train_example(0).ground_truth

    def fail(answer, entry):
        raise TypeError("no")

    monkeypatch.setattr(task._problems._dataset, "score_answer", fail)
    score = task.reward("</think> <answer>5</answer>", truth)
    assert (score.reward, score.format_reward, score.verified) == (0.0, 1.0, False)


@needs_reasoning_gym
def test_a_problem_that_was_another_where_it_was_asked_is_an_error():
    task = sums()
    truth = {**task.train_example(0).ground_truth, "question": "What is 1 + 1?"}
    with pytest.raises(
        ValueError,
        match=r"^task\.dataset=chain_sum task\.size=20000: problems differ between processes",
    ):
        task.reward("</think> <answer>2</answer>", truth)
