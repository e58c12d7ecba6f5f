"""A directory of LoRA adapters as `model.path`: its settings, and the model that it names."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub

from grpo_trainable.config import ConfigError, GRPOConfig, make_absolute, prepared
from grpo_trainable.config.model import ModelSettings


@pytest.fixture
def base(tmp_path) -> str:
    (tmp_path / "base").mkdir()
    return str(tmp_path / "base")


def adapters(directory: Path, base: Any, **config: Any) -> str:
    directory.mkdir()
    lora = {"r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "q_proj"], **config}
    file = directory / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base, **lora}))
    return str(directory)


def model(**settings: Any) -> ModelSettings:
    return GRPOConfig.from_dict({"model": settings}).model


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        model(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_adapters_as_the_path_become_the_adapter_of_the_model_that_they_name(tmp_path, base):
    directory = adapters(tmp_path / "lora", base)
    found = model(path=directory)
    assert (found.path, found.adapter) == (base, directory)
    assert (found.lora_rank, found.lora_alpha, found.lora_targets) == (4, 6.0, "q_proj,v_proj")


def test_another_model_may_be_named_beside_the_adapters(tmp_path, base):
    directory = adapters(tmp_path / "lora", "/nowhere/else")
    found = model(path=base, adapter=directory)
    assert (found.path, found.adapter, found.lora_rank) == (base, directory, 4)
    at_once = {"path": "base", "adapter": "lora"}
    assert make_absolute({"model": at_once}, tmp_path)["model"] == {
        "path": base,
        "adapter": directory,
    }


def test_a_name_on_the_hub_is_kept(tmp_path):
    assert model(path=adapters(tmp_path / "lora", "Qwen/Qwen2.5-0.5B")).path == "Qwen/Qwen2.5-0.5B"


def test_the_model_on_the_hub_that_adapters_name_gives_the_defaults(tmp_path, monkeypatch):
    hub = FakeHub(tmp_path / "hub", monkeypatch)
    hub.add("org/chat", chat_template="{{ messages }}")
    directory = adapters(tmp_path / "lora", "org/chat")
    data = {"model": {"path": directory}, "task": {"name": "math"}}
    config = GRPOConfig.from_dict(prepared(data))
    assert hub.fetched == ["org/chat"]
    assert (config.model.path, config.model.chat_template) == ("org/chat", "on")
    assert config.task.template == "boxed"


@pytest.mark.parametrize(
    "named", ["base", "models/base"]
)  # the second path looks like a name on the hub
def test_a_relative_model_starts_from_where_ray_was_started(tmp_path, monkeypatch, named):
    (tmp_path / named).mkdir(parents=True)
    (tmp_path / "trial").mkdir()
    directory = adapters(tmp_path / "lora", named)
    monkeypatch.chdir(tmp_path / "trial")  # Tune moves a trial's process there
    monkeypatch.setenv("TUNE_ORIG_WORKING_DIR", str(tmp_path))
    assert model(path=directory).path == str(tmp_path / named)
    prepared_in = prepared({"model": {"path": "lora"}}, str(tmp_path))["model"]
    assert (prepared_in["path"], prepared_in["adapter"]) == (str(tmp_path / named), directory)


def test_the_scale_of_rank_stabilised_lora_is_the_same_here(tmp_path, base):
    found = model(path=adapters(tmp_path / "lora", base, use_rslora=True))
    assert found.lora_alpha is not None
    assert found.lora_rank is not None
    assert found.lora_alpha / found.lora_rank == pytest.approx(6 / math.sqrt(4))


def test_a_config_that_is_complete_needs_no_file(tmp_path, base):
    directory = adapters(tmp_path / "lora", base)
    config = GRPOConfig.from_dict({"model": {"path": directory}})
    shutil.rmtree(directory)
    assert GRPOConfig.from_dict(config.to_dict()) == config


def test_a_whole_model_beside_an_adapter_config_is_no_adapter(tmp_path, base):
    directory = adapters(tmp_path / "lora", base)
    (tmp_path / "lora" / "model.safetensors").touch()
    found = model(path=directory)
    assert (found.path, found.adapter, found.lora_rank) == (directory, None, None)


def test_the_settings_of_the_adapters_may_be_repeated_but_not_changed(tmp_path, base):
    directory = adapters(tmp_path / "lora", base)
    assert (
        model(path=directory, lora_rank=4, lora_targets="all-linear").lora_targets != "all-linear"
    )
    assert refused(path=directory, lora_rank=8) == (
        f"model.lora_rank=8: must be 4, as in the adapters {directory}; leave model.lora_rank out"
    )
    assert 'model.lora_targets=o_proj: must be "q_proj,v_proj"' in refused(
        path=directory, lora_targets="o_proj"
    )


def test_adapters_have_the_default_learning_rate_of_lora(tmp_path, base):
    (Path(base) / "config.json").write_text('{"model_type": "llama"}')
    directory = adapters(tmp_path / "lora", base)
    assert GRPOConfig.from_dict({"model": {"path": directory}}).optim.lr == 5e-5


@pytest.mark.parametrize("base", ["/nowhere/at/all", None, 3])
def test_a_model_that_is_not_here_is_one_line_with_the_settings_that_name_it(tmp_path, base):
    directory = adapters(tmp_path / "lora", base)
    line = refused(path=directory)
    assert line.startswith(f"model.path={directory}: holds LoRA adapters for the model ")
    assert line.endswith(f"; set model.path to that model, and model.adapter={directory}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "{directory}/adapter_config.json: not JSON "),
        ("[1]", "{directory}/adapter_config.json: not a JSON object"),
        ("{}", "adapter_config.json must give r, lora_alpha, and target_modules as a list"),
        (
            json.dumps({"r": 2, "lora_alpha": 2, "target_modules": ".*_proj"}),
            "adapter_config.json must give r, lora_alpha, and target_modules as a list of names",
        ),
    ],
)
def test_a_bad_adapter_config_is_one_line(tmp_path, content, said):
    (tmp_path / "adapter_config.json").write_text(content)
    assert refused(path=str(tmp_path)).startswith(
        f"model.path={tmp_path}: {said.replace('{directory}', str(tmp_path))}"
    )


def test_adapters_that_are_missing_are_one_line(tmp_path, base):
    line = refused(path=base, adapter=str(tmp_path / "none"))
    file = tmp_path / "none" / "adapter_config.json"
    assert line == (
        f"model.adapter={file.parent}: {file}: cannot be read (No such file or directory)"
    )
    assert "model.path=none; needs a Hugging Face model as model.path" in refused(adapter=base)
