"""Forms of reward functions: how they are told apart, and how they are called."""

from __future__ import annotations

import asyncio
import functools
import math
import re
from typing import Any

import pytest

from grpo_trainable.tasks.reward_function import Responses, as_reward
from grpo_trainable.tasks.task import as_score

TEXTS = ("abc", "de", "")


def responses(*texts: str, **values: Any) -> Responses:
    given: dict[str, Any] = {
        "token_ids": [[5] * len(text) for text in texts],
        "prompt": "Say something",
        "ground_truth": "abc",
        "columns": {},
        "label": None,
    }
    return Responses(texts=texts, **given | values)


def results(function: Any, **values: Any) -> list[Any]:
    return list(as_reward(function).score(responses(*TEXTS, **values)))


# ---- Telling the forms apart ---------------------------------------------------------------------


class Judge:
    def __call__(self, response, ground_truth):
        return 1.0

    def of_groups(self, completions, **kwargs):
        return [1.0] * len(completions)


def accepts_anything(*args):
    return 1.0


def single(response, ground_truth):
    return 1.0


def with_a_default(a, b, scale=1.0):
    return 1.0


def positional_only(response, ground_truth, /):
    return 1.0


def with_kwargs(response, ground_truth, **kwargs):
    return 1.0


@pytest.mark.parametrize(
    "function",
    [
        single,
        with_a_default,
        positional_only,
        with_kwargs,
        accepts_anything,
        Judge(),
        lambda completion, answer: 1.0,
        lambda text, label: 1.0,
        lambda query, ground_truth: 1.0,
        lambda response, ground_truths: 1.0,
        lambda prediction, output: 1.0,
        functools.partial(with_a_default, scale=2.0),
        lambda solution_str, ground_truth: 1.0,
        lambda data_source, solution_str, ground_truth, extra_info: 1.0,
        lambda solution_str, ground_truth, method="strict", **kwargs: 1.0,
    ],
)
def test_a_function_of_one_response_is_called_for_each(function):
    reward = as_reward(function)
    assert (reward.scores_groups, reward.columns, reward.parts) == (False, frozenset(), ())
    assert reward.score(responses("x")) == [1.0]
    assert results(function) == [1.0] * 3


@pytest.mark.parametrize(
    ("function", "columns"),
    [
        (lambda completions, **kwargs: [1.0] * 3, set()),
        (lambda completions, ground_truth: [1.0] * 3, set()),
        (lambda prompts, completions, answer, **kwargs: [1.0] * 3, {"answer"}),
        (lambda completion_ids, **kwargs: [1.0] * 3, set()),
        (lambda **kwargs: [1.0] * 3, set()),
        (lambda answer, **kwargs: [1.0] * 3, {"answer"}),
        (lambda completions, *, task, level=1: [1.0] * 3, {"task"}),
        (lambda completions, trainer_state, **kwargs: [1.0] * 3, {"trainer_state"}),
        (lambda completions, log_extra, log_metric, **kwargs: [1.0] * 3, set()),
        (Judge().of_groups, set()),
    ],
)
def test_a_function_of_trls_form_scores_groups_and_names_the_columns_it_needs(function, columns):
    reward = as_reward(function)
    assert (reward.scores_groups, reward.columns) == (True, columns)
    assert results(function, columns=dict.fromkeys(columns, "x")) == [1.0] * 3


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (lambda: 1.0, "takes ()"),
        (lambda response: 1.0, "takes (response)"),
        (lambda response, ground_truth, weight: 1.0, "takes (response, ground_truth, weight)"),
        (lambda a, b, c, d: 1.0, "takes (a, b, c, d)"),
        (
            lambda solution_str, ground_truth, reward_router_address: 1.0,
            "takes (solution_str, ground_truth, reward_router_address)",
        ),
        (lambda solution_strs, ground_truths: 1.0, "takes (solution_strs, ground_truths)"),
        (
            lambda solution_strs, ground_truths, **kwargs: 1.0,
            "takes (solution_strs, ground_truths, **kwargs)",
        ),
    ],
)
def test_any_other_function_is_refused_in_a_line_that_shows_its_parameters(function, shown):
    with pytest.raises(ValueError, match=re.escape(shown)) as error:
        as_reward(function)
    for accepted in ("(response, ground_truth)", "(completions, **kwargs)", "solution_str"):
        assert accepted in str(error.value).partition("; ")[2]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda ground_truth, response: 1.0,
        lambda answer, response: 1.0,
        lambda prompt, completion: 1.0,
        lambda prompt, answer: 1.0,
        lambda completion, prompt, **kwargs: 1.0,
        lambda gold, prediction, /, scale=1.0: 1.0,
        lambda y_true, y_pred: 1.0,
        functools.partial(lambda scale, ground_truth, response: 1.0, 2.0),
    ],
)
def test_names_that_contradict_the_order_of_the_two_arguments_are_refused(function):
    with pytest.raises(
        ValueError, match="the first argument is the response and the second one the"
    ):
        as_reward(function)


