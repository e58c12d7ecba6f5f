"""State values from completions, compared with exact values, and used in a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pairs import Pair
from policies import Pieces, write_quick_policy

from grpo_trainable.algo import vine
from grpo_trainable.config import VineSettings
from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.generator.state_values import Completer, Completions, state_values
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.sampling import uniforms
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.protocol.rollout import Request, RolloutGroup, SamplingLimits, StateOf

pytestmark = pytest.mark.numerics

PIECES = ["a", "b"]  # tokens 2 and 3; a prompt is the token 2
LIMITS = SamplingLimits(min_new_tokens=1, max_new_tokens=2, temperature=1.0, end_ids=(0,))

# ---- A two-step toy with known values ------------------------------------------------------------

# Probabilities of the next token (a, b) after a and after b. The chain starts at a and earns 1 if
# its second step is b.
AFTER_A, AFTER_B = (0.75, 0.25), (0.5, 0.5)
VALUE_AFTER_A, VALUE_AFTER_B = 0.25, 0.5
VALUE_OF_PROMPT = 0.75 * 0.25 + 0.25 * 0.5


def chain() -> TransformerLM:
    """Return a policy whose next token depends only on the last token (AFTER_A, AFTER_B)."""
    width = 4
    shape = ModelConfig(
        vocab_size=4, context_length=8, d_model=width, num_layers=1, num_heads=1, d_ff=4,
        tied_head=False,
    )  # fmt: skip
    model = TransformerLM(shape)
    never = -30.0
    laws = [[0.0] * 4, [0.0] * 4, *([never, never, *map(math.log, p)] for p in (AFTER_A, AFTER_B))]
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.zero_()
        model.embedding.weight.copy_(torch.eye(4))
        # The norm scales a unit vector to length sqrt(width).
        model.head.weight.copy_(torch.tensor(laws).t() / math.sqrt(width))
    return model


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[index - 2] for index in ids)


def ask(prompt_index: int, group_size: int) -> Request:
    return Request(
        stream="train", prompt_index=prompt_index, prompt_ids=(2,), group_size=group_size,
        limits=LIMITS,
    )  # fmt: skip


@pytest.mark.slow
def test_values_converge_to_the_exact_ones() -> None:
    engine = TorchEngine(chain(), Pieces(PIECES), seed=0)
    sample = lambda requests: engine.generate(requests, lambda: None)  # noqa: E731
    (group,) = sample([ask(7, 8)])
    errors = []
    for samples in (64, 4096):
        settings = VineSettings(samples=samples, chunk_tokens=1)
        (found,) = Completer(settings, decode, sample).completions([group], LIMITS)
        assert len(found.states) == 1 + 8
        texts = [decode(ids) for ids in found.responses]
        assert len(texts) == 9 * samples
        rewards = [float(text[1] == "b") for text in texts]
        values = state_values(group, found, rewards)
        after = torch.tensor([VALUE_AFTER_A, VALUE_AFTER_B])[group.response_ids[:, 0] - 2]
        exact = torch.stack((torch.full((8,), VALUE_OF_PROMPT), after), dim=1)
        errors.append((values - exact).abs().max())
        # The reward of one completion has a standard deviation of at most 1/2. A bound of 4
        # standard errors is wide enough for 9 values.
        assert errors[-1] < 4 * 0.5 / math.sqrt(samples)
        rewards = (group.response_ids[:, 1] == 3).float()
        advantages = vine(rewards, values, group.response_mask)
        expected = torch.stack((exact[:, 1] - exact[:, 0], rewards - exact[:, 1]), dim=1)
        assert (advantages - expected).abs().max() < 8 * 0.5 / math.sqrt(samples)
    assert errors[1] < errors[0]
    assert 0 < int((group.response_ids[:, 0] == 3).sum()) < 8  # both states occurred


def test_a_completion_begins_with_the_tokens_before_its_state() -> None:
    engine = TorchEngine(chain(), Pieces(PIECES), seed=0)
    sample = lambda requests: engine.generate(requests, lambda: None)  # noqa: E731
    groups = sample([ask(0, 4), ask(1, 4)])
    settings = VineSettings(samples=3, chunk_tokens=1)
    for group, found in zip(
        groups, Completer(settings, decode, sample).completions(groups, LIMITS), strict=True
    ):
        assert found.states == [(0, 0), (0, 1), (1, 1), (2, 1), (3, 1)]
        for state, (response, tokens) in enumerate(found.states):
            begin = decode(group.response_ids[response, :tokens].tolist())
            responses = found.responses[3 * state : 3 * state + 3]
            texts = [decode(ids) for ids in responses]
            assert all(text.startswith(begin) and len(text) == 2 for text in texts)


# ---- States ------------------------------------------------------------------------------------


def states_of(ids: list[int], pieces: list[str], **settings: Any) -> list[int]:
    text = dict(enumerate(pieces))
    completer = Completer(
        VineSettings(**settings), lambda ids: "".join(text[i] for i in ids), lambda requests: []
    )
    return list(completer._states(ids))


def test_a_state_every_so_many_tokens_but_none_at_the_end() -> None:
    pieces = ["x"] * 9
    assert states_of(list(range(9)), pieces, chunk_tokens=4) == [4, 8]
    assert states_of(list(range(8)), pieces, chunk_tokens=4) == [4]
    assert states_of([], pieces, chunk_tokens=4) == []


def test_states_at_the_ends_of_sentences_and_lines() -> None:
    pieces = ["A", " b", ".", " C", "!", '"', " 3", ".", "14", "\n", "d", ".", " e", "."]
    ids = list(range(len(pieces)))
    # A lone quotation mark is not a sentence, and 3.14 is one number.
    assert states_of(ids, pieces, states="sentences", chunk_tokens=1) == [3, 10, 12]
    assert states_of(ids, pieces, states="sentences", chunk_tokens=4) == [10]


# ---- Values in a group -------------------------------------------------------------------------


def group_of(mask: list[list[int]]) -> RolloutGroup:
    response_mask = torch.tensor(mask).bool()
    zeros = torch.zeros(response_mask.shape)
    return RolloutGroup(
        prompt_index=0,
        prompt_ids=torch.tensor([2]),
        response_ids=torch.full(response_mask.shape, 2),
        response_mask=response_mask,
        behaviour_log_probs=zeros,
        rewards=torch.zeros(len(mask)),
        finished=torch.zeros(len(mask), dtype=torch.bool),
        token_versions=zeros.int(),
        token_rounds=zeros.int(),
    )


def test_a_value_stands_at_the_token_that_follows_its_state() -> None:
    group = group_of([[1, 1, 1], [1, 0, 1]])
    found = Completions(states=[(0, 0), (0, 2), (1, 1)], responses=[[]] * 6, samples=2)
    values = state_values(group, found, [0, 1, 1, 1, 0, 0])
    assert values.nan_to_num(-1).tolist() == [[0.5, -1, 1.0], [0.5, -1, 0.0]]


# ---- Draws -------------------------------------------------------------------------------------


def test_draws_of_completions_differ_by_state_response_and_completion() -> None:
    def of(response: int, state: tuple[int, int] | None, stream: str = "vine") -> bytes:
        return uniforms(3, stream, 5, response, 40, state).tobytes()

    keys = [(k, (g, t)) for k in range(3) for g in range(3) for t in (0, 1, 16)]
    draws = {of(*key) for key in keys} | {of(k, None, "train") for k in range(3)}
    assert len(draws) == len(keys) + 3
    assert of(1, (2, 16)) == of(1, (2, 16))
    assert of(1, None, "train") == uniforms(3, "train", 5, 1, 40).tobytes()


def test_a_stop_string_may_begin_before_the_state() -> None:
    model = chain()
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[0.0] * 4, [0.0] * 4, [0.0] * 4, [60.0] * 4]) / 2)
    limits = replace(LIMITS, max_new_tokens=4, stop_strings=("ab",))
    request = Request(
        stream="vine", prompt_index=0, prompt_ids=(3, 2), group_size=1, limits=limits,
        state=StateOf(response=0, tokens=1),
    )  # fmt: skip
    engine = TorchEngine(model, Pieces(PIECES), seed=0)
    (group,) = engine.generate([request], lambda: None)
    assert group.response_ids.tolist() == [[3]]
    assert group.finished.tolist() == [True]
    # Without `state`, the prompt is not part of the response, so no stop string is completed.
    (group,) = engine.generate([replace(request, state=None)], lambda: None)
    assert group.response_ids.tolist() == [[3, 3, 3, 3]]


# ---- Generator and learner ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


def vine_pair(policy_path: str, **values: Any) -> Pair:
    settings = {"samples": 2, "chunk_tokens": 4, **values.pop("vine", {})}
    pair = Pair(policy_path, loss={"advantage": "vine"}, vine=settings, **values)
    pair.sync()
    return pair


def requests(pair: Pair) -> list[Request]:
    return [pair.prompts.request("train", index) for index in range(4)]


@pytest.mark.slow
def test_a_generator_values_every_chunk_and_counts_the_completions(policy_path: str) -> None:
    pair = vine_pair(policy_path, vine={"samples": 3})
    scored = pair.generator.generate(requests(pair))
    states = 0
    for group in scored.groups:
        valued = ~group.state_values.isnan()
        for row, length in zip(valued, group.response_mask.sum(dim=1).tolist(), strict=True):
            assert row.nonzero()[:, 0].tolist() == list(range(0, length, 4))
        states += 1 + int(valued[:, 1:].sum())
    assert scored.completions == 3 * states
    stages = {span.stage for span in scored.spans}
    assert {"rollout", "vine", "reward"} <= stages
    held_out = pair.generator.generate([pair.prompts.request("eval", 0)])
    assert held_out.groups[0].state_values is None
    assert held_out.completions == 0


@pytest.mark.slow
def test_the_same_chunk_has_the_same_values_wherever_it_is_sampled(policy_path: str) -> None:
    first, second = vine_pair(policy_path), vine_pair(policy_path)
    second.generator.generate([second.prompts.request("train", 9)])
    for ours, theirs in zip(
        first.generator.generate(requests(first)).groups,
        second.generator.generate(requests(second)).groups,
        strict=True,
    ):
        assert ours.response_ids.equal(theirs.response_ids)
        assert ours.state_values.nan_to_num(-1).equal(theirs.state_values.nan_to_num(-1))


@pytest.mark.slow
def test_completions_change_no_response(policy_path: str) -> None:
    valued, plain = vine_pair(policy_path), Pair(policy_path)
    plain.sync()
    pairs = zip(valued.rollouts(), plain.rollouts(), strict=True)
    for ours, theirs in pairs:
        assert ours.response_ids.equal(theirs.response_ids)
        assert ours.behaviour_log_probs.equal(theirs.behaviour_log_probs)


@pytest.mark.slow
def test_a_learner_trains_on_the_values_that_came_with_the_groups(policy_path: str) -> None:
    pair = vine_pair(policy_path)
    groups = pair.rollouts()
    estimated = pair.learner._batches.estimate(groups)
    tokens = torch.cat(
        [a[g.response_mask] for a, g in zip(estimated.advantages, groups, strict=True)]
    )
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-6)
    updated = pair.learner.update([groups])
    assert updated.critic is None
    assert math.isfinite(updated.steps[0].loss)
    assert updated.responses.advantages.shape == (12,)
