"""Trained policies exported as Hugging Face directories: transformers loads the same policy."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agreeing import assert_agree
from checkpoints import write_checkpoint
from hf_models import write_hf_model
from policies import write_quick_policy
from torch import Tensor
from virtual_time import one_token_group

from grpo_trainable.config import GRPOConfig
from grpo_trainable.engines.engine import EngineSetup, build_engine
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import SHIPPED_POLICY, read_tokenizer
from grpo_trainable.models.store import build_policy, load_policy
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.storage.checkpointing import TrialState
from grpo_trainable.tasks.input_files import input_digests
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.tools.export import ExportError, export
from grpo_trainable.transports.in_process import InProcess
from launch import export as command

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.numerics

TEXTS = [
    "Write a story that includes the word: fox\n",
    "",
    "naïve café 狐狸 🦊\t\r\n  two",
    "<|endoftext|> and <|pad|> are spelled here",
]


def loaded(path: Path | str, dtype: torch.dtype | None = None) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto")


def ids_for(vocab_size: int, length: int = 60) -> Tensor:
    return torch.randint(vocab_size, (4, length), generator=torch.Generator().manual_seed(0))


# ---- The shipped policy ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "shipped"
    export(Path(SHIPPED_POLICY), out)
    return out


@torch.no_grad()
def test_the_shipped_policy_as_a_llama_has_the_same_logits(shipped):
    ours, theirs = load_policy(SHIPPED_POLICY)[0], loaded(shipped)
    ids = ids_for(ours.config.vocab_size, length=128)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    # Logits go up to 22, where float32 resolves 2e-6. Depending on the order of computation, a
    # logit is up to 3e-5 away from its exact value.
    difference = theirs(ids).logits - ours(ids)
    assert difference.abs().max() < 5e-5
    assert difference.square().mean().sqrt() < 5e-6


@torch.no_grad()
def test_without_that_rounding_the_logits_are_the_same(shipped):
    ours, theirs = load_policy(SHIPPED_POLICY)[0].double(), loaded(shipped, torch.float64)
    ids = ids_for(ours.config.vocab_size, length=128)
    half = ours.config.head_dim // 2
    # transformers computes norms and the angles of RoPE in float32, whatever the model's dtype.
    cos, sin = theirs.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(128)[None])
    assert (cos[0] - ours.cos).abs().max() < 1e-5
    ours.cos, ours.sin = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=0, atol=1e-5)


def test_the_tokenizer_of_transformers_gives_the_same_ids(shipped):
    ours, theirs = read_tokenizer(None), transformers.AutoTokenizer.from_pretrained(shipped)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_id, ours.pad_id)
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text


@torch.no_grad()
def test_it_comes_back_as_a_policy_and_samples_the_same_responses(shipped):
    rollout = {"prompts": 4, "group_size": 4, "max_new_tokens": 30}
    groups: list[list[RolloutGroup]] = []
    for path in (None, str(shipped)):
        config = GRPOConfig.from_dict({"model": {"path": path}, "rollout": rollout})
        tokenizer = read_tokenizer(path)
        setup = EngineSetup(config=config, tokenizer=tokenizer, device=torch.device("cpu"))
        prompts = Prompts(config, build_task(config), tokenizer)
        wanted = [prompts.request("train", index) for index in range(4)]
        groups.append(build_engine(setup).generate(wanted, lambda: None))
    assert_agree(*groups, atol=1e-4)


# ---- Trained policies ------------------------------------------------------------------------


def trained(directory: Path, **model: Any) -> tuple[GRPOConfig, Learner, Path]:
    """Return a config, a learner whose policy has changed, and the directory of its checkpoint."""
    config = GRPOConfig.from_dict(
        {
            "model": model,
            "rollout": {"prompts": 1, "group_size": 2, "max_new_tokens": 1},
            "optim": {"lr": 1e-2},
        }
    )
    learner = Learner(config, InProcess())
    # The prompt's token is not padding, and the tokens of the two responses differ.
    tokens = {"prompt_ids": torch.tensor([7]), "response_ids": torch.tensor([[5], [9]])}
    with torch.enable_grad():
        learner.update([[replace(one_token_group(0), **tokens)]])
    state = learner.state()
    path = directory / "checkpoint_000002"
    trial = TrialState(
        state={
            "config": config.to_dict(),
            "inputs": input_digests(config),
            "learner": state.counters,
            "pipeline": {"learner_round": 1},
        },
        policy=state.policy,
        optimizer=state.optimizer,
        groups=[],
    )
    write_checkpoint(path, trial)
    return config, learner, path


@torch.no_grad()
def test_a_checkpoint_is_exported_with_its_trained_weights(tmp_path, capsys):
    path = write_quick_policy(tmp_path / "policy")
    config, learner, checkpoint = trained(tmp_path / "trial", path=path)
    # From the directory of a trial, its newest checkpoint is exported.
    for source, out in ((checkpoint, "one"), (checkpoint.parent, "two")):
        assert command.main([str(source), str(tmp_path / out)]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"{checkpoint}, trained for 1 round\n{tmp_path / out}: LlamaForC")
        ids = ids_for(2048, length=48)
        expected = learner.policy.hidden_states(ids) @ learner.policy.head_weight.t()
        torch.testing.assert_close(loaded(tmp_path / out)(ids).logits, expected, rtol=0, atol=1e-5)
        untrained = build_policy(config.model, 0)[0]
        before = untrained.hidden_states(ids) @ untrained.head_weight.t()
        assert (expected - before).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("lora_rank", [None, 4])
@torch.no_grad()
def test_a_hugging_face_model_keeps_its_architecture_and_its_files(tmp_path, family, lora_rank):
    if lora_rank is not None:
        pytest.importorskip("peft")
    path = Path(write_hf_model(tmp_path / "model", family, tied=family == "qwen3"))
    (path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    _, learner, checkpoint = trained(tmp_path / "trial", path=str(path), lora_rank=lora_rank)
    done = export(checkpoint, tmp_path / "out")
    assert done.architecture == type(loaded(path)).__name__
    assert not [name for name in (tmp_path / "out").iterdir() if name.suffix in (".bin", ".pt")]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (path / name).read_bytes()
    ids = ids_for(320, length=40)
    expected = learner.policy.hidden_states(ids) @ learner.policy.head_weight.t()
    torch.testing.assert_close(loaded(tmp_path / "out")(ids).logits, expected, rtol=0, atol=1e-4)
    assert (loaded(path)(ids).logits - expected).abs().max() > 1e-2
    again = GRPOConfig.from_dict({"model": {"path": str(tmp_path / "out")}})
    policy, tokenizer = build_policy(again.model, 0)
    assert tokenizer.end_ids == read_tokenizer(str(path)).end_ids
    back = policy.hidden_states(ids) @ policy.head_weight.t()
    torch.testing.assert_close(back, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_adapters_of_a_bfloat16_body_are_merged_in_float32_and_rounded_once(tmp_path, dtype):
    pytest.importorskip("peft")
    path = write_hf_model(tmp_path / "model")
    settings = {"path": path, "lora_rank": 4, "dtype": "bfloat16"}
    _, learner, checkpoint = trained(tmp_path / "trial", **settings)
    assert export(checkpoint, tmp_path / "out", dtype).dtype == (dtype or torch.bfloat16)
    merged = dict(learner.policy.merged())
    stored = dict(loaded(tmp_path / "out").named_parameters())
    assert stored.keys() == merged.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == (dtype or torch.bfloat16)
        assert tensor.equal(merged[name].to(tensor.dtype))


def test_weights_are_stored_in_the_type_that_is_asked_for(tmp_path, capsys):
    out = tmp_path / "out"
    assert command.main([str(SHIPPED_POLICY), str(out), "--dtype", "bfloat16"]) == 0
    assert "LlamaForCausalLM, 1,053,824 parameters in bfloat16" in capsys.readouterr().out
    assert {parameter.dtype for parameter in loaded(out).parameters()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


# ---- Refusals --------------------------------------------------------------------------------


def refusal(capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> str:
    assert command.main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    out = tmp_path / "out"
    assert "nowhere: is not a directory" in refusal(capsys, tmp_path / "nowhere", out)
    assert "empty: contains no checkpoint" in refusal(capsys, tmp_path / "empty", out)
    assert "the following arguments are required: OUT" in refusal(capsys, tmp_path / "empty")
    occupied = "full: is not a new or empty directory"
    assert occupied in refusal(capsys, SHIPPED_POLICY, tmp_path / "full")
    assert "full/file: File exists" in refusal(capsys, SHIPPED_POLICY, tmp_path / "full/file/out")
    hugging_face = write_hf_model(tmp_path / "model")
    assert "is already a Hugging Face directory" in refusal(capsys, hugging_face, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "model"]


def test_a_damaged_checkpoint_and_a_changed_policy_are_refused(tmp_path):
    path = Path(write_quick_policy(tmp_path / "policy"))
    _, _, checkpoint = trained(tmp_path / "trial", path=str(path))
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    with (damaged / "policy-00001-of-00001.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    with pytest.raises(ExportError, match="damaged"):
        export(damaged, tmp_path / "out")
    (path / "tokenizer.json").write_text((path / "tokenizer.json").read_text() + "\n")
    with pytest.raises(ExportError, match=r"tokenizer.json has changed since this run"):
        export(checkpoint, tmp_path / "out")
    shutil.rmtree(path)
    with pytest.raises(ExportError, match="policy"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
