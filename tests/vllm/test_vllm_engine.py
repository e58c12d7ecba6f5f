"""The engine vLLM: its samples, and the weights that it samples from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import agreeing
import pytest
import torch
from held import as_fused, held_weights
from hf_models import FAMILIES, tokenizer
from policies import Mailbox
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.engines.checks import check_groups
from grpo_trainable.engines.engine import EngineError, EngineSetup, build_engine
from grpo_trainable.engines.vllm import build, transfer
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import read_tokenizer
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
from grpo_trainable.tasks.prompts import Prompts, build_task

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
transformers = pytest.importorskip("transformers")

TOKENIZER = tokenizer()
CPU = torch.device("cpu")
PROMPTS = [
    "Write a story that includes the word: fox\n",
    "The fox",
    "The old fox slept.\nHome",
    "a",
]
# The tokenizer's end ids and further ids, so that many responses end early.
END_IDS = (*TOKENIZER.end_ids, *range(40, 120, 8))
LIMITS = SamplingLimits(min_new_tokens=3, max_new_tokens=20, temperature=1.3, end_ids=END_IDS)
APART: dict[str, Any] = {"placement": "disaggregated", "lag": 1}


def config_of(path: str | None, engine: str = "vllm", **values: Any) -> GRPOConfig:
    model = {"path": path, **values.pop("model", {})}
    sampling = {"prompts": 4, "group_size": 4, "max_new_tokens": 20, "temperature": 1.3}
    sampling |= values.pop("rollout", {})
    rest = {"eval": {"prompts": 4}, "rounds": 2, "seed": 5}
    return GRPOConfig.from_dict(
        {"engine": engine, **APART, "model": model, "rollout": sampling, **rest, **values}
    )


def engine_of(path: str | None, engine: str = "vllm", **values: Any) -> Any:
    config = config_of(path, engine, **values)
    setup = EngineSetup(config=config, tokenizer=read_tokenizer(path), device=CPU)
    return build_engine(setup)


def policy_of(path: str | None, **model: Any) -> Policy:
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
    check_groups("vllm", sampler, wanted, groups, TOKENIZER, vocab_size=320)
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
        temperature=limits.temperature or 1.0,
        min_new_tokens=limits.min_new_tokens,
        end_ids=limits.end_ids,
    )
    mask = batch.response_mask
    return batch.behaviour_log_probs[mask], log_probs[mask]


def assert_agree(
    policy: Policy, groups: Sequence[RolloutGroup], limits: SamplingLimits = LIMITS
) -> None:
    recorded, learner = recorded_and_scored(policy, groups, limits)
    torch.testing.assert_close(recorded, learner, rtol=0, atol=1e-4)


def assert_same_responses(one: Sequence[RolloutGroup], other: Sequence[RolloutGroup]) -> None:
    agreeing.assert_agree(one, other, atol=1e-4)


# ---- Sampling --------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_vllm_and_hf_record_the_log_probs_of_the_learner(model_path, family, tied):
    path = model_path(family, tied)
    for engine in ("vllm", "hf"):
        groups = generated(engine_of(path, engine), requests())
        lengths = torch.cat([group.response_mask.sum(dim=1) for group in groups])
        assert lengths.unique().numel() > 1
        assert_agree(policy_of(path), groups)


def test_the_shipped_policy_is_sampled_as_a_llama():
    usual = {"max_new_tokens": 60, "temperature": 0.8}
    config, sampler = config_of(None, rollout=usual), engine_of(None, rollout=usual)
    prompts = Prompts(config, build_task(config), read_tokenizer(None))
    groups = sampler.generate([prompts.request("train", i) for i in range(4)], lambda: None)
    limits = prompts.request("train", 0).limits
    assert_agree(policy_of(None), groups, limits)
    assert torch.cat([group.finished for group in groups]).any()


def test_a_bfloat16_model_is_sampled_with_a_float32_head(model_path):
    half = {"dtype": "bfloat16"}
    path = model_path("qwen3", False)
    difference = {}
    for name, model in (("wide", half), ("narrow", {**half, "head_fp32": False})):
        groups = generated(engine_of(path, model=model), requests())
        recorded, learner = recorded_and_scored(policy_of(path, **half), groups)
        difference[name] = float((recorded - learner).abs().mean())
    assert difference["wide"] < 0.03
    # Most of the difference is the body's rounding, which depends on how the CPU multiplies.
    assert difference["wide"] != difference["narrow"]
    assert difference["wide"] < 1.1 * difference["narrow"]


def test_responses_end_at_stop_strings_and_stay_the_same_until_there(model_path):
    sampler = engine_of(model_path())
    wanted = replace(LIMITS, stop_strings=("o", "fox"), temperature=2.0)
    whole = generated(sampler, requests(replace(wanted, stop_strings=())))
    stopped = generated(sampler, requests(wanted))
    begun = [ids for group in stopped for ids in group.responses()]
    agreeing.assert_agree_as_far(begun, [ids for group in whole for ids in group.responses()])
    finished = torch.cat([group.finished for group in stopped]).tolist()
    ends = zip(begun, finished, strict=True)
    assert sum(done and ids[-1] not in LIMITS.end_ids for ids, done in ends) > 3
    assert_agree(policy_of(model_path()), stopped, wanted)


TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def test_prompts_of_a_chat_template_are_sampled(model_path, tmp_path: Path):
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    path = model_path(max_position_embeddings=160)
    chat = {"chat_template": str(template), "system": "Be brief."}
    sampler, config = engine_of(path, model=chat), config_of(path, model=chat)
    prompts = Prompts(config, build_task(config), TOKENIZER)
    assert prompts.text("train", 0).startswith("[system] Be brief.\n[user] ")
    wanted = [prompts.request("train", index) for index in range(4)]
    assert_agree(policy_of(path), generated(sampler, wanted), wanted[0].limits)


def test_the_most_likely_tokens_have_log_probs_of_temperature_1(model_path):
    cold = replace(LIMITS, temperature=0.0)
    sampler = engine_of(model_path())
    groups = generated(sampler, requests(cold, group_size=1))
    assert_agree(policy_of(model_path()), groups, cold)
    greedy = engine_of(model_path(), "hf")
    assert_same_responses(groups, generated(greedy, requests(cold, group_size=1)))


def test_draws_are_keyed_by_seed_prompt_and_response(model_path):
    sampler = engine_of(model_path())
    first = generated(sampler, requests())
    assert_same_responses(first, generated(sampler, requests()))
    assert_same_responses(first, generated(sampler, requests()[::-1])[::-1])
    assert all(len({tuple(row) for row in g.response_ids.tolist()}) == 4 for g in first)
    other = generated(engine_of(model_path(), seed=6), requests())
    assert first[0].response_ids.tolist() != other[0].response_ids.tolist()


def test_more_rows_than_are_computed_at_once_wait_for_their_turn(model_path):
    small = {"prompts": 2, "unit_prompts": 1, "group_size": 2}
    sampler = engine_of(model_path(), rollout=small)
    groups = generated(sampler, requests())
    assert_same_responses(groups, generated(engine_of(model_path()), requests()))
    assert_agree(policy_of(model_path()), groups)


def test_a_call_that_breaks_off_leaves_nothing_behind(model_path):
    sampler = engine_of(model_path())
    whole = generated(sampler, requests())
    calls = iter(range(100))

    def fail() -> None:
        if next(calls) == 5:
            raise RuntimeError("the mailbox broke")

    with pytest.raises(RuntimeError, match="the mailbox broke"):
        sampler.generate(requests(), fail)
    assert not sampler.llm.llm_engine.has_unfinished_requests()
    assert_same_responses(whole, generated(sampler, requests()))


def test_a_prompt_that_vllm_was_not_started_for_is_refused(model_path):
    long = requests(replace(LIMITS, max_new_tokens=60), prompts=["The fox"])
    with pytest.raises(ValueError, match=r"60 new tokens do not fit .* that vLLM was started for"):
        engine_of(model_path()).generate(long, lambda: None)


# ---- Weights ---------------------------------------------------------------------------------


def snapshot_of(tensors: Mapping[str, Tensor], version: int) -> PolicyWeights:
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return PolicyWeights(
        version=version, round=version, checksum=storage_checksum(copies), tensors=copies
    )


def snapshot(path: str, version: int) -> PolicyWeights:
    return snapshot_of(policy_of(path).weights(), version)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True)])
def test_after_each_of_fifty_syncs_vllm_holds_the_tensors_that_were_sent(model_path, family, tied):
    sampler = engine_of(model_path(family, tied))
    tensors = policy_of(model_path(family, tied)).weights()
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for version in range(1, 51):
        tensors = {
            name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in tensors.items()
        }
        sampler.load(snapshot_of(tensors, version))
        digest = storage_checksum(held_weights(sampler.llm))
        assert digest == storage_checksum(as_fused(transfer.untied(tensors)))
        seen.add(digest)
        if version % 10 == 0:
            group = generated(sampler, requests(prompts=PROMPTS[:1]))[0]
            assert set(group.token_versions[group.response_mask].tolist()) == {version}
    assert len(seen) == 50


def test_what_it_sampled_before_does_not_stay_in_its_cache(model_path):
    # This prompt fills several blocks of the cache, which its responses share.
    long = [text * 3 for text in PROMPTS[:1]]
    limits = replace(LIMITS, max_new_tokens=4)
    sampler = engine_of(model_path(max_position_embeddings=160), rollout={"max_new_tokens": 90})
    other = model_path(max_position_embeddings=160, seed=1)
    generated(sampler, requests(limits, long))
    sampler.load(snapshot(other, version=1))
    assert_agree(policy_of(other), generated(sampler, requests(limits, long)), limits)


def test_weights_in_lower_precision_arrive(model_path):
    tensors = policy_of(model_path(seed=1)).weights()
    half = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    sampler = engine_of(model_path())
    sampler.load(snapshot_of(half, version=2))
    wide = {name: tensor.float() for name, tensor in half.items()}
    expected = storage_checksum(as_fused(transfer.untied(wide)))
    assert storage_checksum(held_weights(sampler.llm)) == expected


def test_torn_weights_are_refused(model_path):
    sampler, weights = engine_of(model_path()), snapshot(model_path(seed=1), version=3)
    weights.tensors["model.layers.1.mlp.up_proj.weight"][3, 3] += 1
    with pytest.raises(RuntimeError, match="weights version 3 arrived corrupted"):
        sampler.load(weights)


def test_weights_that_do_not_fill_the_model_are_refused(model_path):
    sampler, tensors = engine_of(model_path()), policy_of(model_path(seed=1)).weights()
    del tensors["model.norm.weight"]
    with pytest.raises(RuntimeError, match=r"version 3 have no value for model\.norm\.weight"):
        sampler.load(snapshot_of(tensors, version=3))


def test_a_head_that_no_weights_reach_is_noticed(model_path, monkeypatch):
    from grpo_trainable.engines.vllm import worker

    # Without our overrides, vLLM keeps the packed copy of a tied head's first weights.
    monkeypatch.setattr(build, "_overrides", lambda config, dtype: {})
    monkeypatch.setattr(transfer, "untied", dict)
    with pytest.raises(EngineError, match=r"version 0 have no value for lm_head\.weight of vLLM's"):
        engine_of(model_path("qwen2", True))

    def load(model: Any, weights: PolicyWeights, renamed: Any) -> None:
        model.load_weights(iter(weights.tensors.items()))

    monkeypatch.setattr(worker, "load_snapshot", load)
    with pytest.raises(EngineError, match=r"log-probs differ from the learner's by \d\.\d+ nats"):
        engine_of(model_path("qwen2", True))


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
    """Return log-probs of a response, one token at a time through the weights of `SWAPS`.

    A single cache, without padding, is used throughout and never rebuilt.
    """
    model: Any = policy_of(model_path()).model
    cache = transformers.DynamicCache()
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


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True)])
def test_a_model_divided_between_two_processes_gets_every_snapshot(
    model_path, monkeypatch, family, tied
):
    """On GPUs, each process has its own GPU. On CPUs, the processes share the cores."""
    monkeypatch.setattr(build, "_workers", lambda setup: 2)
    # A snapshot does not fit into the shared memory of vLLM's queue, as with real models.
    monkeypatch.setenv("VLLM_MQ_MAX_CHUNK_BYTES_MB", "1")
    path = model_path(family, tied, num_key_value_heads=2, intermediate_size=1536)
    sampler, policy = engine_of(path), policy_of(path)
    assert_agree(policy, generated(sampler, requests()))
    generator = torch.Generator().manual_seed(1)
    for version in (1, 2):
        with torch.no_grad():
            for tensor in policy.weights().values():
                tensor += 0.02 * torch.randn(tensor.shape, generator=generator)
        before = generated(sampler, requests())
        sampler.load(snapshot_of(policy.weights(), version))
        groups = generated(sampler, requests())
        versions = torch.cat([group.token_versions[group.response_mask] for group in groups])
        assert set(versions.tolist()) == {version}
        assert_agree(policy, groups)
        recorded, learner = recorded_and_scored(policy, before)
        assert (recorded - learner).abs().max() > 1e-2
    torn = snapshot_of(policy.weights(), 3)
    torn.tensors["model.layers.1.mlp.up_proj.weight"][3, 3] += 1
    with pytest.raises(RuntimeError, match="weights version 3 arrived corrupted"):
        sampler.load(torn)
    assert_agree(policy, generated(sampler, requests()))


def test_after_sleep_it_samples_the_same_and_takes_new_weights(model_path):
    """On CPUs, vLLM keeps its memory while it sleeps, but refuses to sample until it wakes."""
    sampler = engine_of(model_path())
    whole = generated(sampler, requests())
    sampler.sleep()
    sampler.sleep()
    assert sampler.llm.llm_engine.is_sleeping()
    assert_same_responses(whole, generated(sampler, requests()))
    sampler.sleep()
    other = model_path(seed=1)
    sampler.load(snapshot(other, version=1))
    assert not sampler.llm.llm_engine.is_sleeping()
    assert_agree(policy_of(other), generated(sampler, requests()))


@pytest.mark.parametrize("family", [None, "qwen2"])
def test_a_float32_policy_is_sampled_in_bfloat16(model_path, family):
    path = family and model_path(family)
    sampler = engine_of(path, model={"sampler_dtype": "bfloat16"})
    assert sampler.llm.llm_engine.vllm_config.model_config.dtype == torch.bfloat16
    groups = sampler.generate(requests(prompts=["The fox", "a"]), lambda: None)
    recorded, learner = recorded_and_scored(policy_of(path), groups)
    assert 1e-4 < (recorded - learner).abs().mean() < 0.1


def test_vllm_for_cpus_is_refused_for_a_generator_with_a_gpu(model_path):
    path = model_path()
    config = config_of(path, resources={"generator_gpus": 1})
    setup = EngineSetup(config=config, tokenizer=read_tokenizer(path), device=torch.device("cuda"))
    with pytest.raises(EngineError, match="sampling needs a GPU here, but the installed vLLM"):
        build_engine(setup)


class Eavesdropper:
    """A wrapper of vLLM's engine that records which versions sampled each finished output."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.spans: list[list[tuple[int, int, str]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Any]:
        outputs = self._engine.step()
        for output in outputs:
            if output.finished:
                spans = output.outputs[0].weight_versions
                self.spans.append([(span.start, span.end, span.version) for span in spans])
        return outputs


