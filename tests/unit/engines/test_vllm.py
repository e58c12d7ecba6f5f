"""The parts of the vLLM engine that do not need vLLM; tests/vllm covers the rest."""

from __future__ import annotations

import pytest
import torch

from grpo_trainable.config.engine_catalog import ENGINES
from grpo_trainable.engines.vllm.process import CacheShape
from grpo_trainable.engines.vllm.transfer import load_snapshot, untied
from grpo_trainable.models.sampling import response_seed
from grpo_trainable.protocol.checksums import storage_checksum
from grpo_trainable.protocol.rollout import PolicyWeights

TENSORS = {"model.embed_tokens.weight": torch.ones(4, 2), "model.norm.weight": torch.zeros(2)}


class Model:
    """A model with the given parameter names."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self.got: dict[str, torch.Tensor] = {}

    def named_parameters(self):
        return [(name, None) for name in self._names]

    def load_weights(self, weights) -> set[str]:
        self.got = dict(weights)
        return set(self.got) & set(self._names)


def snapshot(**changes) -> PolicyWeights:
    values = {"version": 3, "round": 1, "checksum": storage_checksum(TENSORS), "tensors": TENSORS}
    return PolicyWeights(**{**values, **changes})


def test_a_tied_head_is_sent_as_one_of_its_own():
    model = Model(*TENSORS, "lm_head.weight")
    load_snapshot(model, snapshot(), dict)
    assert model.got.keys() == {*TENSORS, "lm_head.weight"}
    assert model.got["lm_head.weight"] is TENSORS["model.embed_tokens.weight"]
    own = {**TENSORS, "lm_head.weight": torch.full((4, 2), 7.0)}
    assert untied(own)["lm_head.weight"] is own["lm_head.weight"]
    with pytest.raises(
        ValueError, match=r"^the model has neither lm_head\.weight nor model\.embed"
    ):
        untied({"transformer.wte.weight": torch.ones(4, 2)})


def test_torn_weights_and_weights_with_a_gap_are_refused():
    with pytest.raises(RuntimeError, match="weights version 3 arrived corrupted: checksum"):
        load_snapshot(Model(*TENSORS), snapshot(checksum="0" * 16), dict)
    with pytest.raises(RuntimeError, match=r"weights version 3 have no value for model\.more"):
        load_snapshot(Model(*TENSORS, "model.more"), snapshot(), dict)


def test_the_cache_holds_whole_blocks_of_every_row():
    shape = CacheShape(layers=4, heads=2, head_dim=32, itemsize=4)
    # The 33 tokens of a row need two blocks of 32. vLLM takes two more blocks for all rows
    # together. Each token stores keys and values.
    assert shape.bytes(rows=3, tokens=33) == (3 * 2 + 2) * 32 * (2 * 4 * 2 * 32 * 4)


def test_seeds_differ_by_everything_that_names_a_draw():
    keys = [
        (seed, stream, prompt, response)
        for seed in (0, 1)
        for stream in ("train", "eval")
        for prompt in (0, 1, 9)
        for response in (0, 1, 2)
    ]
    seeds = {response_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert response_seed(5, "train", 3, 1) == response_seed(5, "train", 3, 1)


def test_an_engine_that_is_not_installed_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = ENGINES["vllm"].missing()
    assert missing is not None
    assert missing.startswith("the library vllm is not installed; run: pip install -e '.[vllm]'")


def test_what_vllm_promises_is_less_than_what_our_own_engines_do():
    promises = {name: (record.same_bits, record.log_prob_error) for name, record in ENGINES.items()}
    ours = dict.fromkeys(("torch", "hf", "control"), (True, 1e-4))
    assert promises == {**ours, "vllm": (False, None)}
    assert ENGINES["vllm"].promise == (
        "different tokens after a resume, log-probs compared with the learner's at the start"
    )
