"""The engine of Hugging Face models: its samples, and the weights that it samples from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from agreeing import assert_agree, assert_agree_as_far, assert_same_bits
from hf_models import FAMILIES, tokenizer, write_hf_model
from policies import Mailbox
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.engines import rows
from grpo_trainable.engines.checks import check_groups
from grpo_trainable.engines.engine import EngineSetup, build_engine
from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.policy import Policy
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.models.store import build_policy
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import (
    PolicyWeights,
    Request,
    RolloutGroup,
    SamplingLimits,
    collate,
)

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.numerics

TOKENIZER = tokenizer()
CPU = torch.device("cpu")
PROMPTS = [
    "Write a story that includes the word: fox\n",
    "The fox",
    "The old fox slept.\nHome",
    "a",
]
LIMITS = SamplingLimits(
    min_new_tokens=3, max_new_tokens=20, temperature=1.3, end_ids=TOKENIZER.end_ids
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that makes a model once for each set of arguments."""
    made: dict[str, str] = {}

    def path(family: str = "qwen2", tied: bool = True, seed: int = 0, **config: Any) -> str:
        key = repr((family, tied, seed, config))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            made[key] = write_hf_model(directory, family, tied=tied, seed=seed, **config)
        return made[key]

    return path


def engine_of(path: str, *, seed: int = 5, weight_update: str = "between_batches", **model: Any):
    apart = {"placement": "disaggregated", "lag": 1, "weight_update": weight_update}
    config = GRPOConfig.from_dict({"seed": seed, "model": {"path": path, **model}, **apart})
    return build_engine(EngineSetup(config=config, tokenizer=TOKENIZER, device=CPU))


def policy_of(path: str, **model: Any) -> Policy:
    return build_policy(GRPOConfig.from_dict({"model": {"path": path, **model}}).model, 0)[0]


def requests(
    limits: SamplingLimits = LIMITS, prompts: Sequence[str] = PROMPTS, group_size: int = 4
) -> list[Request]:
    return [
        Request(
            stream="train",
            prompt_index=index,
            prompt_ids=tuple(TOKENIZER.encode(prompt)),
            group_size=group_size,
            limits=limits,
        )
        for index, prompt in enumerate(prompts)
    ]


def generated(
    sampler: Any, wanted: Sequence[Request], between_tokens: Callable[[], None] = lambda: None
) -> list[RolloutGroup]:
    groups = sampler.generate(wanted, between_tokens)
    check_groups("hf", sampler, wanted, groups, TOKENIZER, vocab_size=320)
    return groups


