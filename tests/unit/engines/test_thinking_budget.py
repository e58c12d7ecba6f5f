"""Responses interrupted by inserted text: examples by hand, with a model, and in a round."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agreeing import assert_agree, assert_agree_as_far, assert_same_bits
from policies import Pieces, sharpened, write_quick_policy
from test_torch_engine import replayed, swapping

from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.engines.checks import check_groups
from grpo_trainable.engines.engine import EngineError
from grpo_trainable.engines.rows import Rows
from grpo_trainable.engines.selection import chosen_engine
from grpo_trainable.engines.thinking_budget import ThinkingBudget
from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.models.stop_strings import StopStrings
from grpo_trainable.pipeline.sampling_settings import is_same_sampling, sampling_settings
from grpo_trainable.protocol.rollout import (
    Interruption,
    Request,
    RolloutGroup,
    SamplingLimits,
    as_rows,
    collate,
)
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.tasks.stop_rules import interruption
from grpo_trainable.transports.in_process import InProcess

pytestmark = pytest.mark.numerics

EOS, PAD = 0, 1
CPU = torch.device("cpu")

# ---- Examples by hand --------------------------------------------------------------------------


def request(limits: SamplingLimits, group_size: int, prompt_ids: Sequence[int] = (2,)) -> Request:
    return Request(
        stream="train",
        prompt_index=0,
        prompt_ids=tuple(prompt_ids),
        group_size=group_size,
        limits=limits,
    )


def limits(asked: Interruption | None, max_new_tokens: int = 7, **others: Any) -> SamplingLimits:
    values = {"min_new_tokens": 1, "temperature": 1.0, "end_ids": (EOS,), **others}
    return SamplingLimits(max_new_tokens=max_new_tokens, interruption=asked, **values)


def written(
    wishes: Sequence[Sequence[int]],
    asked: Interruption,
    *,
    answers: StopStrings | None = None,
    stops: StopStrings | None = None,
) -> RolloutGroup:
    """Return the group of responses that try to write the tokens of `wishes`.

    The vocabulary has six tokens, and the weights are version 3 of round 2.
    """
    length = len(wishes[0])
    rows = Rows(
        [request(limits(asked, length), len(wishes))],
        pad_id=PAD,
        seed=0,
        stops=stops,
        device=CPU,
        thinking_budget=ThinkingBudget(asked, answers, len(wishes), CPU),
    )
    rows.enter()
    alive = torch.arange(len(wishes))
    for t in range(length):
        logits = torch.full((len(alive), 6), -50.0)
        logits[torch.arange(len(alive)), torch.tensor(wishes)[alive, t]] = 50.0
        rows.draw(logits, 3, 2)
        keep = rows.drop_ended()
        alive = alive if keep is None else alive[keep]
        if rows.over:
            break
    (group,) = rows.groups()
    return group


def test_a_response_that_still_thinks_reads_the_text_and_goes_on():
    group = written(
        [
            [2, 2, 2, 2, 2, 2, 3],
            [2, 5, 2, 2, 2, 2, 2],
            [2, 2, 2, 2, 2, EOS, 2],
            [2, EOS, 2, 2, 2, 2, 2],
        ],
        Interruption(after_tokens=3, ids=(4, EOS), answer_ids=(5,)),
    )
    # The second response contains token 5, so it already answers. The last response has ended. An
    # inserted token ends no response.
    assert group.response_ids.tolist() == [
        [2, 2, 2, 4, EOS, 2, 3],
        [2, 5, 2, 2, 2, 2, 2],
        [2, 2, 2, 4, EOS, EOS, PAD],
        [2, EOS, PAD, PAD, PAD, PAD, PAD],
    ]
    assert group.response_mask.int().tolist() == [
        [1, 1, 1, 0, 0, 1, 1],
        [1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 0, 0],
    ]
    assert group.finished.tolist() == [False, False, True, True]
    assert group.token_versions.tolist() == (3 * group.response_mask.int()).tolist()
    assert group.token_rounds.tolist() == (2 * group.response_mask.int()).tolist()
    assert group.extents.tolist() == [7, 7, 6, 2]
    assert group.oldest_round == 2


def test_a_text_that_lies_across_tokens_says_that_an_answer_has_begun():
    tokens = Pieces(["x", "a</th", "ink>", "</think>"]).token_bytes
    answers = StopStrings(["</think>"], tokens, 6)
    asked = Interruption(after_tokens=3, ids=(2,), answer_strings=("</think>",))
    group = written(
        [[2, 3, 4, 2, 2], [2, 3, 2, 2, 2], [2, 2, 3, 4, 2], [5, 2, 2, 2, 2]], asked, answers=answers
    )
    # The third response would have ended its thinking one token after the limit.
    assert (~group.response_mask).any(dim=1).tolist() == [False, True, True, False]
    assert group.response_ids[2].tolist() == [2, 2, 3, 2, 2]


def test_a_stop_string_is_ended_by_a_token_that_was_sampled():
    tokens = Pieces(["x", "St", "op", "Stop"]).token_bytes
    stops = StopStrings(["Stop"], tokens, 6)
    fed_whole = written([[2, 2, 2, 2, 5]], Interruption(after_tokens=2, ids=(5,)), stops=stops)
    assert fed_whole.response_ids.tolist() == [[2, 2, 5, 2, 5]]
    assert fed_whole.finished.tolist() == [True]
    begun = written([[2, 2, 2, 4, 2]], Interruption(after_tokens=2, ids=(3,)), stops=stops)
    assert begun.response_ids.tolist() == [[2, 2, 3, 4]]
    assert begun.finished.tolist() == [True]


# ---- With a model ------------------------------------------------------------------------------

VOCAB = 50
CONFIG = ModelConfig(
    vocab_size=VOCAB, context_length=96, d_model=32, num_layers=2, num_heads=4, d_ff=40
)
TOKENS = Pieces([*("a", "b", "ab", "ba", "c", "bab", "d", "e")] * 6)
ASKED = Interruption(after_tokens=6, ids=(9, 8, 9, 7), answer_ids=(2, 3))


def sampled(slots: int | None, asked: Interruption | None = ASKED) -> list[RolloutGroup]:
    engine = TorchEngine(sharpened(CONFIG), TOKENS, seed=11, slots=slots)  # type: ignore[arg-type]
    wanted = [
        replace(
            request(limits(asked, 20, temperature=2.0), 5, range(2, 2 + length)),
            prompt_index=length,
        )
        for length in (3, 11, 1)
    ]
    groups = engine.generate(wanted, lambda: None)
    check_groups("torch", engine, wanted, groups, TOKENS, VOCAB)  # type: ignore[arg-type]
    return groups


@pytest.mark.slow
@pytest.mark.parametrize("slots", [None, 4])
def test_the_learner_finds_what_the_sampler_recorded(slots: int | None):
    groups = sampled(slots)
    interrupted = torch.cat([g.extents > g.response_mask.sum(dim=1) for g in groups])
    assert interrupted.any()
    assert not interrupted.all()
    batch = collate(groups, [torch.zeros(5)] * 3, PAD)
    with torch.no_grad():
        scored, _ = response_log_probs(
            sharpened(CONFIG),
            batch.input_ids,
            batch.target_ids,
            batch.response_mask,
            temperature=2.0,
            min_new_tokens=1,
            end_ids=(EOS,),
        )
    mask = batch.response_mask
    torch.testing.assert_close(scored[mask], batch.behaviour_log_probs[mask], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_slots_change_no_token_and_others_none_before_the_interruption():
    whole, queued, free = sampled(None), sampled(4), sampled(None, None)
    assert_agree(whole, queued, atol=1e-4)
    first = [ids[:6] for group in whole for ids in group.responses()]
    assert_agree_as_far(first, [ids for group in free for ids in group.responses()])


@pytest.mark.slow
@pytest.mark.parametrize("slots", [None, 4])
@torch.no_grad()
def test_each_token_has_the_log_prob_of_its_weights_where_they_arrive_while_a_text_is_read(
    slots: int | None,
):
    engine = TorchEngine(sharpened(CONFIG), TOKENS, seed=11, slots=slots, recompute=True)  # type: ignore[arg-type]
    wanted = [request(limits(ASKED, 20, temperature=2.0), 5, range(2, 9))]
    groups = engine.generate(wanted, swapping(engine))
    check_groups("torch", engine, wanted, groups, TOKENS, VOCAB)  # type: ignore[arg-type]
    (group,) = groups
    mask = group.response_mask
    read = ~mask[:, 6:10].any(dim=1)
    assert read.any()
    assert (group.token_versions[~mask] == 0).all()
    if slots is None:
        # Other weights arrive before tokens 4, 9 and 10. Tokens 6 to 9 are inserted.
        assert group.token_versions[read][:, [3, 4, 5, 10]].tolist() == [[0, 1, 1, 3]] * read.sum()
    batch, found = collate(groups, [torch.zeros(5)], PAD), {}
    for version in range(4):
        found[version], _ = response_log_probs(
            sharpened(CONFIG, seed=version),
            batch.input_ids,
            batch.target_ids,
            batch.response_mask,
            temperature=2.0,
            min_new_tokens=1,
            end_ids=(EOS,),
        )
    versions = as_rows(groups, [group.token_versions])
    of_own = sum(found[version] * (versions == version) for version in found)
    at = batch.response_mask
    torch.testing.assert_close(of_own[at], batch.behaviour_log_probs[at], rtol=0, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_a_kept_cache_has_read_the_text_by_the_weights_of_its_time():
    engine = TorchEngine(sharpened(CONFIG), TOKENS, seed=11)  # type: ignore[arg-type]
    wanted = request(limits(ASKED, 20, temperature=2.0), 5, range(2, 9))
    (group,) = engine.generate([wanted], swapping(engine))
    assert not group.response_mask[:, 6:10].all()
    for row, extent in enumerate(group.extents.tolist()):
        ids, mask = group.response_ids[row, :extent], group.response_mask[row, :extent]
        expected = torch.tensor(replayed(wanted.prompt_ids, ids.tolist(), 2.0))
        recorded = group.behaviour_log_probs[row, :extent]
        torch.testing.assert_close(recorded[mask], expected[mask], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["id", "hole"])
def test_an_engine_that_feeds_something_else_is_found_out(place: str):
    engine = TorchEngine(sharpened(CONFIG), TOKENS, seed=11)  # type: ignore[arg-type]
    asked = request(limits(ASKED, 20, temperature=2.0), 8)
    (group,) = engine.generate([asked], lambda: None)
    row = int((group.extents > group.response_mask.sum(dim=1)).nonzero()[0])
    if place == "id":
        group.response_ids[row, 7] = 5
    else:
        group.response_mask[row, 5] = False
        group.behaviour_log_probs[row, 5] = 0.0
    with pytest.raises(EngineError, match=f"response {row} was not fed the"):
        check_groups("torch", engine, [asked], [group], TOKENS, VOCAB)  # type: ignore[arg-type]


# ---- In a round --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


def config_of(path: str | None, *, engine: str = "auto", **rollout: Any) -> GRPOConfig:
    given = {
        "prompts": 4,
        "group_size": 3,
        "max_new_tokens": 12,
        "overlong": "interrupt",
        "overlong_buffer": 8,
        "interruption": " The end.",
        **rollout,
    }
    return GRPOConfig.from_dict(
        {"model": {"path": path}, "engine": engine, "rollout": given, "optim": {"lr": 1e-2}}
    )


class Round:
    """A learner and a generator in one process, without Ray."""

    def __init__(self, config: GRPOConfig) -> None:
        transport = InProcess()
        self.learner, self.generator = Learner(config, transport), Generator(config, transport)
        self.prompts = Prompts(config, build_task(config), read_tokenizer(config.model.path))

    def rollouts(self, first: int) -> list[RolloutGroup]:
        self.generator.load(self.learner.publish().handle)
        asked = [self.prompts.request("train", first + i) for i in range(4)]
        groups = self.generator.generate(asked).groups
        rewards = torch.tensor([0.0, 1.0, 0.25])
        return [replace(group, rewards=rewards, uses=1) for group in groups]


@pytest.mark.slow
def test_the_loss_counts_sampled_tokens_alone_at_ratio_one(policy_path: str):
    trial = Round(config_of(policy_path))
    groups = trial.rollouts(0)
    text = read_tokenizer(policy_path).decode
    told = [text(ids) for group in groups for ids in group.responses()]
    interrupted = sum(" The end." in response for response in told)
    assert interrupted >= 6  # a random policy rarely ends a response within four tokens
    (step,) = (updated := trial.learner.update([groups])).steps
    assert sum(step.ratio_counts) == sum(group.num_tokens for group in groups)
    assert step.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert updated.sampler_mismatch_nats == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
def test_a_resumed_trial_samples_and_learns_the_same_bits(policy_path: str):
    unbroken = Round(config_of(policy_path))
    unbroken.learner.update([unbroken.rollouts(0)])
    state = unbroken.learner.state()
    resumed = Round(config_of(policy_path))
    resumed.learner.load_state(state)
    some, others = unbroken.rollouts(4), resumed.rollouts(4)
    assert_same_bits(some, others)
    unbroken.learner.update([some])
    resumed.learner.update([others])
    weights = [trial.learner.state().policy for trial in (unbroken, resumed)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


# ---- Settings ----------------------------------------------------------------------------------


def test_the_budget_is_what_the_buffer_leaves():
    tokenizer = read_tokenizer(None)
    config = config_of(None)
    asked = interruption(config, tokenizer)
    assert asked is not None
    assert asked.after_tokens == 4
    assert tokenizer.decode(asked.ids) == " The end."
    assert (asked.answer_ids, asked.answer_strings) == ((), ("</think>",))
    assert interruption(GRPOConfig(), tokenizer) is None


def test_only_responses_to_train_on_are_interrupted():
    prompts = Prompts(config_of(None), build_task(config_of(None)), read_tokenizer(None))
    assert prompts.request("train", 0).limits.interruption is not None
    assert prompts.request("eval", 0).limits.interruption is None


def test_a_text_that_leaves_no_room_for_an_answer_is_refused():
    config = config_of(None, interruption="one two three four five six seven eight nine ten")
    with pytest.raises(
        ValueError, match=r"^rollout.overlong_buffer=8: .* leaves none for an answer"
    ):
        interruption(config, read_tokenizer(None))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout": {"overlong_buffer": 60}}, "rollout.overlong_buffer=60: must be < rollout.max"),
        (
            {"rollout": {"min_new_tokens": 50}},
            "rollout.min_new_tokens=50: must be <= 49 with rollout.overlong=interrupt, which "
            "interrupts a response after 48 tokens",
        ),
        ({"loss": {"advantage": "vine"}}, "rollout.overlong=interrupt: must be score or filter"),
        ({"env": {"name": "calculator"}}, "rollout.overlong=interrupt: must not be interrupt with"),
        (
            {"engine": "vllm", "placement": "disaggregated"},
            "rollout.overlong=interrupt: does not work with engine=vllm",
        ),
    ],
)
def test_what_cannot_go_with_interruptions_is_refused_by_name(
    settings: dict[str, Any], message: str
):
    rollout = {"overlong": "interrupt", **settings.get("rollout", {})}
    with pytest.raises(ConfigError) as error:
        GRPOConfig.from_dict({**settings, "rollout": rollout})
    assert str(error.value).startswith(message)


def test_an_engine_of_the_users_cannot_interrupt(tmp_path: Path):
    with pytest.raises((ConfigError, ValueError), match=r"rollout\.overlong=interrupt"):
        chosen_engine(config_of(None, engine=f"{tmp_path}/mine.py:build"))


def test_interruptions_change_what_is_sampled_and_other_rules_do_not():
    works = {
        (overlong, buffer): json.loads(
            json.dumps(sampling_settings(config_of(None, overlong=overlong, **given)))
        )
        for overlong, buffer, given in (
            ("interrupt", 8, {}),
            ("interrupt", 9, {"overlong_buffer": 9}),
            ("penalty", 8, {"interruption": DEFAULT_TEXT}),
            ("penalty", 9, {"overlong_buffer": 9, "interruption": DEFAULT_TEXT}),
        )
    }
    assert is_same_sampling(works["penalty", 8], works["penalty", 9])
    assert not is_same_sampling(works["interrupt", 8], works["interrupt", 9])
    assert not is_same_sampling(works["interrupt", 8], works["penalty", 8])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"model": {"path": "/a"}}, {"model": {"path": "/b"}}, False),
        ({"model": {"system": "be brief", "chat_template": "on"}}, {}, False),
        ({"model": {"packing": True, "gradient_checkpointing": True}}, {}, True),
        ({"engine": "torch"}, {"engine": "hf", "model": {"path": "/a"}}, False),
        (
            {"task": {"name": "guess"}, "env": {"name": "guess", "max_turns": 3}},
            {"task": {"name": "guess"}, "env": {"name": "guess", "max_turns": 1}},
            False,
        ),
    ],
)
def test_another_model_engine_or_environment_samples_other_work(
    one: dict[str, Any], other: dict[str, Any], same: bool
):
    def work(settings: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(sampling_settings(GRPOConfig.from_dict(settings))))

    assert is_same_sampling(work(one), work(one))
    assert is_same_sampling(work(one), work(other)) == same


DEFAULT_TEXT = GRPOConfig().rollout.interruption
