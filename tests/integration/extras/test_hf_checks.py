"""The checks that the engine `hf` makes itself, whatever was checked before it was built."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import write_hf_model
from scripted import Scripted
from test_hf_engine import CPU, LIMITS, TOKENIZER, policy_of, requests

from grpo_trainable.config import GRPOConfig
from grpo_trainable.engines import selection
from grpo_trainable.engines.engine import EngineError, EngineSetup, build_engine
from grpo_trainable.models.shape import PolicyShape

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.numerics

# These modules need transformers.
hf_cache: Any = importlib.import_module("grpo_trainable.engines.hf.cache")
hf_engine: Any = importlib.import_module("grpo_trainable.engines.hf.engine")
hf_policy: Any = importlib.import_module("grpo_trainable.models.hf.policy")

WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "eos_token_id": TOKENIZER.eos_id,
}
# The engine checks a model with nine tokens, so it notices a window of six.
LOCAL: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 6,
}
DIFFERENT = "computes different logits with a cache and padding than in one pass"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_hf_model(tmp_path_factory.mktemp("llama"), "llama")


def built(policy: Any, *, plays: bool) -> Any:
    return hf_engine.HFEngine(policy, TOKENIZER, seed=0, plays=plays)


def random_policy(config: Any) -> Any:
    """Return a policy with random weights, large enough that each token depends on the others."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    return hf_policy.HFPolicy(model, PolicyShape(context_length=64, vocab_size=320))


def failing(path: str, kind: str, error: Exception) -> Any:
    """Return a policy that fails on a cache whose layers are instances of `kind`."""
    policy: Any = policy_of(path)
    of_kind = getattr(hf_cache, kind)

    def fail(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get(hf_cache.cache_argument(module))
        if cache is not None and isinstance(cache.layers[0], of_kind):
            raise error

    policy.body.register_forward_pre_hook(fail, with_kwargs=True)
    return policy


# ---- Before the first call -------------------------------------------------------------------


def test_a_model_without_a_cache_is_refused():
    policy = random_policy(transformers.OpenAIGPTConfig(**SHAPE, n_layer=2, n_head=4))
    with pytest.raises(ValueError, match=f"^OpenAIGPTLMHeadModel {DIFFERENT}"):
        built(policy, plays=False)


def test_a_window_that_moves_over_unwritten_columns_is_refused_for_episodes():
    policy = random_policy(transformers.GPTNeoConfig(**SHAPE, **LOCAL, max_position_embeddings=64))
    built(policy, plays=False)
    with pytest.raises(ValueError, match=f"^GPTNeoForCausalLM {DIFFERENT}"):
        built(policy, plays=True)


@pytest.mark.parametrize("error", [AttributeError, NotImplementedError, TypeError])
def test_a_model_that_cannot_use_our_cache_is_refused_in_one_line(path: str, error: Any):
    policy = failing(path, "PreallocatedLayer", error("no\nsuch cache"))
    message = r"^LlamaForCausalLM has an unsupported kind of cache \(\w+: no such cache\)$"
    with pytest.raises(ValueError, match=message):
        built(policy, plays=False)


def test_a_model_that_cannot_use_our_cache_for_episodes_is_refused_for_episodes(path: str):
    policy = failing(path, "EpisodeLayer", TypeError("no such cache"))
    built(policy, plays=False)
    with pytest.raises(ValueError, match="has an unsupported kind of cache"):
        built(policy, plays=True)


def test_a_trial_of_episodes_asks_for_the_check_of_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(selection, "attention_limit", lambda directory: None)
    model = {"path": write_hf_model(tmp_path, "qwen2", **WINDOWS)}
    config = GRPOConfig.from_dict({"model": model})
    build_engine(EngineSetup(config=config, tokenizer=TOKENIZER, device=CPU))
    of_episodes = GRPOConfig.from_dict({"model": model, "env": {"name": "my:Env"}})
    with pytest.raises(
        EngineError,
        match=r"^engine=hf: cannot be built: ValueError: episodes need a cache that keeps every "
        "token, but a layer of this model has a DynamicSlidingWindowLayer$",
    ):
        build_engine(EngineSetup(config=of_episodes, tokenizer=TOKENIZER, device=CPU))


# ---- At the beginning of a call --------------------------------------------------------------


def test_episodes_that_may_outgrow_the_context_are_refused(path: str):
    engine = built(policy_of(path), plays=True)
    long = requests(replace(LIMITS, max_new_tokens=63), prompts=["The fox"])
    with pytest.raises(ValueError, match="63 new tokens do not fit the context of 64"):
        engine.play(long, lambda: None, Scripted())


def test_episodes_without_a_prompt_are_refused(path: str):
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        built(policy_of(path), plays=True).play(
            [replace(requests()[0], prompt_ids=())], lambda: None, Scripted()
        )


def test_episodes_of_one_call_share_their_limits(path: str):
    others = requests(replace(LIMITS, max_new_tokens=5))
    with pytest.raises(ValueError, match="requests of one call must share their limits"):
        built(policy_of(path), plays=True).play([*requests(), *others], lambda: None, Scripted())


def test_rows_are_selected_only_after_prompts_are_written():
    layer = hf_cache.EpisodeLayer(4, hf_cache.Places())
    with pytest.raises(AssertionError, match="prompts are written before rows are selected"):
        layer.batch_select_indices(torch.tensor([0]))
