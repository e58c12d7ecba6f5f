"""Models of transformers as policies, without Ray: scored, trained, published and stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FAMILIES, VOCAB_SIZE, tokenizer, write_hf_model, write_json_files
from policies import Mailbox
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.models.parameters import copy_parameters
from grpo_trainable.models.policy import Policy
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.models.store import build_adapted_policy, build_policy, build_trained_policy
from grpo_trainable.protocol.rollout import RolloutGroup, TrainBatch, by_group, collate

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

pytestmark = pytest.mark.numerics

LAW = {"temperature": 0.8, "min_new_tokens": 3, "end_ids": tokenizer().end_ids}
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that makes a model of a family, only once per family."""
    made: dict[tuple[str, bool], str] = {}

    def path(family: str = "qwen2", tied: bool = True) -> str:
        if (family, tied) not in made:
            directory = tmp_path_factory.mktemp(family)
            made[family, tied] = write_hf_model(directory, family, tied=tied)
        return made[family, tied]

    return path


def config_of(path: str, **model: Any) -> GRPOConfig:
    return GRPOConfig.from_dict(
        {
            "rounds": 10,
            "model": {"path": path, **model},
            "rollout": {
                "prompts": 3,
                "group_size": 4,
                "min_new_tokens": LAW["min_new_tokens"],
                "max_new_tokens": 12,
                "temperature": LAW["temperature"],
            },
            "optim": {"lr": 1e-3, "microbatch": 5},
        }
    )


