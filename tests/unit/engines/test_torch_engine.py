from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from agreeing import FORKS, assert_agree, assert_same_bits
from policies import Pieces, sharpened

from grpo_trainable.engines import rows
from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.models.kv_cache import decode, prefill
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.parameters import unique_parameters
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import (
    PolicyWeights,
    Request,
    RolloutGroup,
    SamplingLimits,
    collate,
)

pytestmark = pytest.mark.numerics

VOCAB, EOS, PAD = 50, 0, 1
END = (EOS,)
# The texts of tokens 2 to 49: pieces that overlap, and two halves of an "é".
TOKENS = Pieces([*("a", "b", "ab", "ba", "c", "bab", b"\xc3", b"\xa9a")] * 6)
CONFIG = ModelConfig(
    vocab_size=VOCAB, context_length=96, d_model=32, num_layers=2, num_heads=4, d_ff=40
)


def engine(seed: int = 0, config: ModelConfig = CONFIG, *, recompute: bool = False) -> TorchEngine:
    model = sharpened(config, seed)
    return TorchEngine(model, TOKENS, seed=11, recompute=recompute)


def requests(
    lengths: Sequence[int] = (3, 11, 7, 1),
    *,
    group_size: int = 4,
    temperature: float = 1.0,
    min_new_tokens: int = 1,
    max_new_tokens: int = 60,
    end_ids: tuple[int, ...] = END,
    stop_strings: tuple[str, ...] = (),
) -> list[Request]:
    limits = SamplingLimits(
        min_new_tokens=min_new_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        end_ids=end_ids,
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
    sampler: TorchEngine, wanted: Sequence[Request], between_tokens=lambda: None
) -> list[RolloutGroup]:
    return sampler.generate(wanted, between_tokens)


# ---- The cache -------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[1] * 21, [1, 5, 1, 14], [21]])
def test_cached_logits_match_a_full_forward_for_prompts_of_different_lengths(chunks):
    model = sharpened(CONFIG)
    # The cache grows in steps of 16 columns. 17 columns need two steps, and 17 + 21 need three.
    lengths, new = [5, 17, 1], 21
    fan_out = torch.tensor([0, 0, 1, 2, 2, 2])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (len(fan_out), max(lengths) + new), generator=generator)
    prompts = torch.full((3, max(lengths)), PAD)
    for row, prompt in enumerate(fan_out.tolist()):
        prompts[prompt, : lengths[prompt]] = ids[row, : lengths[prompt]]
    for row, prompt in enumerate(fan_out.tolist()):
        ids[row, : lengths[prompt]] = prompts[prompt, : lengths[prompt]]

    row_lengths = torch.tensor(lengths)[fan_out]
    hidden, cache = prefill(model, prompts, torch.tensor(lengths), fan_out, max(lengths) + new)
    last = hidden[torch.arange(3), torch.tensor(lengths) - 1][fan_out]
    rows = torch.arange(len(fan_out))
    full = model.hidden_states(ids)
    torch.testing.assert_close(last, full[rows, row_lengths - 1], rtol=0, atol=1e-5)
    t = 0
    for chunk in chunks:
        positions = row_lengths[:, None] + t + torch.arange(chunk)
        hidden = decode(model, ids[rows[:, None], positions], positions, cache, max(lengths) + t)
        torch.testing.assert_close(hidden, full[rows[:, None], positions], rtol=0, atol=1e-5)
        t += chunk
    assert t == new


# ---- Sampling --------------------------------------------------------------------------------


def recomputed(model: TransformerLM, groups: Sequence[RolloutGroup], limits: SamplingLimits):
    """Return (recorded, recomputed) log-probs of every response token, in the learner's batch."""
    batch = collate(groups, [torch.zeros(len(g.response_ids)) for g in groups], PAD)
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


