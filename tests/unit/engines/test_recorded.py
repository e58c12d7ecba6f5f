"""Groups built from rows of tokens that an engine receives one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_trainable.engines.checks import check_groups
from grpo_trainable.engines.recorded import RecordedRow, as_group
from grpo_trainable.protocol.rollout import Request, SamplingLimits

LIMITS = SamplingLimits(min_new_tokens=1, max_new_tokens=3, temperature=1.0, end_ids=(9,))
REQUEST = Request(stream="train", prompt_index=7, prompt_ids=(1, 2), group_size=2, limits=LIMITS)
TOKENS = None  # no test here uses a stop string


def row(*tokens: tuple[int, float, int, int], finished: bool = False) -> RecordedRow:
    recorded = RecordedRow(finished=finished)
    for token in tokens:
        recorded.add(*token)
    return recorded


def test_rows_of_different_lengths_are_padded_to_the_longest():
    rows = [row((9, -0.5, 3, 1), finished=True), row((4, -1.0, 3, 1), (5, -2.0, 4, 2))]
    group = as_group(REQUEST, rows, pad_id=8)
    assert group.response_ids.tolist() == [[9, 8], [4, 5]]
    assert group.response_mask.tolist() == [[True, False], [True, True]]
    assert group.behaviour_log_probs.tolist() == [[-0.5, 0.0], [-1.0, -2.0]]
    assert group.token_versions.tolist() == [[3, 0], [3, 4]]
    assert group.token_rounds.tolist() == [[1, 0], [1, 2]]
    assert group.finished.tolist() == [True, False]
    assert group.rewards.isnan().all()


def test_tokens_that_were_fed_are_holes_in_the_mask():
    fed, plain = row((4, -1.0, 3, 1)), row((9, -0.5, 3, 1), finished=True)
    fed.feed((6, 7))
    fed.add(5, -2.0, 4, 2)
    group = as_group(REQUEST, [fed, plain], pad_id=8)
    assert group.response_ids.tolist() == [[4, 6, 7, 5], [9, 8, 8, 8]]
    assert group.response_mask.tolist() == [[True, False, False, True], [True, *[False] * 3]]
    assert group.behaviour_log_probs.tolist() == [[-1.0, 0.0, 0.0, -2.0], [-0.5, *[0.0] * 3]]
    assert group.token_versions.tolist() == [[3, 0, 0, 4], [3, 0, 0, 0]]
    assert group.token_rounds.tolist() == [[1, 0, 0, 2], [1, 0, 0, 0]]


def test_a_group_knows_the_prompt_and_the_example_of_its_request():
    request = replace(REQUEST, example_index=3)
    group = as_group(request, [row((9, -0.5, 3, 1), finished=True)] * 2, pad_id=8)
    assert (group.prompt_index, group.example) == (7, 3)
    assert group.prompt_ids.tolist() == [1, 2]


def test_a_group_of_rows_passes_the_checks_of_an_engine():
    class Engine:
        version, round = 4, 2

    tokens = [(4, -1.0, 3, 1), (5, -2.0, 4, 2), (6, -0.1, 4, 2)]
    group = as_group(REQUEST, [row(*tokens), row(*tokens)], pad_id=8)
    check_groups("mine", Engine(), [REQUEST], [group], TOKENS, vocab_size=10)  # pyright: ignore
    assert group.response_ids.dtype == torch.int64
    short = as_group(REQUEST, [row(*tokens[:2]), row(*tokens)], pad_id=8)
    with pytest.raises(RuntimeError, match="response 0 is cut off after 2 of 3 tokens"):
        check_groups("mine", Engine(), [REQUEST], [short], TOKENS, vocab_size=10)  # pyright: ignore