def made_up_groups(seed: int = 0) -> list[RolloutGroup]:
    """Return a group of four responses for each of three prompts.

    The prompts have different lengths, and so have the responses to a prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    first, last = 2, tokenizer().vocab_size
    groups = []
    for index, length in enumerate((3, 9, 5)):
        mask = torch.arange(12) < torch.tensor([12, 3, 7, 9])[:, None]
        ids = torch.randint(first, last, (4, 12), generator=generator)
        groups.append(
            RolloutGroup(
                prompt_index=index,
                prompt_ids=torch.randint(first, last, (length,), generator=generator),
                response_ids=ids.where(mask, tokenizer().pad_id),
                response_mask=mask,
                behaviour_log_probs=torch.zeros(4, 12),
                rewards=torch.rand(4, generator=generator),
                finished=torch.zeros(4, dtype=torch.bool),
                token_versions=torch.zeros(4, 12, dtype=torch.int32),
                token_rounds=torch.zeros(4, 12, dtype=torch.int32),
            )
        )
    return groups


def batch_of(groups: Sequence[RolloutGroup]) -> TrainBatch:
    return collate(groups, [torch.ones(4)] * len(groups), tokenizer().pad_id)


def scored(policy: Policy, batch: TrainBatch) -> Tensor:
    """Return the log-probs (B, S) of a batch."""
    arguments = (batch.input_ids, batch.target_ids, batch.response_mask)
    return response_log_probs(policy, *arguments, **LAW)[0]


def as_transformers_says(
    path: str, batch: TrainBatch, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return log-probs (B, S) from the logits of transformers' model with an attention mask."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    longest = (batch.response_mask * torch.arange(batch.input_ids.shape[1])).amax(dim=1)
    seen = torch.arange(batch.input_ids.shape[1]) <= longest[:, None]
    with torch.no_grad():
        logits = model(batch.input_ids, attention_mask=seen.long()).logits.float()
    logits = logits / LAW["temperature"]
    early = batch.response_mask.cumsum(dim=1) - 1 < LAW["min_new_tokens"] - 1
    ends = torch.isin(torch.arange(VOCAB_SIZE), torch.tensor(LAW["end_ids"]))
    logits = logits.masked_fill(early[..., None] & ends, -torch.inf)
    chosen = logits.log_softmax(dim=-1).gather(-1, batch.target_ids[..., None])[..., 0]
    return chosen.where(batch.response_mask, 0.0)


def gradients(policy: Policy, batch: TrainBatch) -> Weights:
    weight = torch.arange(float(batch.response_mask.numel())).view(batch.response_mask.shape)
    (scored(policy, batch) * weight.cos()).sum().backward()
    found = {}
    for name, parameter in policy.trained().items():
        assert parameter.grad is not None, name
        found[name], parameter.grad = parameter.grad, None
    return found


def copy(tensors: Weights) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_same(ours: Weights, expected: Weights) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


# ---- Scoring -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_log_probs_are_those_of_transformers_own_logits(model_path, family: str, tied: bool):
    path, batch = model_path(family, tied), batch_of(made_up_groups())
    policy, _ = build_policy(config_of(path).model, 0)
    theirs = as_transformers_says(path, batch)
    with torch.no_grad():
        ours = scored(policy, batch)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    spread = theirs[batch.response_mask].std()
    assert spread > 0.5, "the model must tell tokens apart, or the comparison means nothing"
    # The token ids at padding positions make no difference.
    noise = torch.randint(2, VOCAB_SIZE, batch.input_ids.shape)
    later = batch.response_mask.flip(1).cumsum(dim=1).flip(1) == 0
    with torch.no_grad():
        again = scored(policy, replace(batch, input_ids=noise.where(later, batch.input_ids)))
    assert torch.equal(again, ours)


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_weights_have_the_names_of_transformers_and_a_tied_head_once(
    model_path, family: str, tied: bool
):
    path = model_path(family, tied)
    policy, _ = build_policy(config_of(path).model, 0)
    stored = load_file(Path(path) / "model.safetensors")
    assert policy.weights().keys() == stored.keys()
    assert ("lm_head.weight" in stored) != tied
    assert policy.trained().keys() == stored.keys()
    assert list(policy.frozen()) == []
    assert policy.head_weight.shape == (VOCAB_SIZE, 32)


def test_gradients_are_those_of_transformers_own_logits(model_path):
    path, batch = model_path("qwen3", True), batch_of(made_up_groups())
    policy, _ = build_policy(config_of(path).model, 0)
    ours = gradients(policy, batch)
    logits = policy.model(batch.input_ids).logits / LAW["temperature"]
    early = (batch.response_mask.cumsum(dim=1) - 1 < LAW["min_new_tokens"] - 1)[..., None]
    logits = logits.masked_fill(early & (torch.arange(VOCAB_SIZE) == LAW["end_ids"][0]), -torch.inf)
    chosen = logits.log_softmax(dim=-1).gather(-1, batch.target_ids[..., None])[..., 0]
    weight = torch.arange(float(batch.response_mask.numel())).view(batch.response_mask.shape).cos()
    (chosen * weight)[batch.response_mask].sum().backward()
    for name, parameter in policy.trained().items():
        difference = (ours[name] - parameter.grad).norm() / parameter.grad.norm()
        assert float(difference) < 1e-5, name


def test_the_tokenizer_reads_as_that_of_transformers_does(model_path):
    path = model_path()
    theirs = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    ours = read_tokenizer(path)
    assert (ours.eos_id, ours.pad_id) == (theirs.eos_token_id, theirs.pad_token_id)
    for text in ("The fox ran home.\n", "é 🦊", "  two  spaces "):
        assert ours.encode_prompt(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == text
    spelt_out = "a <|endoftext|> b"
    assert ours.encode(spelt_out) == theirs(spelt_out, split_special_tokens=True).input_ids


def test_a_prompt_that_exceeds_the_context_is_refused(model_path):
    policy, _ = build_policy(config_of(model_path()).model, 0)
    with pytest.raises(ValueError, match="65 tokens do not fit the context of 64"):
        policy.hidden_states(torch.zeros(1, 65, dtype=torch.int64))


# ---- Precision and memory ----------------------------------------------------------------------


def test_a_bfloat16_body_has_a_float32_head(model_path):
    path, batch = model_path("llama", False), batch_of(made_up_groups())
    exact = as_transformers_says(path, batch)[batch.response_mask]
    error = {}
    for head_fp32 in (True, False):
        model = config_of(path, dtype="bfloat16", head_fp32=head_fp32).model
        policy, _ = build_policy(model, 0)
        assert {tensor.dtype for tensor in policy.weights().values()} == {torch.bfloat16}
        log_probs = scored(policy, batch)
        assert log_probs.dtype == torch.float32
        log_probs.sum().backward()
        error[head_fp32] = (log_probs.detach()[batch.response_mask] - exact).abs().mean().item()
    # Most of the error is the body's rounding, which depends on how the CPU multiplies.
    assert error[True] != error[False]
    assert 0 < error[True] < 1.1 * error[False] < 0.2


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4}], ids=["whole", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_gives_equal_gradients(model_path, lora, dtype: str):
    path, batch = model_path("qwen3", False), batch_of(made_up_groups())
    found = []
    for checkpointed in (False, True):
        model = config_of(path, dtype=dtype, gradient_checkpointing=checkpointed, **lora).model
        policy, _ = build_trained_policy(model, 0)
        disturb(policy)
        layers = [m for m in policy.modules() if type(m).__name__ == "Qwen3DecoderLayer"]
        runs: list[int] = []
        layers[0].input_layernorm.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        found.append(gradients(policy, batch))
        assert len(runs) == 1 + checkpointed
    assert_same(found[1], found[0])


def disturb(policy: Policy) -> None:
    """Set B of every adapter to random values. B starts at zero, where adapters have no effect."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in policy.trained().items():
            if "lora_B" in name:
                tensor.normal_(std=0.1, generator=generator)