@pytest.mark.slow
@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
@pytest.mark.parametrize("min_new_tokens", [1, 10])
def test_recorded_log_probs_equal_those_the_learner_recomputes(
    tied_head, temperature, min_new_tokens
):
    config = ModelConfig(**{**CONFIG.to_dict(), "tied_head": tied_head})
    sampler = engine(config=config)
    wanted = requests(temperature=temperature, min_new_tokens=min_new_tokens)
    groups = generated(sampler, wanted)
    lengths = torch.cat([group.response_mask.sum(dim=1) for group in groups])
    assert lengths.unique().numel() > 3
    assert int(lengths.min()) >= min_new_tokens
    recorded, learner = recomputed(sampler.model, groups, wanted[0].limits)
    torch.testing.assert_close(recorded, learner, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{"temperature": 1.0}, {"min_new_tokens": 1}])
def test_log_probs_under_another_law_would_be_noticed(wrong):
    sampler = engine()
    wanted = requests(temperature=1.8, min_new_tokens=10)
    groups = generated(sampler, wanted)
    law = {"temperature": 1.8, "min_new_tokens": 10, "max_new_tokens": 60, "end_ids": END, **wrong}
    recorded, learner = recomputed(sampler.model, groups, SamplingLimits(**law))
    assert (recorded - learner).abs().max() > 1e-2


@pytest.mark.slow
def test_a_row_stops_at_end_of_text():
    groups = generated(engine(), requests(temperature=1.5, group_size=16))
    finished = torch.cat([group.finished for group in groups])
    assert 0 < int(finished.sum()) < len(finished)  # some responses finished and some did not
    for group in groups:
        for g, ids in enumerate(group.response_ids):
            length = int(group.response_mask[g].sum())
            assert group.response_mask[g].tolist() == [True] * length + [False] * (
                len(ids) - length
            )
            ends = (ids[:length] == EOS).nonzero()[:, 0].tolist()
            assert ends == ([length - 1] if group.finished[g] else [])
            assert group.finished[g] or length == 60
            assert (ids[length:] == PAD).all()
            assert (group.behaviour_log_probs[g, length:] == 0).all()


@pytest.mark.slow
def test_a_group_is_cut_to_its_own_longest_response():
    groups = generated(engine(), requests(temperature=2.0, group_size=2))
    assert len({group.response_ids.shape[1] for group in groups}) > 1
    for group in groups:
        assert group.response_mask.any(dim=0).all()


@pytest.mark.slow
def test_groups_answer_their_requests_in_order_and_are_unscored():
    wanted = requests()
    for request, group in zip(wanted, generated(engine(), wanted), strict=True):
        assert group.prompt_index == request.prompt_index
        assert tuple(group.prompt_ids.tolist()) == request.prompt_ids
        assert group.response_ids.shape[0] == request.group_size
        assert group.rewards.isnan().all()
        assert group.uses == 0


@pytest.mark.slow
def test_the_responses_of_a_group_differ():
    for group in generated(engine(), requests(temperature=1.5)):
        assert len({tuple(ids) for ids in group.response_ids.tolist()}) == 4


@pytest.mark.slow
def test_groups_of_different_sizes_share_a_unit():
    small, large = requests(group_size=2)[0], requests(group_size=5)[1]
    groups = generated(engine(), [small, large])
    assert [len(group.response_ids) for group in groups] == [2, 5]
    assert_agree(groups[:1], generated(engine(), [small]), atol=1e-5)


@torch.no_grad()
def test_temperature_zero_follows_the_most_likely_token_of_a_full_forward():
    sampler = engine()
    wanted = requests(temperature=0.0, group_size=1, max_new_tokens=12)
    for group in generated(sampler, wanted):
        ids = torch.cat((group.prompt_ids, group.response_ids[0]))[None]
        logits = torch.nn.functional.linear(
            sampler.model.hidden_states(ids), sampler.model.head_weight
        )
        log_probs = logits[0, len(group.prompt_ids) - 1 : -1].log_softmax(dim=-1)
        best = log_probs.max(dim=-1).values
        chosen = log_probs.gather(1, group.response_ids[0][:, None])[:, 0]
        torch.testing.assert_close(chosen, best, rtol=0, atol=1e-4)
        torch.testing.assert_close(group.behaviour_log_probs[0], best, rtol=0, atol=1e-4)