def test_a_function_that_hides_its_parameters_is_called_with_two_values():
    function = max  # written in C
    assert results(function) == ["abc", "de", "abc"]


def test_only_the_forms_of_trl_and_verl_read_more_than_the_text_and_the_true_answer():
    def of_verl(solution_str, ground_truth):
        return 1.0

    def of_trl(completions, **kwargs):
        return [1.0] * len(completions)

    of_trl_alone = {"columns", "prompt", "token_ids"}
    reads = {"columns", "label"}
    assert (as_reward(single).reads, as_reward(of_verl).reads) == (frozenset(), reads)
    assert as_reward(of_trl).reads == of_trl_alone
    assert as_reward([single, of_verl, of_trl]).reads == of_trl_alone | reads


# ---- TRL's form ----------------------------------------------------------------------------------


def test_trls_form_gets_lists_of_texts_tokens_and_all_columns():
    told = {}

    def reward(**kwargs):
        told.update(kwargs)
        return [0.0] * len(kwargs["completions"])

    row = {"prompt": "raw", "answer": {"a": [1, None]}, "level": None, "completion": "left out"}
    results(reward, columns=row)
    told.pop("log_extra")(column="c", values=[1, 2, 3])
    told.pop("log_metric")("name", 1.0)
    assert told == {
        "prompts": ["Say something"] * 3,
        "completions": list(TEXTS),
        "completion_ids": [[5, 5, 5], [5, 5], []],
        "ground_truth": ["abc"] * 3,
        "answer": [{"a": [1, None]}] * 3,
        "level": [None] * 3,
    }


def test_a_column_of_the_data_is_not_replaced_by_the_true_answer():
    function = lambda completions, ground_truth: [ground_truth[0]] * 3  # noqa: E731
    assert results(function, columns={"ground_truth": 7.0}) == [7.0] * 3


def test_conversations_give_trls_form_lists_of_messages():
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(prompts)
        return [float(len(completion[0]["content"])) for completion in completions]

    prompt = [{"role": "user", "content": "Hi"}]
    assert results(reward, prompt=prompt) == [3.0, 2.0, 0.0]
    assert seen == [prompt] * 3
    role = lambda completions, **kwargs: [c[0]["role"] for c in completions]  # noqa: E731
    assert results(role, prompt=prompt) == ["assistant"] * 3


def test_a_function_that_makes_rewards_is_refused():
    def get_cosine_scaled_reward(min_value=-1.0, max_value=1.0, max_len=1000):
        return lambda completions, **kwargs: [1.0] * len(completions)

    with pytest.raises(ValueError, match="each with a default value, so it probably makes"):
        as_reward(get_cosine_scaled_reward)
    assert results(get_cosine_scaled_reward()) == [1.0] * 3


def test_a_default_of_some_parameters_is_no_reason_to_refuse_a_function():
    def positional(response, truth, /, scale=0.5):
        return scale

    assert results(positional) == [0.5] * 3
    assert results(lambda *texts, scale=0.5: scale) == [0.5] * 3


def test_none_in_the_list_of_trls_form_is_no_reward():
    assert results(lambda completions, **kwargs: [1.0, None, 0.0]) == [1.0, None, 0.0]


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        ([1.0], "ValueError: returned 1 rewards for 3 completions"),
        ([1.0] * 4, "ValueError: returned 4 rewards for 3 completions"),
        (1.0, "TypeError: returned float; it must return a list of 3 numbers"),
        (None, "TypeError: returned NoneType; it must return a list of 3 numbers"),
        ("abc", "TypeError: returned str; it must return a list of 3 numbers"),
        ({"a": 1, "b": 2, "c": 3}, "TypeError: returned dict; it must return a list"),
    ],
)
def test_a_wrong_list_of_trls_form_is_an_error(returned, error):
    with pytest.raises((TypeError, ValueError)) as caught:
        results(lambda completions, **kwargs: returned)
    assert f"{type(caught.value).__name__}: {caught.value}".startswith(error)