# ---- LoRA --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_begin_without_an_effect(model_path, dtype: str):
    path, batch = model_path(), batch_of(made_up_groups())
    plain, _ = build_policy(config_of(path, dtype=dtype).model, 0)
    policy, _ = build_trained_policy(config_of(path, dtype=dtype, lora_rank=4).model, 0)
    assert_same(copy(policy.weights()), copy(plain.weights()))
    with torch.no_grad():
        assert torch.equal(scored(policy, batch), scored(plain, batch))


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_merged_adapters_score_as_adapters_do(model_path, family: str, tied: bool):
    path, batch = model_path(family, tied), batch_of(made_up_groups())
    policy, _ = build_trained_policy(config_of(path, lora_rank=4, lora_alpha=6).model, 0)
    disturb(policy)
    plain, _ = build_policy(config_of(path).model, 0)
    before = copy(plain.weights())
    with torch.no_grad():
        base = scored(plain, batch)
        copy_parameters(plain.weights(), policy.weights(), source="merged")
        merged, apart = scored(plain, batch), scored(policy, batch)
    torch.testing.assert_close(merged, apart, rtol=0, atol=1e-4)
    assert float((merged - base).abs().max()) > 0.1
    # The adapter adds alpha / rank times the product B A to the weight of a layer.
    prefix = "model.layers.0.self_attn.q_proj"
    adapters = policy.trained()
    first, second = (adapters[f"{prefix}.lora_{x}.default.weight"] for x in "AB")
    gained = policy.weights()[f"{prefix}.weight"] - before[f"{prefix}.weight"]
    torch.testing.assert_close(gained, 1.5 * second @ first, rtol=0, atol=1e-5)
    changed = {n for n, tensor in policy.weights().items() if not torch.equal(tensor, before[n])}
    assert changed == before.keys() - set(policy.frozen())
    assert all(name.endswith("_proj.weight") for name in changed)
    with torch.no_grad():
        assert torch.equal(scored(policy.untrained(), batch), base)
        assert torch.equal(scored(policy, batch), apart)