@torch.no_grad()
def recorded_and_scored(
    policy: Policy, groups: Sequence[RolloutGroup], limits: SamplingLimits = LIMITS
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of all response tokens, as sampled and as the learner computes them."""
    batch = collate(groups, [torch.zeros(len(g.rewards)) for g in groups], TOKENIZER.pad_id)
    log_probs, _ = response_log_probs(
        policy,
        batch.input_ids,
        batch.target_ids,
        batch.response_mask,
        temperature=limits.temperature,
        min_new_tokens=limits.min_new_tokens,
        end_ids=limits.end_ids,
    )
    mask = batch.response_mask
    return batch.behaviour_log_probs[mask], log_probs[mask]


# ---- Sampling --------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_recorded_log_probs_are_those_of_the_learner(model_path, family, tied):
    path = model_path(family, tied)
    groups = generated(engine_of(path), requests())
    lengths = torch.cat([group.response_mask.sum(dim=1) for group in groups])
    assert lengths.unique().numel() > 1
    recorded, learner = recorded_and_scored(policy_of(path), groups)
    torch.testing.assert_close(recorded, learner, rtol=0, atol=1e-4)


def test_a_window_of_attention_moves_over_the_tokens_of_a_row_and_not_over_padding(model_path):
    path = model_path("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=0)
    groups = generated(engine_of(path), requests())
    recorded, learner = recorded_and_scored(policy_of(path), groups)
    torch.testing.assert_close(recorded, learner, rtol=0, atol=1e-4)
    recorded, whole = recorded_and_scored(policy_of(model_path("qwen2")), groups)
    assert (recorded - whole).abs().max() > 1e-2  # the sliding window makes a difference


def test_a_prompt_is_run_once_and_padding_makes_no_difference(model_path):
    sampler = engine_of(model_path())
    seen: list[tuple[int, ...]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(tuple(kwargs["input_ids"].shape))

    hook = sampler.policy.body.register_forward_pre_hook(note, with_kwargs=True)
    together = generated(sampler, requests())
    hook.remove()
    assert seen[0] == (4, max(len(r.prompt_ids) for r in requests()))
    assert seen[1] == (16, 1)
    alone = [generated(sampler, [request])[0] for request in requests()]
    assert_agree(together, alone, atol=1e-5)


def test_responses_end_at_stop_strings_and_stay_the_same_until_there(model_path):
    wanted = replace(LIMITS, stop_strings=("o", "fox"), temperature=2.0)
    whole = generated(engine_of(model_path()), requests(replace(wanted, stop_strings=())))
    stopped = generated(engine_of(model_path()), requests(wanted))
    begun = [ids for group in stopped for ids in group.responses()]
    assert_agree_as_far(begun, [ids for group in whole for ids in group.responses()])
    finished = torch.cat([group.finished for group in stopped]).tolist()
    ends = zip(begun, finished, strict=True)
    assert sum(done and ids[-1] not in LIMITS.end_ids for ids, done in ends) > 3
    recorded, learner = recorded_and_scored(policy_of(model_path()), stopped, wanted)
    torch.testing.assert_close(recorded, learner, rtol=0, atol=1e-4)


def test_the_same_chunk_gives_the_same_bits_and_another_seed_other_responses(model_path):
    first = generated(engine_of(model_path()), requests())
    assert_same_bits(first, generated(engine_of(model_path()), requests()))
    other = generated(engine_of(model_path(), seed=6), requests())
    assert any(
        a.response_ids.tolist() != b.response_ids.tolist()
        for a, b in zip(first, other, strict=True)
    )


@pytest.mark.parametrize("compact_below", [0.0, 1.0])
def test_dropping_finished_rows_changes_nothing(model_path, monkeypatch, compact_below):
    wanted = requests(replace(LIMITS, stop_strings=("o", "e"), temperature=2.0))
    usual = generated(engine_of(model_path()), wanted)
    assert torch.cat([group.finished for group in usual]).float().mean() > 0.3
    monkeypatch.setattr(rows, "COMPACT_BELOW", compact_below)
    assert_agree(usual, generated(engine_of(model_path()), wanted), atol=1e-5)


def test_a_prompt_that_leaves_no_room_is_refused(model_path):
    long = requests(replace(LIMITS, max_new_tokens=63), prompts=["The fox"])
    with pytest.raises(ValueError, match="63 new tokens do not fit the context of 64"):
        generated(engine_of(model_path()), long)


# ---- Weights ---------------------------------------------------------------------------------


def snapshot(path: str, version: int) -> PolicyWeights:
    tensors = {name: t.detach().clone() for name, t in policy_of(path).weights().items()}
    return PolicyWeights(
        version=version, round=version, checksum=storage_checksum(tensors), tensors=tensors
    )


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True)])
def test_loaded_weights_are_used_in_place_head_included(model_path, family, tied):
    other = model_path(family, tied, seed=1)
    sampler, weights = engine_of(model_path(family, tied)), snapshot(other, version=3)
    generated(sampler, requests())  # the load must replace anything that is packed here
    sampler.load(weights)
    for name, parameter in sampler.policy.weights().items():
        assert parameter.data_ptr() == weights.tensors[name].data_ptr()
    groups = generated(sampler, requests())
    assert {int(v) for g in groups for v in g.token_versions[g.response_mask]} == {3}
    assert_agree(groups, generated(engine_of(other), requests()), atol=1e-5)


def test_a_bfloat16_model_samples_with_the_head_of_the_weights_it_has(model_path):
    half: dict[str, Any] = {"dtype": "bfloat16"}
    sampler = engine_of(model_path(), **half)
    generated(sampler, requests())
    tensors = policy_of(model_path(seed=1), **half).weights()
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    sampler.load(
        PolicyWeights(version=1, round=1, checksum=storage_checksum(copies), tensors=copies)
    )
    groups = generated(sampler, requests())
    assert_agree(groups, generated(engine_of(model_path(seed=1), **half), requests()), atol=1e-5)
    recorded, learner = recorded_and_scored(policy_of(model_path(seed=1), **half), groups)
    assert (recorded - learner).abs().mean() < 0.02  # this is rounding in the body, not in the head


def test_torn_weights_are_refused(model_path):
    sampler, weights = engine_of(model_path()), snapshot(model_path(seed=1), version=3)
    name = "model.layers.1.mlp.up_proj.weight"
    weights.tensors[name][3, 3] += 1
    with pytest.raises(RuntimeError, match="weights version 3 arrived corrupted"):
        sampler.load(weights)


# Index of a token -> version of the weights that arrive before this token. The version is also the
# seed of these weights.
SWAPS = {4: 1, 9: 2, 10: 3}


def swapping(sampler: Any, model_path: Callable[..., str]) -> Callable[[], None]:
    """Return a callback that loads each version in `SWAPS` before its token."""
    calls = 0

    def between_tokens() -> None:
        nonlocal calls
        if calls in SWAPS:
            sampler.load(snapshot(model_path(seed=SWAPS[calls]), SWAPS[calls]))
        calls += 1

    return between_tokens


def test_recomputing_every_token_has_the_log_prob_of_its_own_version(model_path):
    sampler = engine_of(model_path(), weight_update="interrupt_recompute")
    groups = generated(sampler, requests(), swapping(sampler, model_path))
    versions = torch.cat([g.token_versions[g.response_mask] for g in groups])
    assert set(versions.tolist()) == {0, 1, 2, 3}
    for version in range(4):
        recorded, learner = recorded_and_scored(policy_of(model_path(seed=version)), groups)
        mine = versions == version
        torch.testing.assert_close(recorded[mine], learner[mine], rtol=0, atol=1e-4)
        assert not torch.isclose(recorded[~mine], learner[~mine], atol=1e-3).all()


def replayed(request: Request, response: Sequence[int], model_path: Callable) -> list[float]:
    """Return log-probs of a response, computed token by token with the weights of `SWAPS`.

    A single cache, without padding, is used throughout and never rebuilt.
    """
    model, cache = policy_of(model_path()).model, transformers.DynamicCache()
    for token in request.prompt_ids[:-1]:
        model(torch.tensor([[token]]), past_key_values=cache)
    log_probs, last = [], request.prompt_ids[-1]
    for t, token in enumerate(response):
        if t in SWAPS:
            model = policy_of(model_path(seed=SWAPS[t])).model
        logits = model(torch.tensor([[last]]), past_key_values=cache).logits[0, -1]
        if t < LIMITS.min_new_tokens - 1:
            logits[list(LIMITS.end_ids)] = -torch.inf
        log_probs.append(float((logits / LIMITS.temperature).log_softmax(-1)[token]))
        last = token
    return log_probs


@torch.no_grad()
def test_keeping_the_cache_every_token_has_the_log_prob_of_a_replay(model_path):
    sampler = engine_of(model_path(), weight_update="in_flight")
    wanted = requests(group_size=2)
    groups = generated(sampler, wanted, swapping(sampler, model_path))
    for request, group in zip(wanted, groups, strict=True):
        for row, mask in enumerate(group.response_mask):
            response = group.response_ids[row][mask].tolist()
            expected = replayed(request, response, model_path)
            recorded = group.behaviour_log_probs[row][mask].tolist()
            assert recorded == pytest.approx(expected, abs=1e-4)


def test_adapters_are_sampled_from_as_they_are_trained(model_path):
    pytest.importorskip("peft")
    config = GRPOConfig.from_dict(
        {
            "model": {"path": model_path(), "lora_rank": 4},
            "rollout": {"prompts": 4, "group_size": 4, "max_new_tokens": 20},
            "optim": {"lr": 5e-2},
        }
    )
    transport = Mailbox()
    learner, sampler = Learner(config, transport), engine_of(model_path())
    groups = [
        replace(group, rewards=torch.rand(4, generator=torch.Generator().manual_seed(i)))
        for i, group in enumerate(generated(sampler, requests()))
    ]
    learner.update([groups])
    sampler.load(transport.fetch(learner.publish().handle))
    trained = generated(sampler, requests())
    recorded, scored = recorded_and_scored(learner.policy, trained)
    torch.testing.assert_close(recorded, scored, rtol=0, atol=1e-4)
    recorded, before = recorded_and_scored(policy_of(model_path()), trained)
    assert (recorded - before).abs().max() > 1e-2


@torch.no_grad()
def small_update(policy: Policy) -> None:
    """Set the matrix B of every adapter to ±1e-4, as a few steps at a usual learning rate would."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.trained().items():
        if "lora_B" in name:
            parameter.copy_(1e-4 * torch.sign(torch.randn(parameter.shape, generator=generator)))


def test_a_small_update_of_adapters_reaches_the_sampler_of_a_bfloat16_body(model_path):
    """If the update were merged into bfloat16 weights, 94 % of it would be lost to rounding."""
    pytest.importorskip("peft")
    model = {"path": model_path(), "lora_rank": 4, "dtype": "bfloat16"}
    config = GRPOConfig.from_dict({"model": model})
    transport = Mailbox()
    learner, sampler = Learner(config, transport), engine_of(**model)
    before = transport.fetch(learner.publish().handle)
    small_update(learner.policy)
    published = transport.fetch(learner.publish().handle)
    sampler.load(published)
    # Only trained tensors have changed, and the sampler has their exact values.
    changed = {n for n, t in published.tensors.items() if not t.equal(before.tensors[n])}
    assert changed == {name for name in published.tensors if "lora_B" in name}
    standing = sampler.policy.weights()
    for name, tensor in learner.policy.trained().items():
        assert standing[name].equal(tensor)
    ids = torch.arange(2, 42).view(2, 20)
    ours, theirs = (p.hidden_states(ids) for p in (sampler.policy, learner.policy))
    assert ours.equal(theirs)


# ---- Choice of the engine --------------------------------------------------------------------


def test_auto_is_the_engine_that_suits_the_policy(model_path):
    assert type(engine_of(model_path())).__name__ == "HFEngine"
    ours = GRPOConfig()
    assert ours.engine == "auto"
    built = build_engine(EngineSetup(config=ours, tokenizer=TOKENIZER, device=CPU))
    assert isinstance(built, TorchEngine)


@pytest.mark.parametrize(
    ("engine", "is_hf", "message"),
    [
        (
            "torch",
            True,
            r"this engine samples from a policy of this package, but model.path=.* is a Hugging",
        ),
        (
            "hf",
            False,
            r"this engine samples from a Hugging Face model, but model.path=none is a policy of",
        ),
    ],
)
def test_an_engine_that_does_not_suit_the_policy_is_refused(model_path, engine, is_hf, message):
    model = {"path": model_path()} if is_hf else {}
    config = GRPOConfig.from_dict({"engine": engine, "model": model})
    valid = r"auto, {} \(repeats bit for bit.*\), vllm \(different tokens.*\)".format(
        "hf" if is_hf else "torch"
    )
    with pytest.raises(ValueError, match=rf"^engine={engine}: {message}.*; valid: {valid}$"):
        build_engine(EngineSetup(config=config, tokenizer=TOKENIZER, device=CPU))
