"""Continuous batching: responses wait for a slot when a call has fewer slots than responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from agreeing import assert_agree, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import Pieces, sharpened

from grpo_trainable.config import GRPOConfig
from grpo_trainable.engines.rows import Rows
from grpo_trainable.engines.selection import chosen_engine
from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.parameters import unique_parameters
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.models.shelved_cache import ShelvedCache, shelf_columns
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import (
    PolicyWeights,
    Request,
    RolloutGroup,
    SamplingLimits,
    collate,
)

pytestmark = pytest.mark.numerics

EOS, PAD, VOCAB = 0, 1, 50
TOKENS = Pieces([*("a", "b", "ab", "ba", "c", "bab", b"\xc3", b"\xa9a")] * 6)
CONFIG = ModelConfig(
    vocab_size=VOCAB, context_length=96, d_model=32, num_layers=2, num_heads=4, d_ff=40
)
MODEL = sharpened(CONFIG)


def engine(slots: int | None, *, recompute: bool = False, seed: int = 0) -> TorchEngine:
    model = sharpened(CONFIG, seed)
    return TorchEngine(model, TOKENS, seed=11, recompute=recompute, slots=slots)  # type: ignore[arg-type]


def requests(
    lengths: Sequence[int] = (3, 11, 7, 1, 30),
    *,
    group_size: int = 4,
    temperature: float = 2.0,
    min_new_tokens: int = 1,
    max_new_tokens: int = 60,
    stop_strings: tuple[str, ...] = (),
) -> list[Request]:
    limits = SamplingLimits(
        min_new_tokens=min_new_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        end_ids=(EOS,),
        stop_strings=stop_strings,
    )
    generator = torch.Generator().manual_seed(3)
    return [
        Request(
            stream="train",
            prompt_index=prompt_index,
            prompt_ids=tuple(torch.randint(2, VOCAB, (length,), generator=generator).tolist()),
            group_size=group_size,
            limits=limits,
        )
        for prompt_index, length in enumerate(lengths)
    ]


def generated(
    sampler: TorchEngine,
    wanted: Sequence[Request],
    between_tokens: Callable[[], None] = lambda: None,
) -> list[RolloutGroup]:
    return sampler.generate(wanted, between_tokens)


def from_learner(groups: Sequence[RolloutGroup], model, limits: SamplingLimits):
    """Return (recorded, recomputed) log-probs of every token."""
    batch = collate(groups, [torch.zeros(len(group.rewards)) for group in groups], PAD)
    log_probs, _ = response_log_probs(
        model,
        batch.input_ids,
        batch.target_ids,
        batch.response_mask,
        temperature=limits.temperature,
        min_new_tokens=limits.min_new_tokens,
        end_ids=limits.end_ids,
    )
    return batch.behaviour_log_probs[batch.response_mask], log_probs[batch.response_mask]


# ---- The queue -------------------------------------------------------------------------------


def test_rows_enter_in_order_once_an_eighth_of_the_slots_is_free():
    wanted = requests((1, 1, 1), group_size=8, max_new_tokens=9, temperature=1.0)
    rows = Rows(wanted, pad_id=PAD, seed=0, stops=None, device=torch.device("cpu"), slots=16)
    ends, goes_on = torch.tensor([[0.0, -90, -90]]), torch.tensor([[-90.0, -90, 0]])

    def draw(*ended: int) -> list[int] | None:
        logits = goes_on.repeat(rows.running, 1)
        logits[list(ended)] = ends
        rows.draw(logits, 0, 0)
        keep = rows.drop_ended()
        return None if keep is None else keep.tolist()

    assert rows.enter() == range(16)
    assert not rows.enter()
    assert draw() is None
    assert draw(5) == [0, 1, 2, 3, 4, *range(6, 16)]  # row 5 has ended and leaves
    assert not rows.enter()  # only one of 16 slots is free
    assert draw(0) == list(range(1, 15))
    assert rows.enter() == range(16, 18)
    assert rows.running == 16
    assert draw(*range(15)) == [15]
    assert rows.enter() == range(18, 24)  # the queue is now empty
    assert draw(*range(6)) == [6]
    assert not rows.enter()
    assert not rows.over
    assert draw(0) == []
    assert rows.over
    lengths = torch.cat([group.response_mask.sum(dim=1) for group in rows.groups()])
    assert lengths.tolist() == [3, *[4] * 4, 2, *[4] * 10, 1, 2, *[1] * 5, 2]


def test_the_queue_does_not_wait_for_more_places_than_it_needs():
    wanted = requests((1,), group_size=17, max_new_tokens=9)
    rows = Rows(wanted, pad_id=PAD, seed=0, stops=None, device=torch.device("cpu"), slots=16)
    rows.enter()
    logits = torch.full((16, VOCAB), -90.0)
    logits[:, 5] = 0
    logits[3, EOS] = 90
    rows.draw(logits, 0, 0)
    assert rows.drop_ended() is not None
    assert rows.enter() == range(16, 17)


# ---- The cache -------------------------------------------------------------------------------


def test_each_shelf_has_half_the_columns_of_the_next():
    assert shelf_columns(1) == [1]
    assert shelf_columns(33) == [33]
    assert shelf_columns(63) == [32, 63]
    assert shelf_columns(204) == [51, 102, 204]
    assert shelf_columns(256) == [32, 64, 128, 256]


@torch.no_grad()
@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_rows_that_come_and_go_have_the_hidden_states_of_a_full_forward(data):
    cache = ShelvedCache(CONFIG, 96, 5, torch.device("cpu"))
    ids = torch.randint(VOCAB, (20, 96), generator=torch.Generator().manual_seed(0))
    full = MODEL.hidden_states(ids)
    rows: list[int] = []  # for each row, its index among the 20 sequences
    lengths: list[int] = []
    entered = 0
    for _ in range(data.draw(st.integers(1, 60))):
        kept = [place for place, length in enumerate(lengths) if length < 95]
        if data.draw(st.integers(0, 3)) == 0 and kept:
            kept.remove(data.draw(st.sampled_from(kept)))
        if len(kept) < len(rows):
            cache.keep(kept)
            rows, lengths = ([of[place] for place in kept] for of in (rows, lengths))
        if rows:
            tokens = ids[rows, lengths]
            hidden = cache.decode(MODEL, tokens)
            torch.testing.assert_close(hidden, full[rows, lengths], rtol=0, atol=1e-5)
            lengths = [length + 1 for length in lengths]
        new = data.draw(st.integers(0, 5 - len(rows)))
        new = min(new, 20 - entered)
        if new:
            prompts = data.draw(st.lists(st.integers(1, 70), min_size=new, max_size=new))
            own = range(entered, entered + new)
            hidden = cache.prefill(MODEL, ids[own, : max(prompts)], prompts, range(new))
            for i, (row, length) in enumerate(zip(own, prompts, strict=True)):
                expected = full[row, :length]
                torch.testing.assert_close(hidden[i, :length], expected, rtol=0, atol=1e-5)
            rows, lengths, entered = [*rows, *own], [*lengths, *prompts], entered + new


# ---- Sampling --------------------------------------------------------------------------------

WHOLE: dict[str, list[RolloutGroup]] = {}


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    slots=st.integers(1, 25),
    group_size=st.sampled_from([1, 4]),
    min_new_tokens=st.sampled_from([1, 7]),
    stops=st.sampled_from([(), ("abba", "cc", "éa")]),
)
def test_any_number_of_slots_gives_the_tokens_of_one_batch(
    slots, group_size, min_new_tokens, stops
):
    law = {"group_size": group_size, "min_new_tokens": min_new_tokens, "stop_strings": stops}
    wanted = requests(**law)
    if str(law) not in WHOLE:
        WHOLE[str(law)] = generated(engine(None), wanted)
    groups = generated(engine(slots), wanted)
    assert_agree(groups, WHOLE[str(law)], atol=1e-4)
    recorded, learner = from_learner(groups, MODEL, wanted[0].limits)
    torch.testing.assert_close(recorded, learner, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_three_slots_give_the_tokens_of_one_batch():
    wanted = requests((3, 35, 1), group_size=2, max_new_tokens=8)
    groups = generated(engine(3), wanted)
    assert_agree(groups, generated(engine(None), wanted), atol=1e-5)
    recorded, learner = from_learner(groups, MODEL, wanted[0].limits)
    torch.testing.assert_close(recorded, learner, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_as_many_slots_as_responses_give_the_same_responses():
    wanted = requests((3, 2), max_new_tokens=12)
    usual = generated(engine(None), wanted)
    assert_agree(generated(engine(8), wanted), usual, atol=1e-5)


@pytest.mark.slow
def test_the_same_requests_give_the_same_bits_again():
    wanted = requests()
    sampler = engine(6)
    first = generated(sampler, wanted)
    generated(sampler, requests((2, 2, 5)))  # earlier calls do not matter
    assert_same_bits(generated(sampler, wanted), first)
    assert_same_bits(generated(engine(6), wanted), first)


@pytest.mark.slow
def test_it_takes_as_many_tokens_of_the_batch_as_the_slots_need():
    wanted = requests((2,), group_size=8, min_new_tokens=6, max_new_tokens=6)
    calls: list[None] = []
    generated(engine(2), wanted, lambda: calls.append(None))
    assert len(calls) == 8 // 2 * 6


# ---- Weights in the middle of a call ---------------------------------------------------------

# token number in the batch -> version (and seed) of the weights that arrive before this token
SWAPS = {4: 1, 19: 2, 20: 3}


def snapshot(version: int) -> PolicyWeights:
    model = sharpened(CONFIG, seed=version)
    tensors = {name: p.detach().clone() for name, p in unique_parameters(model).items()}
    checksum = storage_checksum(tensors)
    return PolicyWeights(version=version, round=version, checksum=checksum, tensors=tensors)


def swapping(sampler: TorchEngine) -> Callable[[], None]:
    calls = 0

    def between_tokens() -> None:
        nonlocal calls
        if calls in SWAPS:
            sampler.load(snapshot(SWAPS[calls]))
        calls += 1

    return between_tokens


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_rows_that_enter_after_a_swap_begin_with_the_newer_version(recompute):
    sampler = engine(5, recompute=recompute)
    wanted = requests(max_new_tokens=24)
    groups = generated(sampler, wanted, swapping(sampler))
    begun, spans = [], set()
    for group in groups:
        for versions, mask in zip(group.token_versions, group.response_mask, strict=True):
            own = versions[mask].tolist()
            assert own == sorted(own)
            assert not versions[~mask].any()
            begun.append(own[0])
            spans.add(tuple(sorted(set(own))))
        assert torch.equal(group.token_versions, group.token_rounds)
    assert begun[:5] == [0] * 5
    assert begun == sorted(begun)  # responses enter in order
    assert {0, 1, 3} <= set(begun)
    assert any(len(span) > 1 for span in spans)


@pytest.mark.slow
def test_recomputing_every_token_has_the_log_prob_of_its_own_version():
    sampler = engine(5, recompute=True)
    wanted = requests(max_new_tokens=24)
    groups = generated(sampler, wanted, swapping(sampler))
    stamps = torch.cat([group.token_versions[group.response_mask] for group in groups])
    for version in range(4):
        model = sharpened(CONFIG, seed=version)
        recorded, learner = from_learner(groups, model, wanted[0].limits)
        own = stamps == version
        assert own.any()
        torch.testing.assert_close(recorded[own], learner[own], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_weights_that_arrive_before_the_first_token_sample_every_row():

    def first(sampler: TorchEngine) -> Callable[[], None]:
        arrived = iter([snapshot(1)])
        return lambda: [sampler.load(weights) for weights in arrived] and None

    one, other = engine(5), engine(None)
    groups = generated(one, requests(), first(one))
    assert_agree(groups, generated(other, requests(), first(other)), atol=1e-4)
    assert all(int(group.token_versions[group.response_mask].min()) == 1 for group in groups)


def test_the_versions_of_a_row_are_those_of_the_calls_it_was_in():
    sampler = engine(2)
    wanted = requests((3,), group_size=4, min_new_tokens=3, max_new_tokens=3)
    arrivals = iter([None, snapshot(1), None, None, snapshot(2), None])

    def between_tokens() -> None:
        weights = next(arrivals)
        if weights is not None:
            sampler.load(weights)

    (group,) = generated(sampler, wanted, between_tokens)
    assert next(arrivals, "over") == "over"
    assert group.token_versions.tolist() == [[0, 1, 1]] * 2 + [[1, 2, 2]] * 2
    assert (group.oldest_version, group.oldest_round) == (0, 0)


@pytest.mark.slow
def test_a_row_that_enters_does_not_hold_up_the_others():
    law = {"group_size": 1, "max_new_tokens": 30}
    calls: list[None] = []
    groups = generated(engine(2), requests(**law), lambda: calls.append(None))
    lengths = [int(group.response_mask.sum()) for group in groups]
    ends = [0, 0]
    for length in lengths:  # each row takes the slot that becomes free first
        ends[ends.index(min(ends))] += length
    assert len(calls) == max(ends)
    assert len(set(lengths)) > 1


# ---- The setting -----------------------------------------------------------------------------


def test_hugging_face_models_are_refused_by_name(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = GRPOConfig.from_dict({"model": {"path": str(tmp_path)}, "rollout": {"slots": 8}})
    with pytest.raises(
        ValueError, match=r"^rollout.slots=8: hf, which samples from model.path=.*"
    ) as e:
        chosen_engine(config)
    assert "engine=torch" in str(e.value)
    assert "\n" not in str(e.value)