def test_adapters_are_drawn_from_the_seed_alone(model_path):
    path = model_path()
    drawn = []
    for seed, torchs in ((1, 5), (1, 6), (2, 5)):
        torch.manual_seed(torchs)
        drawn.append(build_trained_policy(config_of(path, lora_rank=2).model, seed)[0].trained())
    assert_same(drawn[0], drawn[1])
    name = "model.layers.0.mlp.down_proj.lora_A.default.weight"
    assert not torch.equal(drawn[0][name], drawn[2][name])


def test_only_the_layers_that_are_named_have_adapters(model_path):
    model = config_of(model_path(), lora_rank=2, lora_targets="q_proj, v_proj").model
    adapted = {name.split(".lora_")[0] for name in build_trained_policy(model, 0)[0].trained()}
    assert adapted == {f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "qv"}


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("q_proj,nonesuch", "no layer is called nonesuch"),
        ("nonesuch", "nonesuch"),
        ("lm_head,q_proj", "lm_head is not a linear layer of the body"),
        ("embed_tokens", "embed_tokens is not a linear layer of the body"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(model_path, targets: str, said: str):
    path = model_path("llama", False)
    with pytest.raises(ValueError, match=said) as error:
        build_trained_policy(config_of(path, lora_rank=2, lora_targets=targets).model, 0)
    assert str(error.value).startswith(f"{path}: model.lora_targets")
    assert "\n" not in str(error.value)


# ---- The learner -------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "bfloat16": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "lora": {"lora_rank": 4},
    "lora bfloat16": {"lora_rank": 4, "dtype": "bfloat16", "gradient_checkpointing": True},
}


class Trained:
    """A learner that trains rounds on made-up groups."""

    def __init__(self, path: str, **model: Any) -> None:
        self.transport = Mailbox()
        self.learner = Learner(config_of(path, **model), self.transport)
        self.round = 0

    def rounds(self, count: int) -> list[Any]:
        updates = []
        for _ in range(count):
            self.round += 1
            groups = made_up_groups(self.round)
            with torch.no_grad():
                log_probs = scored(self.learner.policy, batch_of(groups))
            sampled = by_group(groups, log_probs)
            behaviour = [
                replace(g, behaviour_log_probs=b) for g, b in zip(groups, sampled, strict=True)
            ]
            updates.append(self.learner.update([behaviour]))
        return updates


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_round_trains_and_publishes_what_engines_can_load(model_path, settings: str):
    path, model = model_path("qwen3", True), SETTINGS[settings]
    trained = Trained(path, **model)
    trained.learner.warm_up(prompt_tokens=9)
    (first, *_, last) = trained.rounds(3)
    # A row is rounded differently in another batch, which is visible in bfloat16.
    rounding = 0.02 if "bfloat16" in settings else 1e-5
    assert first.steps[0].ratio_max == pytest.approx(1.0, abs=rounding)
    previous, reference = first.kl["previous"], first.kl["reference"]
    assert (previous.k1, previous.k3) == pytest.approx((reference.k1, reference.k3), rel=0.01)
    assert last.kl["previous"] != last.kl["reference"]
    assert min(drift.k3 for update in (first, last) for drift in update.kl.values()) > 0
    snapshot = trained.transport.snapshots[trained.learner.publish().version]
    apart = settings == "lora bfloat16"
    if apart:
        sampler, _ = build_adapted_policy(config_of(path, **model).model, 0)
    else:
        sampler, _ = build_policy(config_of(path, dtype=model.get("dtype", "float32")).model, 0)
    copy_parameters(sampler.weights(), snapshot.tensors, source="snapshot")
    adapters = {tensor.dtype for name, tensor in snapshot.tensors.items() if "lora_" in name}
    assert adapters == ({torch.float32} if apart else set())
    others = {tensor.dtype for name, tensor in snapshot.tensors.items() if "lora_" not in name}
    assert others == {sampler.head_weight.dtype}
    batch = batch_of(made_up_groups(9))
    with torch.no_grad():
        difference = (scored(sampler, batch) - scored(trained.learner.policy, batch)).abs().max()
    assert float(difference) <= 1e-4


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_resumed_learner_goes_on_bit_for_bit(model_path, settings: str):
    path, model = model_path("llama", False), SETTINGS[settings]
    whole, first = Trained(path, **model), Trained(path, **model)
    expected = whole.rounds(4)
    first.rounds(2)
    second = Trained(path, **model)
    second.learner.load_state(first.learner.state())
    second.round = 2
    resumed = second.rounds(2)
    assert [update.steps for update in resumed] == [update.steps for update in expected[2:]]
    assert [update.kl for update in resumed] == [update.kl for update in expected[2:]]
    ours, theirs = second.learner.state(), whole.learner.state()
    assert_same(ours.policy, theirs.policy)
    assert_same(ours.optimizer, theirs.optimizer)
    assert ours.counters == theirs.counters


