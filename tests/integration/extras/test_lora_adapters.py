"""LoRA adapters that peft wrote are trained further, and exported so that peft loads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import trial_config, untimed
from hf_models import VOCAB_SIZE, write_hf_model
from safetensors.torch import load_file
from test_export import trained
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import check_policy
from grpo_trainable.models.policy import Policy
from grpo_trainable.models.store import build_any_policy, build_policy, build_trained_policy
from grpo_trainable.tools.export import ExportError, export_adapters
from grpo_trainable.transports.in_process import InProcess
from launch import evaluate
from launch import export as command

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.numerics

IDS = torch.randint(VOCAB_SIZE, (4, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("base")
    return write_hf_model(directory, "qwen2", tied=True, max_position_embeddings=96)


def written_by_peft(base: str, directory: Path, **lora: Any) -> str:
    """Write adapters with random weights, as TRL's trainer saves a `PeftModel`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **lora}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=generator)
    adapted.save_pretrained(directory)
    return str(directory)


def logits_of_peft(base: str, adapters: str) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, adapters)(IDS).logits


def logits_of(policy: Policy) -> Tensor:
    return policy.hidden_states(IDS).float() @ policy.head_weight.float().t()


def config_of(path: str, **model: Any) -> GRPOConfig:
    return GRPOConfig.from_dict({"model": {"path": path, **model}})


# ---- Starting from adapters ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"use_rslora": True},
        {"target_modules": ["q_proj", "v_proj"]},
        {"lora_dropout": 0.1},
    ],
    ids=str,
)
@torch.no_grad()
def test_the_policy_that_training_starts_from_is_that_of_peft(base, tmp_path, lora):
    adapters = written_by_peft(base, tmp_path / "lora", **lora)
    model = config_of(adapters).model
    assert (model.path, model.adapter, model.lora_rank) == (base, adapters, 4)
    check_policy(model)
    expected, without = (
        logits_of_peft(base, adapters),
        logits_of(build_policy(config_of(base).model, 0)[0]),
    )
    assert (expected - without).abs().max() > 0.1
    policy = build_trained_policy(model, 0)[0]
    for found in (
        policy,
        policy.untrained(),
        build_policy(model, 0)[0],
        build_any_policy(model, 0)[0],
    ):
        torch.testing.assert_close(logits_of(found), expected, rtol=0, atol=1e-4)
    # An engine loads the merged weights under the model's own names.
    assert policy.weights().keys() == build_policy(model, 0)[0].weights().keys()


@torch.no_grad()
def test_the_reference_stays_what_training_started_from(base, tmp_path):
    model = config_of(written_by_peft(base, tmp_path / "lora")).model
    policy = build_trained_policy(model, 0)[0]
    first = logits_of(policy)
    before = {name: tensor.clone() for name, tensor in policy.untrained().weights().items()}
    for tensor in policy.trained().values():
        tensor.add_(0.1)
    moved = logits_of(policy)
    assert (moved - first).abs().max() > 0.1
    assert torch.equal(logits_of(policy.untrained()), first)
    assert torch.equal(logits_of(policy), moved)
    assert all(tensor.requires_grad for tensor in policy.trained().values())
    after = policy.untrained().weights()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_trains_the_adapters_and_measures_the_kl_from_their_start(base, tmp_path, dtype):
    adapters = written_by_peft(base, tmp_path / "lora")
    config, learner, _ = trained(tmp_path / "trial", path=adapters, dtype=dtype)
    start = build_trained_policy(config.model, 0)[0].trained()
    now = learner.policy.trained()
    assert now.keys() == start.keys()
    assert any(not torch.equal(tensor, start[name]) for name, tensor in now.items())
    assert learner.reference is not None
    untrained = build_any_policy(config.model, 0)[0]
    with torch.no_grad():
        assert torch.equal(logits_of(learner.reference.model), logits_of(untrained))
    again = Learner(config, InProcess())
    again.load_state(learner.state())
    assert all(torch.equal(t, now[name]) for name, t in again.policy.trained().items())


def test_adapters_of_another_model_are_one_line(base, tmp_path):
    adapters = written_by_peft(base, tmp_path / "lora")
    other = write_hf_model(tmp_path / "other", "qwen2", tied=True, hidden_size=48)
    with pytest.raises(ValueError, match="to the model that the adapters belong to") as error:
        check_policy(config_of(other, adapter=adapters).model)
    assert str(error.value).startswith(adapters)
    assert "\n" not in str(error.value)
    some = {"target_modules": ["q_proj"], "layers_to_transform": [1]}
    fewer = written_by_peft(base, tmp_path / "fewer", **some)
    with pytest.raises(ValueError, match=r"has no adapter for model\.layers\.0"):
        check_policy(config_of(fewer).model)