# ---- Stop strings ----------------------------------------------------------------------------

STOPS = ("abba", "cc", "éa")


def cut_at(ids: Sequence[int]) -> int:
    """Return the length of a response with tokens `ids`, found by searching the whole text."""
    for count in range(1, len(ids) + 1):
        text = b"".join(TOKENS.token_bytes[index] for index in ids[:count])
        if ids[count - 1] == EOS or any(stop.encode() in text for stop in STOPS):
            return count
    return len(ids)


@pytest.mark.slow
@pytest.mark.parametrize("compact_below", [0.0, 0.75])
def test_a_row_ends_after_the_token_that_completes_a_stop_string(monkeypatch, compact_below):
    monkeypatch.setattr(rows, "COMPACT_BELOW", compact_below)
    law = {"group_size": 16, "temperature": 3.0}
    whole = generated(engine(), requests(**law))
    stopped = generated(engine(), requests(**law, stop_strings=STOPS))
    cut = ended_by_id = forks = 0
    for one, other in zip(whole, stopped, strict=True):
        for g, (ids, found) in enumerate(zip(one.responses(), other.responses(), strict=True)):
            wanted = cut_at(ids)
            if found != ids[:wanted]:
                forks += 1
                continue
            assert other.finished[g] == (wanted < 60 or ids[-1] == EOS)
            cut += wanted < len(ids)
            ended_by_id += ids[wanted - 1] == EOS
    assert forks <= FORKS
    assert min(cut, ended_by_id) > 5


@pytest.mark.slow
def test_a_string_that_is_complete_before_the_least_length_does_not_count_then_or_later():
    law = {"group_size": 16, "temperature": 3.0, "min_new_tokens": 20}
    whole = generated(engine(), requests(**law))
    stopped = generated(engine(), requests(**law, stop_strings=("cc",)))
    early = cut = forks = 0
    for one, other in zip(whole, stopped, strict=True):
        for ids, found in zip(one.responses(), other.responses(), strict=True):
            text = [TOKENS.token_bytes[index] for index in ids]
            hits = [t for t in range(1, len(ids)) if text[t - 1 : t + 1] == [b"c", b"c"]]
            later = [t + 1 for t in hits if t + 1 >= 20]
            wanted = min(later, default=len(ids))
            forks += found != ids[:wanted]
            early += any(t + 1 < 20 for t in hits)
            cut += wanted < len(ids)
    assert forks <= FORKS
    assert min(early, cut) > 3


@pytest.mark.slow
def test_several_end_ids_end_a_row_and_none_of_them_comes_early():
    wanted = requests(end_ids=(EOS, 7, 9), min_new_tokens=6, temperature=2.0)
    sampler = engine()
    groups = generated(sampler, wanted)
    ends = set()
    for group in groups:
        for g, mask in enumerate(group.response_mask):
            ids = group.response_ids[g][mask].tolist()
            assert not {EOS, 7, 9} & set(ids[:-1])
            assert len(ids) >= 6
            assert group.finished[g] == (ids[-1] in (EOS, 7, 9))
            ends.add(ids[-1])
    assert ends >= {EOS, 7, 9}
    recorded, learner = recomputed(sampler.model, groups, wanted[0].limits)
    torch.testing.assert_close(recorded, learner, rtol=0, atol=1e-4)


# ---- Determinism -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_unit_gives_the_same_bits():
    sampler = engine()
    first = generated(sampler, requests(temperature=1.5))
    generated(sampler, requests((2, 2), temperature=0.5))  # earlier calls do not matter
    for again in (sampler, engine()):
        assert_same_bits(first, generated(again, requests(temperature=1.5)))


