"""The entry point for a user's engine, which builds the engine and checks its answers."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_trainable.config import GRPOConfig
from grpo_trainable.engines.checks import check_groups, check_load
from grpo_trainable.engines.engine import EngineError, EngineSetup, build_engine
from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.generator.generator import Generator
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.plugins import PluginError
from grpo_trainable.protocol.rollout import PolicyWeights, Request, RolloutGroup, SamplingLimits
from grpo_trainable.simulation.groups import group_of
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.transports.in_process import InProcess

LIMITS = SamplingLimits(min_new_tokens=2, max_new_tokens=3, temperature=1.0, end_ids=(9,))
REQUEST = Request(stream="train", prompt_index=7, prompt_ids=(1,), group_size=2, limits=LIMITS)
# Two unfinished responses of three tokens each. In both, the tokens were sampled with versions 0, 1
# and 1 of the weights, from rounds 0, 1 and 1.
GROUP = replace(
    group_of(7, rewards=(torch.nan, torch.nan), weights=[(0, 0), (1, 1), (1, 1)]),
    finished=torch.zeros(2, dtype=torch.bool),
)
ENGINE: Any = SimpleNamespace(version=1, round=1)


class Pieces:
    token_bytes = (b"x", b"a", b"b")


TOKENS: Any = Pieces()


def check(groups: Any, request: Request = REQUEST) -> None:
    check_groups("mine", ENGINE, [request], groups, TOKENS, vocab_size=10)


def changed(**fields: Any) -> RolloutGroup:
    return replace(GROUP, **fields)


def with_entry(name: str, value: float) -> RolloutGroup:
    """Return `GROUP` with `value` as the first entry of the field `name`."""
    field = getattr(GROUP, name).clone()
    field[0, 0] = value
    return changed(**{name: field})


def test_a_right_answer_passes():
    check([GROUP])


def longer(tokens: int) -> RolloutGroup:
    return group_of(7, rewards=(torch.nan, torch.nan), weights=[(1, 1)] * tokens)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "returned 0 groups for 1 requests"),
        (None, "returned NoneType for 1 requests"),
        (["text"], "generate returned a str instead of a RolloutGroup"),
        (
            [changed(prompt_index=8)],
            "the group belongs to prompt 8: return the groups in the order of the requests",
        ),
        ([changed(prompt_ids=torch.tensor([2]))], "prompt_ids differ from those of the request"),
        ([changed(example_index=3)], "example_index differs from that of the request"),
        ([longer(4)], "a response of 4 tokens exceeds the limit of 3"),
        ([longer(1)], "a response of 1 tokens is shorter than the minimum of 2"),
        (
            [changed(behaviour_log_probs=None)],
            "behaviour_log_probs is a NoneType, not a tensor",
        ),
        (
            [changed(behaviour_log_probs=torch.zeros(2, 2))],
            r"behaviour_log_probs is torch.float32 \(2, 2\), not torch.float32 \(2, 3\)",
        ),
        (
            [changed(response_ids=torch.zeros(2, 3))],
            r"response_ids is torch.float32 \(2, 3\), not torch.int64 \(2, 3\)",
        ),
        ([changed(finished=torch.ones(3, dtype=torch.bool))], r"finished is torch.bool \(3,\)"),
        ([with_entry("behaviour_log_probs", torch.nan)], "behaviour_log_probs are missing"),
        ([with_entry("behaviour_log_probs", 0.5)], "a log-prob of 0.5 is above 0"),
        (
            [with_entry("response_ids", 10)],
            "token ids range from 0 to 10, but must be at least 0 and below 10",
        ),
        (
            [with_entry("response_ids", -1)],
            "token ids range from -1 to 0, but must be at least 0 and below 10",
        ),
        (
            [with_entry("token_versions", 2)],
            "token_versions must be from 0 to 1, .* but are 0 to 2",
        ),
        ([with_entry("token_rounds", 2)], "token_rounds must be from 0 to 1, .* but are 0 to 2"),
    ],
)
def test_a_wrong_answer_is_named_in_one_line(answer: Any, message: str):
    with pytest.raises(EngineError, match=rf"^engine=mine: .*{message}") as caught:
        check(answer)
    assert "\n" not in str(caught.value)


def ended(row: int, token: int, **fields: Any) -> RolloutGroup:
    """Return `GROUP` with response `row` ended by an end id at position `token`."""
    ids, mask, finished = GROUP.response_ids.clone(), GROUP.response_mask.clone(), [False, False]
    ids[row, token], finished[row] = 9, True
    mask[row, token + 1 :] = False
    changes = {"response_ids": ids, "response_mask": mask, "finished": torch.tensor(finished)}
    return changed(**(changes | fields))


def test_a_log_prob_off_the_mask_is_refused():
    check([ended(1, 1)])
    log_probs = torch.full((2, 3), -1.0)
    with pytest.raises(EngineError, match="must be 0 where response_mask is false"):
        check([ended(1, 1, behaviour_log_probs=log_probs)])


WHOLE, NOBODY = GROUP.response_mask, GROUP.finished


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ended(1, 1, response_mask=WHOLE), "response 1 continues after token 2, which ends it"),
        (ended(0, 2, finished=NOBODY), "finished is False for response 0, but an end id or a"),
        (changed(finished=~NOBODY), "finished is True for response 0, but nothing ends it"),
        (
            ended(1, 1, response_ids=GROUP.response_ids, finished=NOBODY),
            "response 1 is cut off after 2 of 3 tokens",
        ),
    ],
)
def test_a_response_must_end_where_the_limits_say(answer: RolloutGroup, message: str):
    with pytest.raises(EngineError, match=rf"^engine=mine: prompt 7 of stream train: {message}"):
        check([answer])


def test_nothing_may_follow_a_stop_string():
    limits = replace(LIMITS, stop_strings=("ab",))
    request = replace(REQUEST, limits=limits)

    def answer(*rows: list[int], finished: list[bool]) -> None:
        group = changed(response_ids=torch.tensor(rows), finished=torch.tensor(finished))
        check([group], request)

    answer([0, 1, 2], [0, 0, 1], finished=[True, False])
    with pytest.raises(EngineError, match="response 1 continues after token 2, which ends it"):
        answer([0, 1, 2], [1, 2, 0], finished=[True, True])
    with pytest.raises(EngineError, match="finished is False for response 0, but an end id or"):
        answer([0, 1, 2], [0, 0, 1], finished=[False, False])


def test_an_engine_must_have_the_weights_that_it_was_given():
    weights = PolicyWeights(version=1, round=1, checksum="", tensors={})
    check_load("mine", ENGINE, weights)
    with pytest.raises(
        EngineError, match=r"after loading version 2 \(round 1\), it reports version 1"
    ):
        check_load("mine", ENGINE, replace(weights, version=2))


# ---- Building --------------------------------------------------------------------------------

MINE = """
    from grpo_trainable.engines.torch_engine import build_torch_engine

    class Mine:
        def __init__(self, setup):
            self.inner = build_torch_engine(setup)
            self.load = self.inner.load

        version = property(lambda self: self.inner.version)
        round = property(lambda self: self.inner.round)

        def generate(self, requests, between_tokens):
            return self.inner.generate(requests, between_tokens)

    class Short(Mine):
        def generate(self, requests, between_tokens):
            return super().generate(requests, between_tokens)[1:]

    class Broken:
        def __init__(self, setup):
            raise KeyError("apple")

    class Bare:
        def __init__(self, setup):
            self.version = 0
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(MINE))
    return path


