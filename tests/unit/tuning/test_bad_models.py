"""Unusable models and data: the command prints one line each, before Ray starts."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hf_models import write_hf_model
from test_tune_arguments import command, refused  # noqa: F401

from grpo_trainable.config import GRPOConfig
from tuning import checks

# Importing transformers here would take half a second in every test process.
pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
SPACE = ("--space", "async_vs_sync", "--set", "arm=sync", "--set", "rollout.max_new_tokens=16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_hf_model(tmp_path_factory.mktemp("model"), max_position_embeddings=96))


def change(directory: Path, **config: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))


def no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def remote_code(directory: Path) -> None:
    change(directory, auto_map={"AutoModelForCausalLM": "modeling.Mine"})


def unknown(directory: Path) -> None:
    change(directory, model_type="nonesuch")


def torn(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])


def cut_short(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def larger_tokenizer(directory: Path) -> None:
    words = [f"word{i}" for i in range(60)]
    content = json.loads((directory / "tokenizer.json").read_text())
    first = max(content["model"]["vocab"].values()) + 1
    content["added_tokens"] += [
        {
            **content["added_tokens"][0],
            "id": first + len(content["added_tokens"]) + i,
            "content": word,
        }
        for i, word in enumerate(words)
    ]
    (directory / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_weights, ["no model.safetensors here"]),
        (pickled, ["pytorch_model.bin is a pickle", "save_pretrained"]),
        (remote_code, ["custom model code (auto_map), which is never run"]),
        (unknown, ['know the architecture model_type="nonesuch"']),
        (torn, ["model.safetensors", "not a readable safetensors file"]),
        (cut_short, ["model.safetensors: has ", "bytes but should have", "download it again"]),
        (larger_tokenizer, ["the tokenizer has", "tokens, but the model has only 320"]),
    ],
)
def test_a_spoilt_model_is_one_line(command, model, tmp_path, spoil, words):  # noqa: F811
    for file in model.iterdir():
        (tmp_path / "spoilt").mkdir(exist_ok=True)
        (tmp_path / "spoilt" / file.name).write_bytes(file.read_bytes())
    spoil(tmp_path / "spoilt")

    found = command(*SPACE, "--set", "model.path=spoilt")
    refused(found, f"model.path={tmp_path}/spoilt", *words)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_a_layer_that_the_model_does_not_have_is_one_line(command, model):  # noqa: F811
    adapters = ("--set", "model.lora_rank=2", "--set", "model.lora_targets=q_prj")
    found = command(*SPACE, "--set", f"model.path={model}", *adapters)
    refused(found, f"model.path={model}: model.lora_targets: no layer is called", "q_proj")


def prompts(file: Path, *rows: dict[str, Any]) -> None:
    stories = [{"prompt": f"Write about {i}", "answer": "fox"} for i in range(200)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*stories, *rows]))


@pytest.mark.slow
def test_a_prompt_longer_than_the_context_is_one_line(command, model, tmp_path):  # noqa: F811
    prompts(tmp_path / "prompts.jsonl", {"prompt": "fox " * 200, "answer": "fox"})
    # The split may put the prompt among the training prompts or the held-out prompts.
    asked = ("--set", "eval.prompts=200", "--set", "task.train_file=prompts.jsonl")
    found = command(*SPACE, "--set", f"model.path={model}", *asked)
    refused(found, "the model's context is 96 tokens", "fox fox", "leaves no room for a response")


def test_a_data_file_with_missing_keys_is_one_line(command, tmp_path):  # noqa: F811
    (tmp_path / "keys.jsonl").write_text('{"text": "a"}\n' * 1000)
    for task, words in (("keyword", "prompt must be"), ("math", "`problem` or `question` must be")):
        found = command(*SPACE, "--set", f"task.name={task}", "--set", "task.train_file=keys.jsonl")
        refused(found, "task.train_file=", "keys.jsonl: has no valid row; line 1: ", words)
        assert "(columns: text)" in found[2]


@pytest.mark.slow
def test_a_learning_rate_far_above_the_default_of_the_model_gets_a_note(model):
    def notes(path: Path | None, **given: float) -> list[str]:
        trial = {"model": {"path": path and str(path)}, "optim": given}
        return list(checks.check_learning_rate(GRPOConfig.from_dict(trial)))

    assert notes(model, lr=1e-4) == [
        "note: optim.lr=0.0001 is 20 times the default for all weights of a Hugging Face model "
        "(5e-06), and may destroy what the model can do"
    ]
    assert notes(model, lr=9e-5) == notes(model) == notes(None, lr=1.0) == []


@pytest.mark.slow
def test_lengths_are_looked_at_for_a_limited_time_and_it_is_said(
    command,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    prompts(tmp_path / "prompts.jsonl")
    given = (*SPACE, "--set", "task.train_file=prompts.jsonl", "--dry-run")

    assert "were checked against" not in command(*given)[1]
    monkeypatch.setattr(checks, "MAX_LENGTHS_S", -1.0)
    _, out, _ = command(*given)
    # One training prompt and one held-out prompt were checked. A trial repeats the training
    # prompts, so each counts once.
    (to_train_on,) = map(int, re.findall(r"prompts: (\d+) to train on", out))
    assert 100 < to_train_on < 200
    assert f"note: only 2 of the {128 + to_train_on} prompts of a trial were checked" in out
    monkeypatch.setattr(checks, "MAX_LENGTHS_S", 1e9)
    monkeypatch.setattr(checks, "MAX_PROMPTS", 100)
    assert "only 200 of the" in command(*given)[1]


def test_prompts_that_repeat_are_looked_at_once(command):  # noqa: F811
    """The trial draws 6,144 prompts from 667, in several passes."""
    _, out, _ = command("--preset", "dapo", "--dry-run")
    assert "prompts: 667 to train on in several passes, 224 held out" in out
    assert "were checked against" not in out