@pytest.mark.slow
def test_units_of_any_size_and_order_agree_up_to_rounding():
    wanted = requests(temperature=1.2)
    whole = generated(engine(), wanted)
    backwards = generated(engine(), wanted[::-1])[::-1]
    split = generated(engine(), wanted[:1]) + generated(engine(), wanted[1:])
    for others in (backwards, split):
        assert_agree(whole, others, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("compact_below", [0.0, 0.3, 1.0])
def test_dropping_finished_rows_changes_nothing(monkeypatch, compact_below):
    wanted = requests(temperature=2.0, group_size=8)
    usual = generated(engine(), wanted)
    assert torch.cat([group.finished for group in usual]).float().mean() > 0.4
    monkeypatch.setattr(rows, "COMPACT_BELOW", compact_below)
    assert_agree(usual, generated(engine(), wanted), atol=1e-5)


@pytest.mark.slow
def test_seed_stream_and_cursor_choose_the_responses():
    request = requests((5,))[0]
    (usual,) = generated(engine(), [request])
    others = [
        generated(engine(), [Request(**{**fields(request), "stream": "eval"})])[0],
        generated(engine(), [Request(**{**fields(request), "prompt_index": 77})])[0],
        generated(TorchEngine(sharpened(CONFIG), TOKENS, seed=12), [request])[0],
    ]
    for other in others:
        assert other.response_ids.tolist() != usual.response_ids.tolist()


def fields(request: Request) -> dict:
    return {name: getattr(request, name) for name in Request.__slots__}


# ---- Weights ---------------------------------------------------------------------------------


def snapshot(model: TransformerLM, version: int = 6, round_: int = 4) -> PolicyWeights:
    tensors = {name: p.detach().clone() for name, p in unique_parameters(model).items()}
    return PolicyWeights(
        version=version, round=round_, checksum=storage_checksum(tensors), tensors=tensors
    )


def test_loaded_weights_are_the_snapshot_bit_for_bit():
    sampler, weights = engine(), snapshot(sharpened(CONFIG, seed=1))
    sampler.load(weights)
    for name, parameter in unique_parameters(sampler.model).items():
        assert torch.equal(parameter, weights.tensors[name])
    assert (sampler.version, sampler.round) == (6, 4)


@pytest.mark.slow
def test_loading_copies_nothing_and_writes_nothing():
    sampler, first, second = engine(), *(snapshot(sharpened(CONFIG, seed=s)) for s in (1, 2))
    before = {name: tensor.clone() for name, tensor in first.tensors.items()}
    sampler.load(first)
    for name, parameter in unique_parameters(sampler.model).items():
        assert parameter.data_ptr() == first.tensors[name].data_ptr()
        assert parameter.stride() == first.tensors[name].stride()
    generated(sampler, requests())
    sampler.load(second)
    assert all(torch.equal(tensor, before[name]) for name, tensor in first.tensors.items())


@pytest.mark.slow
def test_what_lies_askew_in_memory_is_copied():
    sampler, weights = engine(), snapshot(sharpened(CONFIG, seed=1))
    sampler.load(weights)
    usual = generated(sampler, requests())
    for name, tensor in weights.tensors.items():
        askew = torch.empty(tensor.numel() + 1)[1:].as_strided(tensor.shape, tensor.stride())
        weights.tensors[name] = askew.copy_(tensor)
    sampler.load(weights)
    for parameter in sampler.model.parameters():
        assert parameter.data_ptr() % 64 == 0
    assert_same_bits(usual, generated(sampler, requests()))


def test_weights_that_travelled_as_bfloat16_become_float32():
    sampler, weights = engine(), snapshot(sharpened(CONFIG, seed=1))
    short = {name: tensor.to(torch.bfloat16) for name, tensor in weights.tensors.items()}
    sampler.load(replace(weights, tensors=short, checksum=storage_checksum(short)))
    for name, parameter in unique_parameters(sampler.model).items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, short[name].to(torch.float32))