@pytest.mark.usefixtures("in_this_process")
def test_adapters_are_evaluated_and_called_adapters(base, tmp_path, capsys):
    adapters = written_by_peft(base, tmp_path / "lora")
    short = ("--prompts", "2", "--samples", "1", "--set", "rollout.max_new_tokens=4")
    assert evaluate.main(["--model", adapters, *short, "--out", "found"]) == 0
    out = capsys.readouterr().out
    line = f"adapters: the policy starts from the LoRA adapters in {adapters} (rank 4), on the"
    assert out.startswith(line)
    assert f"directory {adapters}, SHA-256" in out


def test_a_trial_goes_on_training_adapters_and_resumes_bit_for_bit(
    begun: Callable[[dict[str, Any]], Any], base: str, tmp_path: Path
) -> None:
    reward = tmp_path / "letters.py"
    reward.write_text("def score(response, truth):\n    return response.count('e')\n")
    config = trial_config(
        rollout={"prompts": 4, "unit_prompts": 2, "group_size": 4, "max_new_tokens": 16},
        model={"path": written_by_peft(base, tmp_path / "lora")},
        task={"reward": f"{reward}:score"},
    )
    whole = begun(config)
    rows = [whole.step() for _ in range(2)]
    whole.save_checkpoint(str(tmp_path / "half"))
    rows += [whole.step() for _ in range(2)]
    assert all(row["loss/ratio_max"] == pytest.approx(1.0, abs=1e-4) for row in rows)
    resumed = begun(config)
    resumed.load_checkpoint(str(tmp_path / "half"))
    assert [untimed(resumed.step()) for _ in range(2)] == [untimed(row) for row in rows[2:]]


# ---- Exporting adapters --------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"lora_targets": "self_attn.q_proj, down_proj"}], ids=str)
@torch.no_grad()
def test_exported_adapters_are_loaded_by_peft(base, tmp_path, capsys, settings):
    _, learner, checkpoint = trained(tmp_path / "trial", path=base, lora_rank=4, **settings)
    out = str(tmp_path / "out")
    assert command.main([str(checkpoint.parent), out, "--adapters"]) == 0
    said = capsys.readouterr().out
    assert f"{out}: LoRA adapters of rank 4 for {base}, " in said
    assert f"to train from it: --set model.path={out}" in said
    assert sorted(p.name for p in Path(out).iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (
        json.loads((Path(out) / "adapter_config.json").read_text())["base_model_name_or_path"]
        == base
    )
    torch.testing.assert_close(
        logits_of_peft(base, out), logits_of(learner.policy), rtol=0, atol=1e-4
    )
    # transformers and our own training can start from the exported directory too.
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(loaded(IDS).logits, logits_of(learner.policy), rtol=0, atol=1e-4)
    again = build_trained_policy(config_of(out).model, 0)[0]
    torch.testing.assert_close(logits_of(again), logits_of(learner.policy), rtol=0, atol=1e-6)


@torch.no_grad()
def test_adapters_that_were_trained_further_are_exported_as_one(base, tmp_path):
    adapters = written_by_peft(base, tmp_path / "lora", use_rslora=True)
    _, learner, checkpoint = trained(tmp_path / "trial", path=adapters)
    done = export_adapters(checkpoint, tmp_path / "out", torch.bfloat16)
    assert (done.round, done.dtype) == (1, torch.bfloat16)
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert done.parameters == sum(tensor.numel() for tensor in stored.values())
    found = logits_of_peft(base, str(tmp_path / "out"))
    rounded = (found - logits_of(learner.policy)).abs().max()  # error of bfloat16
    assert rounded < 0.5 * (found - logits_of_peft(base, adapters)).abs().max()


def test_a_trial_without_adapters_has_none_to_export(base, tmp_path, capsys):
    _, _, checkpoint = trained(tmp_path / "trial", path=base)
    assert command.main([str(checkpoint), str(tmp_path / "out"), "--adapters"]) == 2
    error = capsys.readouterr().err
    assert error.endswith("has no adapters, because model.lora_rank was none\n")
    assert error.count("\n") == 1
    with pytest.raises(ExportError, match="contains no checkpoint"):
        export_adapters(Path(base), tmp_path / "out")
    assert not (tmp_path / "out").exists()