# ---- verl's form ---------------------------------------------------------------------------------


def test_verls_form_gets_its_four_arguments_by_name():
    told = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        told.append((data_source, solution_str, ground_truth, extra_info))
        return len(solution_str) / 100

    row = {"data_source": "openai/gsm8k", "extra_info": {"index": 4}, "ability": "math"}
    assert results(compute_score, columns=row) == [0.03, 0.02, 0.0]
    assert told == [("openai/gsm8k", text, "abc", {"index": 4}) for text in TEXTS]
    told.clear()
    results(compute_score, label="sums")
    assert told[0] == ("sums", "abc", "abc", {})


def test_the_score_in_a_dict_of_verls_form_is_the_reward_and_other_numbers_are_parts():
    returned = {"score": 0.5, "acc": True, "pred": "42", "time": math.nan, "length": 3}
    (result, *_) = results(lambda solution_str, ground_truth: returned)
    score = as_score(result)
    assert (score.reward, score.answer_reward, score.answer) == (0.5, 0.5, "42")
    assert score.parts == {"acc": 1.0, "length": 3.0}


def test_a_dict_of_this_packages_form_is_also_accepted_from_verls():
    (result, *_) = results(lambda solution_str, ground_truth: {"reward": 0.25})
    assert as_score(result).reward == 0.25


# ---- Both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function", [lambda response, ground_truth: None, lambda solution_str, ground_truth: None]
)
def test_a_function_of_one_response_must_return_something(function):
    with pytest.raises(TypeError, match="returned None instead of a number"):
        results(function)


def test_asynchronous_functions_are_awaited():
    async def trl(completions, **kwargs):
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    async def verl(data_source, solution_str, ground_truth, extra_info):
        await asyncio.sleep(0)
        return {"score": float(len(solution_str))}

    async def own(response, ground_truth):
        await asyncio.sleep(0)
        return float(len(response))

    assert results(trl) == results(own) == [3.0, 2.0, 0.0]
    assert [result["reward"] for result in results(verl)] == [3.0, 2.0, 0.0]


# ---- Several functions ---------------------------------------------------------------------------


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def right(response, ground_truth):
    return float(response == ground_truth)


def maybe(completions, level, **kwargs):
    return [2.0 if text == "abc" else None for text in completions]


def test_a_list_of_functions_of_any_form_gives_their_sum_and_a_part_for_each():
    reward = as_reward([length, right, maybe])
    assert (reward.scores_groups, reward.columns) == (True, {"level"})
    assert reward.parts == ("length", "right", "maybe")
    assert results([length, right, maybe], columns={"level": 1}) == [
        as_score({"reward": 6.0, "parts": {"length": 3.0, "right": 1.0, "maybe": 2.0}}),
        as_score({"reward": 2.0, "parts": {"length": 2.0, "right": 0.0, "maybe": 0.0}}),
        as_score({"reward": 0.0, "parts": {"length": 0.0, "right": 0.0, "maybe": 0.0}}),
    ]
    assert not as_reward((right,)).scores_groups


def test_a_response_has_no_reward_if_every_function_gives_none():
    (first, second, third) = results([maybe], columns={"level": 1})
    assert first == as_score({"reward": 2.0, "parts": {"maybe": 2.0}})
    assert second is third is None


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([], "must be a function or a list of functions"),
        ([right, 1], "must be a function or a list of functions"),
        ([right, right], "lists two rewards with the same name (right, right); rename one"),
        ([right, accepts_anything, lambda x: 1], "lists <lambda>, which takes (x); accepted:"),
    ],
)
def test_a_wrong_list_is_refused(functions, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        as_reward(functions)


def test_a_wrong_result_of_a_listed_function_is_an_error():
    def wrong(response, ground_truth):
        return math.nan

    with pytest.raises(ValueError, match="reward must be a finite float32, got nan"):
        results([right, wrong])