def test_torn_weights_are_refused():
    sampler, weights = engine(), snapshot(sharpened(CONFIG, seed=1))
    weights.tensors["embedding.weight"][3, 3] += 1
    with pytest.raises(RuntimeError, match="weights version 6 arrived corrupted"):
        sampler.load(weights)
    assert (sampler.version, sampler.round) == (0, 0)


def test_weights_of_another_model_are_refused():
    other = TransformerLM(ModelConfig(**{**CONFIG.to_dict(), "num_layers": 1}))
    with pytest.raises(ValueError, match=r"weights version 6: .*blocks\.1"):
        engine().load(snapshot(other))


@pytest.mark.slow
def test_every_token_carries_version_and_round_of_its_weights():
    sampler = engine()
    sampler.load(snapshot(sampler.model))
    for group in generated(sampler, requests(temperature=1.5)):
        mask = group.response_mask
        assert group.token_versions.tolist() == (6 * mask.int()).tolist()
        assert group.token_rounds.tolist() == (4 * mask.int()).tolist()
        assert (group.oldest_version, group.oldest_round) == (6, 4)
        assert group.token_versions.dtype == group.token_rounds.dtype == torch.int32


def test_weights_that_arrive_between_tokens_sample_and_stamp_from_the_next_token_on():
    wanted = requests((4,), max_new_tokens=8, min_new_tokens=8)
    (old,) = generated(engine(), wanted)
    newer = snapshot(sharpened(CONFIG, seed=1))
    for arrival in (0, 3):
        sampler, calls = engine(), []

        def swap(sampler=sampler, calls=calls, arrival=arrival):
            if len(calls) == arrival:
                sampler.load(newer)
            calls.append(sampler.version)

        (mixed,) = generated(sampler, wanted, swap)
        assert len(calls) == 8
        assert mixed.token_versions.tolist() == [[0] * arrival + [6] * (8 - arrival)] * 4
        before, at = slice(0, arrival), arrival
        assert torch.equal(mixed.behaviour_log_probs[:, before], old.behaviour_log_probs[:, before])
        assert not torch.isclose(
            mixed.behaviour_log_probs[:, at], old.behaviour_log_probs[:, at]
        ).any()


SWAPS = {4: 1, 9: 2, 10: 3}  # token number -> seed of the weights that arrive before it


def swapping(sampler: TorchEngine):
    """Return a `between_tokens` callback that loads other weights before the tokens in `SWAPS`."""
    calls = 0

    def between_tokens() -> None:
        nonlocal calls
        if calls in SWAPS:
            model = sharpened(CONFIG, seed=SWAPS[calls])
            sampler.load(snapshot(model, version=SWAPS[calls]))
        calls += 1

    return between_tokens


@pytest.mark.slow
@pytest.mark.parametrize("compact_below", [0.0, 1.0])
def test_recomputing_every_token_has_the_log_prob_of_its_own_version(monkeypatch, compact_below):
    monkeypatch.setattr(rows, "COMPACT_BELOW", compact_below)
    sampler = engine(recompute=True)
    wanted = requests(temperature=2.0, max_new_tokens=24)
    groups = generated(sampler, wanted, swapping(sampler))
    versions = torch.cat([g.token_versions[g.response_mask] for g in groups])
    assert set(versions.tolist()) == {0, 1, 2, 3}
    finished = torch.cat([g.finished for g in groups])
    assert finished.any()
    assert not finished.all()
    lengths = torch.cat([g.response_mask.sum(1) for g in groups])
    assert lengths.min() < 9 < lengths.max()
    for version in range(4):
        recorded, expected = recomputed(sharpened(CONFIG, seed=version), groups, wanted[0].limits)
        own = torch.cat(
            [g.token_versions[row][g.response_mask[row]] for g in groups for row in range(4)]
        )
        mine = own == version
        torch.testing.assert_close(recorded[mine], expected[mine], rtol=0, atol=1e-4)
        if version:
            assert not torch.isclose(recorded[~mine], expected[~mine], atol=1e-3).all()