@pytest.mark.parametrize("weight_update", ["in_flight", "interrupt_recompute"])
def test_the_versions_that_vllm_notes_are_ours(model_path, weight_update):
    sampler = engine_of(model_path(), weight_update=weight_update)
    sampler._engine = heard = Eavesdropper(sampler._engine)
    groups = generated(sampler, requests(), swapping(sampler, model_path))
    noted = sorted([int(v) for a, b, v in spans for _ in range(a, b)] for spans in heard.spans)
    ours = [
        versions[mask].tolist()
        for group in groups
        for versions, mask in zip(group.token_versions, group.response_mask, strict=True)
    ]
    assert noted == sorted(ours)
    assert any(len(spans) == 4 for spans in heard.spans)


def test_another_version_than_ours_is_refused(model_path):
    sampler = engine_of(model_path())

    def mislead() -> None:
        sampler.llm.llm_engine.set_weight_version("7")

    with pytest.raises(EngineError, match=r"vLLM sampled with versions \['7', .* used \['0'"):
        sampler.generate(requests(), mislead)


def test_adapters_are_sampled_from_as_they_are_trained(model_path):
    config = config_of(model_path(), model={"lora_rank": 4}, optim={"lr": 5e-2})
    transport = Mailbox()
    learner, sampler = Learner(config, transport), engine_of(model_path(), model={"lora_rank": 4})
    groups = [
        replace(group, rewards=torch.rand(4, generator=torch.Generator().manual_seed(i)))
        for i, group in enumerate(generated(sampler, requests()))
    ]
    learner.update([groups])
    sampler.load(transport.fetch(learner.publish().handle))
    trained = generated(sampler, requests())
    assert_agree(learner.policy, trained)
    recorded, before = recorded_and_scored(policy_of(model_path()), trained)
    assert (recorded - before).abs().max() > 1e-2
