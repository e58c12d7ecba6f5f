"""A Hugging Face model's small files, read without importing transformers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_models import CONTEXT_LENGTH, VOCAB_SIZE, tokenizer, write_json_files
from safetensors.numpy import save_file
from tokenizers.processors import TemplateProcessing

from grpo_trainable.config import GRPOConfig
from grpo_trainable.models.directory import SHIPPED_POLICY, check_policy, policy_files
from grpo_trainable.models.hf.directory import read_shape, read_tokenizer, refuse_unusable
from grpo_trainable.models.hf.files import (
    INSTALL,
    fetch_small_files,
    local_directory,
    model_files,
    revision_file,
    weight_files,
)
from grpo_trainable.models.hf.json_files import ModelFacts, facts_of, is_hugging_face
from grpo_trainable.models.tokenizer import read_backend

EOS, PAD = tokenizer().eos_id, tokenizer().pad_id
FOX, ONE = tokenizer().encode("fox")[0], tokenizer().encode("o")[0]
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- Kinds of directories ----------------------------------------------------------------------


def test_config_json_tells_whose_model_it_is(tmp_path: Path):
    assert is_hugging_face(write_json_files(tmp_path / "theirs"))
    assert not is_hugging_face(SHIPPED_POLICY)
    assert not is_hugging_face(tmp_path / "nowhere")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("[1, 2")
    assert not is_hugging_face(tmp_path / "broken")


# ---- Shape -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_position_embeddings": None, "n_positions": CONTEXT_LENGTH},
        {
            "max_position_embeddings": None,
            "vocab_size": None,
            "text_config": {"max_position_embeddings": CONTEXT_LENGTH, "vocab_size": VOCAB_SIZE},
        },
    ],
    ids=["llama", "gpt2", "of several modalities"],
)
def test_the_shape_is_what_config_json_says(tmp_path: Path, config: dict[str, Any]):
    shape = read_shape(write_json_files(tmp_path, config))
    assert (shape.context_length, shape.vocab_size) == (CONTEXT_LENGTH, VOCAB_SIZE)


def test_the_shape_has_the_heads_that_config_json_names(tmp_path: Path):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    named = read_shape(write_json_files(tmp_path / "named", heads))
    assert (named.heads, named.kv_heads) == (4, 2)
    unnamed = read_shape(write_json_files(tmp_path / "unnamed", {}))
    assert (unnamed.heads, unnamed.kv_heads) == (None, None)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"max_position_embeddings": None}, "no max_position_embeddings"),
        ({"vocab_size": "7"}, "no vocab_size"),
    ],
)
def test_a_config_without_a_shape_is_refused(tmp_path: Path, config: dict[str, Any], missing: str):
    with pytest.raises(ValueError, match=missing) as error:
        read_shape(write_json_files(tmp_path, config))
    assert "config.json" in one_line(error)


# ---- Tokenizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "end_ids"),
    [
        ({}, (EOS,)),
        ({"generation_config": {"eos_token_id": [FOX, EOS]}}, (FOX, EOS)),
        # The ids in generation_config replace those in config. The tokenizer's id is added.
        ({"generation_config": {"eos_token_id": FOX}}, (FOX,)),
        (
            {
                "generation_config": {"eos_token_id": [FOX, ONE, VOCAB_SIZE, -1]},
                "tokenizer_config": {"eos_token": {"content": "<|endoftext|>"}},
            },
            (EOS, FOX, ONE),
        ),
        ({"tokenizer_config": {"eos_token": "<|nobody|>"}}, (EOS,)),
    ],
)
def test_every_end_that_the_files_name_ends_a_response(
    tmp_path: Path, files: dict[str, Any], end_ids: tuple[int, ...]
):
    read = read_tokenizer(write_json_files(tmp_path, **files))
    assert read.end_ids == end_ids
    assert read.eos_id == end_ids[0]


@pytest.mark.parametrize(
    ("files", "pad_id"),
    [
        ({"tokenizer_config": {"pad_token": "<|pad|>"}}, PAD),
        ({"generation_config": {"pad_token_id": FOX}}, FOX),
        ({"config": {"pad_token_id": ONE}}, ONE),
        ({"config": {"pad_token_id": -1}}, EOS),
        ({}, EOS),
    ],
)
def test_a_missing_padding_token_is_replaced_by_an_end(
    tmp_path: Path, files: dict[str, Any], pad_id: int
):
    assert read_tokenizer(write_json_files(tmp_path, **files)).pad_id == pad_id


def test_a_model_whose_responses_never_end_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no token ends a response; name one") as error:
        read_tokenizer(write_json_files(tmp_path, {"eos_token_id": None}))
    one_line(error)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path):
    size = tokenizer().vocab_size
    read_tokenizer(write_json_files(tmp_path, {"vocab_size": size}))
    with pytest.raises(
        ValueError, match=f"{size} tokens, but the model has only {size - 1}"
    ) as error:
        read_tokenizer(write_json_files(tmp_path, {"vocab_size": size - 1}))
    one_line(error)


def test_a_prompt_begins_as_the_tokenizers_template_says_and_does_not_end(tmp_path: Path):
    directory = write_json_files(tmp_path)
    backend = read_backend(directory / "tokenizer.json")
    backend.post_processor = TemplateProcessing(
        single="<|pad|> $A <|endoftext|>", special_tokens=[("<|pad|>", PAD), ("<|endoftext|>", EOS)]
    )
    backend.save(str(directory / "tokenizer.json"))
    read = read_tokenizer(directory)
    assert read.encode("a fox") == tokenizer().encode("a fox")
    assert read.encode_prompt("a fox") == [PAD, *tokenizer().encode("a fox")]
    assert tokenizer().encode_prompt("a fox") == tokenizer().encode("a fox")
    # A special token that is spelled out is plain text.
    assert EOS not in read.encode_prompt("<|endoftext|>")


# ---- Weights and code --------------------------------------------------------------------------


def test_weights_are_one_file_or_all_that_the_index_lists(tmp_path: Path):
    directory = write_json_files(tmp_path)
    index = {
        "weight_map": {
            "a": "model-2.safetensors",
            "b": "model-1.safetensors",
            "c": "model-2.safetensors",
        }
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model-1.safetensors").touch()
    with pytest.raises(
        ValueError, match=r"model-2\.safetensors, which .* lists, is missing"
    ) as error:
        weight_files(directory)
    one_line(error)
    (directory / "model-2.safetensors").touch()
    assert weight_files(directory) == ["model-1.safetensors", "model-2.safetensors"]
    (directory / "model.safetensors").touch()
    assert weight_files(directory) == ["model.safetensors"]


def test_an_index_cannot_lead_out_of_the_directory(tmp_path: Path):
    directory = write_json_files(tmp_path / "model")
    (tmp_path / "secret.safetensors").touch()
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is missing"):
        weight_files(directory)


@needs_transformers
@pytest.mark.parametrize(
    ("config", "files", "said"),
    [
        ({}, [], "no model.safetensors here"),
        ({}, ["pytorch_model.bin"], "pytorch_model.bin is a pickle, which runs code"),
        (
            {"auto_map": {"AutoModel": "x.Y"}},
            ["model.safetensors"],
            r"\(auto_map\), which is never run",
        ),
        (
            {"model_type": "nonesuch"},
            ["model.safetensors"],
            'know the architecture model_type="nonesuch"',
        ),
        ({"model_type": None}, ["model.safetensors"], "know the architecture model_type=null"),
        ({"quantization_config": {}}, ["model.safetensors"], "the weights are quantized"),
        (
            {},
            ["model.safetensors", "adapter_config.json"],
            "holds both a model and adapter_config.json",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_starts(
    tmp_path: Path, config: dict[str, Any], files: list[str], said: str
):
    directory = write_json_files(tmp_path, config)
    for name in files:
        (directory / name).touch()
    with pytest.raises(ValueError, match=said) as error:
        refuse_unusable(directory)
    assert one_line(error).startswith(str(directory))


@pytest.mark.slow
@needs_transformers
def test_a_usable_directory_is_told_without_importing_torch_or_transformers(tmp_path: Path):
    directory = write_json_files(tmp_path)
    (directory / "model.safetensors").touch()
    code = (
        "import sys; from pathlib import Path\n"
        "from grpo_trainable.models.hf import directory, json_files\n"
        f"model = Path({str(directory)!r})\n"
        "assert json_files.is_hugging_face(model)\n"
        "directory.refuse_unusable(model)\n"
        "directory.read_shape(model), directory.read_tokenizer(model)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[4])


def test_a_missing_library_is_named_with_the_line_that_installs_it(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the library transformers is not installed") as error:
        refuse_unusable(write_json_files(tmp_path))
    assert one_line(error).endswith(INSTALL)


@needs_transformers
def test_the_launcher_checks_a_model_without_its_weights(tmp_path: Path):
    directory = write_json_files(tmp_path)
    write_weights(directory)
    model = GRPOConfig.from_dict({"model": {"path": str(directory)}}).model
    shape, read = check_policy(model)
    assert (shape.vocab_size, read.end_ids) == (VOCAB_SIZE, (EOS,))
    assert policy_files(model) == {name: directory / name for name in model_files(directory)}
    assert list(policy_files(model)) == ["config.json", "tokenizer.json", "model.safetensors"]


def write_weights(directory: Path) -> Path:
    """Write zeros under the weight names of a one-layer Llama."""
    body = "model.layers.0"
    shapes = {
        "model.embed_tokens": (VOCAB_SIZE, 8),
        f"{body}.self_attn.q_proj": (8, 8),
        f"{body}.self_attn.v_proj": (4, 8),
        f"{body}.mlp.up_proj": (16, 8),
        f"{body}.input_layernorm": (8,),
        "lm_head": (VOCAB_SIZE, 8),
    }
    file = directory / "model.safetensors"
    tensors = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, file)
    return file


@needs_transformers
@pytest.mark.parametrize("change", [-1, 3])
def test_a_file_of_weights_that_is_not_whole_is_refused(tmp_path: Path, change: int):
    file = write_weights(write_json_files(tmp_path))
    model = GRPOConfig.from_dict({"model": {"path": str(tmp_path)}}).model
    check_policy(model)
    content = file.read_bytes()
    file.write_bytes(content[:change] if change < 0 else content + b"abc")
    held, whole = len(content) + change, len(content)
    said = f"model.safetensors: has {held:,} bytes but should have {whole:,}"
    with pytest.raises(ValueError, match=said) as error:
        check_policy(model)
    one_line(error)


@needs_transformers
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("q_proj, self_attn.v_proj", None),
        ("all-linear", None),
        ("q_prj", "no layer is called 'q_prj'; valid: all-linear, or some of q_proj, up_proj, "),
        ("q_proj,attn.v_proj", "no layer is called 'attn.v_proj'"),
        ("lm_head", "lm_head is not a linear layer of the body"),
        ("embed_tokens", "embed_tokens is not a linear layer of the body"),
        ("input_layernorm", "input_layernorm is not a linear layer of the body"),
        ("self_attn", "no layer is called 'self_attn'"),
    ],
)
def test_lora_targets_are_looked_for_among_the_stored_weights(
    tmp_path: Path, targets: str, said: str | None
):
    write_weights(write_json_files(tmp_path))
    settings = {"path": str(tmp_path), "lora_rank": 2, "lora_targets": targets}
    model = GRPOConfig.from_dict({"model": settings}).model
    if said is None:
        check_policy(model)
        return
    with pytest.raises(ValueError, match=said) as error:
        check_policy(model)
    assert one_line(error).startswith(f"{tmp_path}: model.lora_targets: ")


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"lora_rank": 4}])
def test_a_policy_of_ours_has_no_settings_of_hugging_face(settings: dict[str, Any]):
    path = str(SHIPPED_POLICY)
    model = GRPOConfig.from_dict({"model": {"path": path, **settings}}).model
    (key,) = settings
    with pytest.raises(ValueError, match=f"model.{key} is only for Hugging Face models") as error:
        check_policy(model)
    assert one_line(error).startswith(path)


# ---- The hub -----------------------------------------------------------------------------------


def test_a_directory_is_never_looked_for_on_the_hub(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert local_directory("org/name") == Path("org/name")
    with pytest.raises(ValueError, match="missing: no such directory; valid: ") as error:
        local_directory(str(tmp_path / "missing"))
    one_line(error)
    (tmp_path / "org" / "model.gguf").touch()
    with pytest.raises(ValueError, match=r"^org/model\.gguf: is a file; valid: the directory of "):
        local_directory("org/model.gguf")


@pytest.mark.slow
@needs_transformers
def test_a_model_of_the_hub_is_taken_from_where_it_was_downloaded_to(tmp_path: Path, monkeypatch):
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    revision = "0" * 40
    downloaded = tmp_path / "models--org--name"
    snapshot = write_json_files(downloaded / "snapshots" / revision)
    (downloaded / "refs").mkdir()
    (downloaded / "refs" / "main").write_text(revision)
    (snapshot / "model.safetensors").touch()
    assert local_directory("org/name") == snapshot
    # Without this file, another machine would not find the download and would contact the hub.
    assert revision_file(snapshot) == {"refs/main": downloaded / "refs" / "main"}
    assert revision_file(downloaded) == {}
    with pytest.raises(
        ValueError, match=r"^org/other: no such directory, and it cannot be downloaded"
    ) as error:
        local_directory("org/other")
    one_line(error)


@pytest.mark.slow
@needs_transformers
def test_only_small_files_are_fetched_before_trials_are_planned(tmp_path: Path, monkeypatch):
    hub = importlib.import_module("huggingface_hub")
    asked = []

    def download(name: str, *, local_files_only: bool = False, **wanted: Any) -> str:
        if local_files_only and not (tmp_path / "config.json").exists():
            raise FileNotFoundError(name)
        if not local_files_only:
            asked.append((name, wanted["allow_patterns"]))
            write_json_files(tmp_path, tokenizer_config={"chat_template": "{{ messages }}"})
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    for path in (None, 3, str(tmp_path), "missing/a/b"):
        fetch_small_files(path)
    assert asked == []
    assert facts_of("org/name") == ModelFacts()
    fetch_small_files("org/name")
    fetch_small_files("org/name")  # the files are here now
    assert asked == [("org/name", ["*.json", "*.jinja"])]
    facts = ModelFacts(has_chat_template=True, context_length=CONTEXT_LENGTH, packs=True)
    assert facts_of("org/name") == facts
    # The weights are still missing.
    assert local_directory("org/name") == tmp_path
    assert asked[1:] == [("org/name", ["*.json", "*.jinja", "*.safetensors"])]


@pytest.mark.slow
@needs_transformers
def test_a_complete_download_without_a_tokenizer_config_is_not_fetched_again(
    tmp_path: Path, monkeypatch
):
    hub = importlib.import_module("huggingface_hub")
    asked = []

    def download(name: str, *, local_files_only: bool = False, **wanted: Any) -> str:
        if not local_files_only:
            asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    write_json_files(tmp_path)
    fetch_small_files("org/name")
    assert asked == ["org/name"]  # a download may have been cut short
    (tmp_path / "model.safetensors").touch()
    fetch_small_files("org/name")
    assert asked == ["org/name"]


@pytest.mark.slow
@needs_transformers
def test_small_files_that_cannot_be_fetched_are_refused_with_the_setting(monkeypatch):
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^model\.path=org/none: no such directory, and") as error:
        fetch_small_files("org/none")
    one_line(error)