def replayed(prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
    """Return a response's log-probs, computed token by token with the weights that `SWAPS` loads.

    Use one cache that is never rebuilt, and a plain softmax in float64.
    """
    model = sharpened(CONFIG, seed=0).double()
    cache: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in model.blocks]

    def feed(token: int, position: int) -> torch.Tensor:
        cos, sin = model.cos[position : position + 1], model.sin[position : position + 1]
        x = model.embedding(torch.tensor([[token]]))
        for block, kept in zip(model.blocks, cache, strict=True):
            qk, values = block.attention.project(block.attention_norm(x), cos, sin)
            kept.append((qk[1], values))
            keys, values = (torch.cat(parts, dim=2) for parts in zip(*kept, strict=True))
            weights = (qk[0] @ keys.transpose(2, 3) / CONFIG.head_dim**0.5).softmax(-1)
            x = x + block.attention.out((weights @ values).transpose(1, 2).flatten(2))
            x = x + block.mlp(block.mlp_norm(x))
        return model.head(model.final_norm(x))[0, 0]

    for position, token in enumerate(prompt[:-1]):
        feed(token, position)
    log_probs, last = [], prompt[-1]
    for t, token in enumerate(response):
        if t in SWAPS:
            model = sharpened(CONFIG, seed=SWAPS[t]).double()
        logits = feed(last, len(prompt) - 1 + t) / temperature
        log_probs.append(float(logits.log_softmax(-1)[token]))
        last = token
    return log_probs


@pytest.mark.slow
@torch.no_grad()
def test_keeping_the_cache_every_token_has_the_log_prob_of_a_replay():
    sampler = engine()
    wanted = requests(temperature=2.0, max_new_tokens=24)
    groups = generated(sampler, wanted, swapping(sampler))
    other = engine(recompute=True)
    rebuilt = generated(other, wanted, swapping(other))
    assert any(
        not torch.equal(a.response_ids, b.response_ids)
        for a, b in zip(groups, rebuilt, strict=True)
    )
    for request, group in zip(wanted, groups, strict=True):
        for row, mask in enumerate(group.response_mask):
            response = group.response_ids[row][mask].tolist()
            expected = replayed(request.prompt_ids, response, 2.0)
            recorded = group.behaviour_log_probs[row][mask].tolist()
            assert recorded == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_between_tokens_is_called_before_every_token_and_not_after_the_last():
    wanted = requests((3, 11, 7, 1, 2, 4), temperature=2.0, group_size=1)
    finished = []
    for request in wanted:
        calls = []
        (group,) = generated(engine(), [request], lambda calls=calls: calls.append(None))
        assert len(calls) == group.num_tokens
        assert (len(calls) < 60) or not group.finished
        finished.append(bool(group.finished))
    assert 0 < sum(finished) < len(finished)


# ---- Refusals --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_prompt_that_leaves_no_room_is_refused():
    generated(engine(), requests((36,), max_new_tokens=60))
    with pytest.raises(
        ValueError, match="37 tokens and 60 new tokens do not fit the context of 96"
    ):
        generated(engine(), requests((5, 37), max_new_tokens=60))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        generated(engine(), requests((5, 0)))


def test_no_request_and_mixed_limits_are_refused():
    with pytest.raises(ValueError, match="no requests"):
        generated(engine(), [])
    mixed = requests((3,)) + requests((3,), temperature=0.5)
    with pytest.raises(ValueError, match=r"share their limits.*temperature=0\.5"):
        generated(engine(), mixed)
