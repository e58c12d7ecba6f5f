"""Episodes of Hugging Face models in the engine: sampled tokens, fed tokens, and new weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from agreeing import FORKS, assert_agree, assert_same_bits, common_length
from hf_models import FAMILIES, write_hf_model
from scripted import Scripted, by_hand
from test_hf_engine import (
    CPU,
    LIMITS,
    TOKENIZER,
    policy_of,
    recorded_and_scored,
    requests,
    snapshot,
)

from grpo_trainable.config import GRPOConfig
from grpo_trainable.engines import episode_rows
from grpo_trainable.engines.checks import check_played
from grpo_trainable.engines.engine import EngineSetup, Observation, PlayingEngine, build_engine
from grpo_trainable.protocol.rollout import Request, RolloutGroup

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.numerics

SEED = 5
OF_EPISODES = replace(LIMITS, min_new_tokens=1, max_new_tokens=40, stop_strings=("o", "e", "fox"))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that makes a model once for each set of arguments."""
    made: dict[str, str] = {}

    def path(family: str = "qwen2", tied: bool = True, seed: int = 0, **config: Any) -> str:
        key = repr((family, tied, seed, config))
        if key not in made:
            shape = {"max_position_embeddings": 96, **config}
            directory = tmp_path_factory.mktemp(family)
            made[key] = write_hf_model(directory, family, tied=tied, seed=seed, **shape)
        return made[key]

    return path


def config_of(path: str, weight_update: str = "between_batches", **model: Any) -> GRPOConfig:
    apart = {"placement": "disaggregated", "lag": 1, "weight_update": weight_update}
    env = {"name": "my:Env"}
    return GRPOConfig.from_dict(
        {"seed": SEED, "model": {"path": path, **model}, "env": env, **apart}
    )


def engine_of(path: str, weight_update: str = "between_batches", **model: Any) -> Any:
    config = config_of(path, weight_update, **model)
    return build_engine(EngineSetup(config=config, tokenizer=TOKENIZER, device=CPU))


def wanted() -> list[Request]:
    return requests(OF_EPISODES)


def played(
    engine: Any,
    partner: Scripted | None = None,
    wanted: Sequence[Request] = wanted(),
    between_tokens: Callable[[], None] = lambda: None,
) -> list[RolloutGroup]:
    groups = engine.play(wanted, between_tokens, partner or Scripted())
    check_played("hf", engine, wanted, groups, vocab_size=320)
    return groups


def holes(groups: Sequence[RolloutGroup]) -> int:
    return sum(int((group.extents - group.response_mask.sum(dim=1)).sum()) for group in groups)


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_an_episode_is_what_a_full_pass_a_token_gives(model_path, family, tied):
    path = model_path(family, tied)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
    asked = requests(OF_EPISODES, group_size=2)
    groups, forks = played(engine_of(path), wanted=asked), 0
    for request, group in zip(asked, groups, strict=True):
        for g, ids in enumerate(group.responses()):
            hand = by_hand(lambda ids: model(ids).logits, TOKENIZER, request, g, seed=SEED)
            length = common_length(ids, hand["ids"])
            assert group.response_mask[g, :length].tolist() == hand["mask"][:length]
            torch.testing.assert_close(
                group.behaviour_log_probs[g, :length],
                torch.tensor(hand["log_probs"][:length]),
                atol=1e-4,
                rtol=0,
            )
            if ids == hand["ids"]:
                assert [bool(group.finished[g])] == hand["finished"]
            else:
                forks += 1
    assert forks <= FORKS
    assert holes(groups) > 20


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_the_learner_finds_the_log_probs_of_all_actions(model_path, family, tied):
    path = model_path(family, tied)
    groups = played(engine_of(path))
    recorded, learner = recorded_and_scored(policy_of(path), groups, OF_EPISODES)
    torch.testing.assert_close(recorded, learner, rtol=0, atol=1e-4)
    finished = torch.cat([group.finished for group in groups])
    assert 0 < finished.sum() < len(finished)


@pytest.mark.parametrize("seed", range(2))
def test_slow_answers_change_no_token(model_path, seed):
    engine = engine_of(model_path())
    assert_agree(played(engine), played(engine, Scripted(Random(seed))), atol=1e-5)


def test_an_episode_does_not_depend_on_its_company(model_path):
    engine = engine_of(model_path())
    alone = [played(engine, wanted=[request])[0] for request in wanted()]
    assert_agree(played(engine), alone, atol=1e-5)


@pytest.mark.parametrize("compact_below", [0.0, 1.0])
def test_dropping_ended_episodes_changes_nothing(model_path, monkeypatch, compact_below):
    engine = engine_of(model_path())
    usual = played(engine)
    monkeypatch.setattr(episode_rows, "COMPACT_BELOW", compact_below)
    assert_agree(usual, played(engine), atol=1e-5)


def test_played_again_it_is_the_same_bits(model_path):
    assert_same_bits(played(engine_of(model_path())), played(engine_of(model_path())))


def test_without_a_second_turn_it_is_a_response(model_path):
    engine, partner = engine_of(model_path()), Scripted()
    partner.act = lambda action: partner._waiting.append(
        (0, Observation(action.row, over=True, finished=True))
    )
    groups = played(engine, partner)
    assert_agree(groups, engine.generate(wanted(), lambda: None), atol=1e-5)


# Index of a token -> version of the weights that arrive before this token. The version is also the
# seed of these weights.
SWAPS = {4: 1, 15: 2}


def swapping(engine: Any, model_path: Callable[..., str]) -> Callable[[], None]:
    """Return a callback that loads each version in `SWAPS` before its token."""
    calls = 0

    def between_tokens() -> None:
        nonlocal calls
        if calls in SWAPS:
            engine.load(snapshot(model_path(seed=SWAPS[calls]), SWAPS[calls]))
        calls += 1

    return between_tokens


@pytest.mark.parametrize("weight_update", ["interrupt_recompute", "in_flight"])
def test_new_weights_in_the_middle_of_episodes(model_path, weight_update):
    engine = engine_of(model_path(), weight_update)
    groups = played(engine, between_tokens=swapping(engine, model_path))
    versions = torch.cat([g.token_versions[g.response_mask] for g in groups])
    assert set(versions.tolist()) == {0, 1, 2}
    assert not any(g.token_versions[~g.response_mask].any() for g in groups)
    recorded, learner = recorded_and_scored(policy_of(model_path()), groups, OF_EPISODES)
    first = versions == 0
    torch.testing.assert_close(recorded[first], learner[first], rtol=0, atol=1e-4)
    for version in (1, 2):
        path = model_path(seed=version)
        recorded, learner = recorded_and_scored(policy_of(path), groups, OF_EPISODES)
        mine = versions == version
        # With `in_flight`, the cache is kept, so it contains keys of older weights.
        agrees = bool(torch.isclose(recorded[mine], learner[mine], rtol=0, atol=1e-4).all())
        assert agrees == (weight_update == "interrupt_recompute")


def test_a_bfloat16_model_plays(model_path):
    half: dict[str, Any] = {"dtype": "bfloat16"}
    groups = played(engine_of(model_path(), **half))
    recorded, learner = recorded_and_scored(policy_of(model_path(), **half), groups, OF_EPISODES)
    assert (recorded - learner).abs().mean() < 0.02


def test_it_is_an_engine_that_plays(model_path):
    assert isinstance(engine_of(model_path()), PlayingEngine)