def config_of(engine: str) -> GRPOConfig:
    rollout = {"prompts": 2, "group_size": 2, "max_new_tokens": 4}
    return GRPOConfig.from_dict({"engine": engine, "rollout": rollout})


def build(engine: str) -> Any:
    tokenizer = read_tokenizer(None)
    device = torch.device("cpu")
    return build_engine(EngineSetup(config=config_of(engine), tokenizer=tokenizer, device=device))


def test_the_engine_torch_is_in_the_table():
    assert isinstance(build("torch"), TorchEngine)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("Nothing", PluginError, "cannot be imported: AttributeError: .*Nothing"),
        ("Broken", EngineError, "cannot be built: KeyError: 'apple'"),
        ("Bare", EngineError, "lacks round, load, generate"),
    ],
)
def test_an_engine_that_cannot_be_used_is_one_line(
    mine: Path, name: str, kind: type[Exception], message: str
):
    with pytest.raises(kind, match=rf"^engine={mine}:{name}: {message}"):
        build(f"{mine}:{name}")


def generate(engine: str) -> list[RolloutGroup]:
    config = config_of(engine)
    prompts = Prompts(config, build_task(config), read_tokenizer(None))
    generator = Generator(config, InProcess())
    try:
        return generator.generate([prompts.request("train", i) for i in range(2)]).groups
    finally:
        generator.close()


@pytest.mark.slow
def test_a_users_engine_samples_in_the_generator(mine: Path):
    threads = torch.get_num_threads()
    ours, theirs = generate("torch"), generate(f"{mine}:Mine")
    torch.set_num_threads(threads)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.response_ids, other.response_ids)


def test_the_generator_refuses_a_wrong_answer(mine: Path):
    with pytest.raises(EngineError, match=r"mine.py:Short: returned 1 groups for 2 requests"):
        generate(f"{mine}:Short")
