"""Episodes in the engine: sampled tokens, observations, and rows that wait for environments."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from agreeing import FORKS, assert_agree, assert_same_bits, common_length
from policies import Pieces, sharpened
from scripted import Scripted, by_hand

from grpo_trainable.engines.checks import check_played
from grpo_trainable.engines.engine import Observation, PlayingEngine
from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.protocol.rollout import Request, SamplingLimits, TrainBatch, collate

pytestmark = pytest.mark.numerics

END, PAD, STOP = 0, 1, "ab"
TOKENS = Pieces(["a", "b", "ab", "c", "d", "e"])
CONFIG = ModelConfig(
    vocab_size=8, context_length=64, d_model=16, num_layers=2, num_heads=2, d_ff=24
)
LIMITS = SamplingLimits(
    min_new_tokens=1, max_new_tokens=40, temperature=1.0, end_ids=(END,), stop_strings=(STOP,)
)
SEED = 5


def requests(group_size: int = 3) -> list[Request]:
    prompts = [(2, 3), (4, 5, 6, 2, 3), (7,)]
    return [
        Request(
            stream="train", prompt_index=i, prompt_ids=ids, group_size=group_size, limits=LIMITS
        )
        for i, ids in enumerate(prompts)
    ]


def played(delays: Random | None = None, wanted: list[Request] | None = None, **kwargs):
    engine = TorchEngine(sharpened(CONFIG), TOKENS, seed=SEED)  # pyright: ignore[reportArgumentType]
    partner = Scripted(delays)
    groups = engine.play(wanted or requests(), lambda: None, partner)
    return engine, partner, groups


@pytest.mark.slow
def test_an_episode_is_what_a_full_pass_a_token_gives():
    engine, _, groups = played()
    forks = 0
    for request, group in zip(requests(), groups, strict=True):
        for g, ids in enumerate(group.responses()):
            hand = by_hand(engine.model, TOKENS, request, g, seed=SEED)
            length = common_length(ids, hand["ids"])
            assert group.response_mask[g, :length].tolist() == hand["mask"][:length]
            torch.testing.assert_close(
                group.behaviour_log_probs[g, :length],
                torch.tensor(hand["log_probs"][:length]),
                atol=1e-5,
                rtol=0,
            )
            if ids == hand["ids"]:
                assert [bool(group.finished[g])] == hand["finished"]
            else:
                forks += 1
    assert forks <= FORKS
    holes = sum(int((group.extents - group.response_mask.sum(dim=1)).sum()) for group in groups)
    assert holes > 20
    assert not all(bool(group.finished.all()) for group in groups)


def learned(engine: TorchEngine, batch: TrainBatch) -> torch.Tensor:
    """Return the log-probs (B, S) that the learner computes."""
    log_probs, _ = response_log_probs(
        engine.model,
        batch.input_ids,
        batch.target_ids,
        batch.response_mask,
        temperature=LIMITS.temperature,
        min_new_tokens=LIMITS.min_new_tokens,
        end_ids=LIMITS.end_ids,
    )
    return log_probs.detach()


@pytest.mark.slow
def test_the_learner_finds_the_same_log_probs():
    engine, _, groups = played()
    batch = collate(groups, [torch.zeros(3)] * 3, PAD)
    torch.testing.assert_close(learned(engine, batch), batch.behaviour_log_probs, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_slow_answers_change_no_token(seed: int):
    _, _, at_once = played()
    _, _, late = played(Random(seed))
    assert_agree(at_once, late, atol=1e-5)


@pytest.mark.slow
def test_an_episode_does_not_depend_on_its_company():
    _, _, together = played()
    alone = [played(wanted=[request])[2][0] for request in requests()]
    assert_agree(together, alone, atol=1e-5)


@pytest.mark.slow
def test_played_again_it_is_the_same_bits():
    assert_same_bits(played()[2], played()[2])


@pytest.mark.slow
def test_an_action_is_told_with_its_tokens_and_its_place():
    _, partner, groups = played()
    rows = [(group, g) for group in groups for g in range(3)]
    assert partner.actions
    for action in partner.actions:
        group, g = rows[action.row]
        begin = action.end + 1 - len(action.ids)
        assert group.response_ids[g, begin : action.end + 1].tolist() == action.ids
        assert bool(group.response_mask[g, begin : action.end + 1].all())


@pytest.mark.slow
def test_without_a_second_turn_it_is_a_response():
    """Check that `play` and `generate` agree if every episode ends with its first action."""
    engine, partner, _ = played()
    partner.act = lambda action: partner._waiting.append(  # pyright: ignore
        (0, Observation(action.row, over=True, finished=True))
    )
    groups = engine.play(requests(), lambda: None, partner)
    assert_agree(groups, engine.generate(requests(), lambda: None), atol=1e-5)


class Changing:
    """A callback that loads other weights before token number `at`."""

    def __init__(self, engine: TorchEngine, at: int) -> None:
        self._engine, self._left = engine, at

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            with torch.no_grad():
                self._engine.model.embedding.weight.mul_(1.3)
            self._engine._version, self._engine._round = 1, 1
            self._engine._loads += 1


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_in_the_middle_of_episodes(recompute: bool):
    engine = TorchEngine(sharpened(CONFIG), TOKENS, seed=SEED, recompute=recompute)  # pyright: ignore
    groups = engine.play(requests(), Changing(engine, 9), Scripted())
    _, _, before = played()
    versions = torch.cat([g.token_versions[g.response_mask] for g in groups])
    assert set(versions.tolist()) == {0, 1}
    assert not any(g.token_versions[~g.response_mask].any() for g in groups)
    for group, old in zip(groups, before, strict=True):  # nothing has changed before token 9
        width = min(8, group.response_ids.shape[1], old.response_ids.shape[1])
        assert torch.equal(group.response_ids[:, :width], old.response_ids[:, :width])
    if not recompute:
        return
    # All cached keys come from the new weights, so the later tokens follow the new distribution
    # exactly.
    batch = collate(groups, [torch.zeros(3)] * 3, PAD)
    log_probs = learned(engine, batch)
    start = 0
    for group in groups:
        for g in range(3):
            new = group.response_mask[g] & (group.token_versions[g] == 1)
            first = len(group.prompt_ids) - 1
            row = log_probs[start, first : first + len(new)]
            found = torch.nn.functional.pad(row, (0, len(new) - len(row)))[new]
            torch.testing.assert_close(found, group.behaviour_log_probs[g][new], atol=1e-5, rtol=0)
            start += 1


@pytest.mark.slow
def test_what_was_played_is_checked():
    engine, _, groups = played()
    assert isinstance(engine, PlayingEngine)
    check_played("torch", engine, requests(), groups, CONFIG.vocab_size)
    torn = replace(groups[0], response_mask=groups[0].response_mask.roll(1, 1))
    with pytest.raises(RuntimeError, match="does not begin with a sampled token"):
        check_played("torch", engine, requests(), [torn, *groups[1:]], CONFIG.vocab_size)