def test_a_checkpoint_of_adapters_holds_nothing_else_and_no_second_model_is_kept(model_path):
    learner = Trained(model_path(), lora_rank=4).learner
    assert all(".lora_" in name for name in learner.state().policy)
    assert learner.reference is not None
    assert list(learner.reference.model.parameters()) == []
    assert all(p.requires_grad for p in learner.policy.trained().values())


def test_a_checkpoint_of_another_model_is_refused(model_path):
    state = Trained(model_path("qwen3", False)).learner.state()
    with pytest.raises(ValueError, match="use the policy that the run started from"):
        Trained(model_path("qwen3", False), dtype="bfloat16").learner.load_state(state)
    with pytest.raises(ValueError, match="parameters do not match the model"):
        Trained(model_path("qwen3", False), lora_rank=2).learner.load_state(state)


# ---- Refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Gemma2", {"final_logit_softcapping": 5.0, "head_dim": 8}),
        ("Granite", {"logits_scaling": 8.0}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Phi", {}),
    ],
)
def test_logits_that_are_no_product_are_refused(
    tmp_path: Path, kind: str, settings: dict[str, Any]
):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=tokenizer().eos_id, pad_token_id=None, **settings,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    if kind == "Phi":
        torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path)
    tokenizer().save(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="modifies its logits") as error:
        build_policy(config_of(str(tmp_path)).model, 0)
    assert str(error.value).startswith(f"{tmp_path}: {kind}ForCausalLM")
    assert "\n" not in str(error.value)


def test_missing_weights_are_never_made_up(tmp_path: Path):
    path = write_hf_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight \(1 missing"
    ):
        build_policy(config_of(path).model, 0)


@pytest.mark.parametrize("content", [b"", b"not safetensors"])
def test_weights_that_cannot_be_read_are_a_one_line_error(tmp_path: Path, content: bytes):
    path = write_hf_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="transformers cannot load it") as error:
        build_policy(config_of(path).model, 0)
    assert "\n" not in str(error.value)


def test_an_architecture_of_another_kind_is_a_one_line_error(tmp_path: Path):
    write_json_files(tmp_path, {"model_type": "vit", "architectures": ["ViTModel"]})
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="transformers cannot load it") as error:
        build_policy(config_of(str(tmp_path)).model, 0)
    assert "\n" not in str(error.value)


def test_an_architecture_that_drops_out_while_it_checkpoints_is_refused(tmp_path: Path):
    config = transformers.OPTConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, ffn_dim=48, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.5,
        bos_token_id=None, eos_token_id=tokenizer().eos_id, pad_token_id=1,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer().save(tmp_path / "tokenizer.json")
    path = str(tmp_path)
    build_trained_policy(config_of(path).model, 0)
    with pytest.raises(ValueError, match="OPTForCausalLM does not support it") as error:
        build_trained_policy(config_of(path, gradient_checkpointing=True).model, 0)
    assert str(error.value).startswith(f"{path}: model.gradient_checkpointing=true")
