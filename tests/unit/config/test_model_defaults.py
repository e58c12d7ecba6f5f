"""A Hugging Face model has defaults that are derived from its small JSON files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub

from grpo_trainable.config import (
    CHECKS,
    ConfigError,
    GRPOConfig,
    explained_defaults,
    flatten,
    mix_of,
    parsing,
    prepared,
)
from grpo_trainable.config.describe import page, settings
from grpo_trainable.models.directory import SHIPPED_POLICY
from grpo_trainable.models.hf import json_files
from grpo_trainable.models.hf.json_files import ModelFacts, facts_of

TEMPLATE = "{{ messages[0].content }}"
CONTEXT_LENGTH = 8192
OF_TEXT = {"optim.lr": 5e-6, "optim.warmup_rounds": 5, "callbacks.kl_band": (0.0, 12.0)}
MATH = {"task": {"name": "math"}}
CODE = {"name": "code", "train_file": "/p"}

Model = Callable[..., str]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Return a function that writes a model's small files and returns the model's directory."""

    def write(*, context: int | None = CONTEXT_LENGTH, **tokenizer: Any) -> str:
        config: dict[str, Any] = {"model_type": "llama", "vocab_size": 320}
        if context is not None:
            config["max_position_embeddings"] = context
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        return str(tmp_path)

    return write


def config_of(path: str, **data: Any) -> GRPOConfig:
    return GRPOConfig.from_dict({**data, "model": {"path": path, **data.get("model", {})}})


def changed(config: GRPOConfig, **data: Any) -> dict[str, Any]:
    """Return the settings that differ from the settings of the same trial without a model."""
    without = {name: value for name, value in data.items() if name != "model"}
    other = GRPOConfig.from_dict(without)
    keys = flatten(config.to_dict()).keys() - {"model.path", "model.lora_rank"}
    return {key: config[key] for key in keys if config[key] != other[key]}


@pytest.mark.parametrize(
    ("chat", "data", "defaults"),
    [
        (False, {}, OF_TEXT),
        (True, {}, {**OF_TEXT, "model.chat_template": "on"}),
        (False, {"model": {"lora_rank": 4}}, {**OF_TEXT, "optim.lr": 5e-5}),
        (
            True,
            MATH,
            {
                **OF_TEXT,
                "model.chat_template": "on",
                "task.template": "boxed",
                "rollout.max_new_tokens": 256,
                "callbacks.kl_band": (0.0, 51.2),
            },
        ),
        (
            False,
            {"task": {"name": "reasoning_gym", "dataset": "chain_sum"}},
            {
                **OF_TEXT,
                "task.template": "r1_zero",
                "rollout.max_new_tokens": 256,
                "callbacks.kl_band": (0.0, 51.2),
            },
        ),
        (
            True,
            {"task": CODE},
            {
                **OF_TEXT,
                "model.chat_template": "on",
                "task.code_in": "block",
                "rollout.max_new_tokens": 256,
                "callbacks.kl_band": (0.0, 51.2),
            },
        ),
        (
            False,
            {"task": CODE},
            {**OF_TEXT, "rollout.max_new_tokens": 256, "callbacks.kl_band": (0.0, 51.2)},
        ),
    ],
    ids=["base", "chat", "lora", "chat math", "base gym", "chat code", "base code"],
)
def test_defaults_depend_on_the_model_and_the_task(model: Model, chat, data, defaults):
    path = model(**({"chat_template": TEMPLATE} if chat else {}))
    config = config_of(path, **data)
    assert changed(config, **data) == defaults
    assert explained_defaults(config).keys() == {*defaults, "model.packing"}
    assert GRPOConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("chat", "task", "expected"),
    [
        (True, {"template": "r1_zero"}, ("r1_zero", "off")),
        (True, {"template": "question_only"}, ("question_only", "on")),
        (True, {"answer_in": "tags"}, ("r1_zero", "off")),
        (False, {"answer_in": "boxed"}, ("boxed", "off")),
        (False, {"answer_in": "tags"}, ("r1_zero", "off")),
        (True, {}, ("boxed", "on")),
        (False, {}, ("r1_zero", "off")),
    ],
)
def test_the_prompt_asks_for_what_the_reward_reads(model: Model, chat, task, expected):
    path = model(**({"chat_template": TEMPLATE} if chat else {}))
    config = config_of(path, task={"name": "math", **task})
    assert (config.task.template, config.model.chat_template) == expected


@pytest.mark.parametrize(
    ("chat", "sections", "expected"),
    [
        (True, {"task": {"code_in": "completion"}}, ("completion", "off")),
        (True, {"model": {"chat_template": "off"}}, ("completion", "off")),
        (False, {"model": {"chat_template": "/my.jinja"}}, ("block", "/my.jinja")),
        (False, {"task": {"code_in": "block"}}, ("block", "off")),
    ],
)
def test_code_is_a_block_in_an_answer_or_continues_the_prompt(
    model: Model, chat, sections, expected
):
    path = model(**({"chat_template": TEMPLATE} if chat else {}))
    config = config_of(path, **{**sections, "task": {**CODE, **sections.get("task", {})}})
    assert (config.task.code_in, config.model.chat_template) == expected


@pytest.mark.parametrize("chat", [False, True])
def test_a_chat_template_of_the_users_makes_the_prompt_a_message(model: Model, chat):
    path = model(**({"chat_template": TEMPLATE} if chat else {}))
    config = config_of(path, **MATH, model={"chat_template": "/my.jinja"})
    assert config.task.template == "boxed"
    assert "task.template" in explained_defaults(config)
    mixed = config_of(path, task={"mix": {"math": 1}}, model={"chat_template": "/my.jinja"})
    assert mix_of(mixed.task.mix)["math"]["template"] == "boxed"


def test_a_prompt_of_a_mix_that_begins_the_response_is_no_message(model: Model):
    path = model(chat_template=TEMPLATE)
    begun = {"name": "math", "weight": 1, "template": "r1_zero"}
    tags = {"name": "math", "weight": 1, "answer_in": "tags"}
    for one in (begun, tags):
        config = config_of(path, task={"mix": {"math": 1, "other": one, "keyword": 1}})
        assert config.model.chat_template == "off"
        assert mix_of(config.task.mix)["other"]["template"] == "r1_zero"
        assert "model.chat_template" not in explained_defaults(config)


def test_an_invalid_chat_template_is_refused_by_its_own_check(model: Model):
    with pytest.raises(ConfigError, match=r"^model\.chat_template=3: must be one of off, on"):
        config_of(model(chat_template=TEMPLATE), **MATH, model={"chat_template": 3})


@pytest.mark.parametrize(
    ("context", "tokens"), [(64, 32), (511, 255), (512, 256), (1, 1), (None, 256)]
)
def test_reasoning_has_at_most_half_the_context(model: Model, context, tokens):
    config = config_of(model(context=context), **MATH)
    assert config.rollout.max_new_tokens == tokens


@pytest.mark.parametrize(
    ("rounds", "warmup"), [(1, 1), (20, 1), (21, 2), (96, 5), (100, 5), (10**9, 5)]
)
def test_the_warm_up_is_a_twentieth_of_the_rounds_at_most_five(model: Model, rounds, warmup):
    assert config_of(model(), rounds=rounds).optim.warmup_rounds == warmup


def test_given_values_go_before_those_of_the_model(model: Model):
    given = {
        "optim": {"lr": 1e-4, "warmup_rounds": 0},
        "callbacks": {"kl_band": None},
        "rollout": {"max_new_tokens": 100},
        "task": {"name": "math", "template": "question_only"},
    }
    path = model(chat_template=TEMPLATE)
    model = {"chat_template": "off", "packing": False}
    config = config_of(path, **given, model=model)
    assert config.model.packing is False
    assert (config.optim.lr, config.optim.warmup_rounds) == (1e-4, 0)
    assert config.callbacks.kl_band is None
    assert config.rollout.max_new_tokens == 100
    assert (config.task.template, config.model.chat_template) == ("question_only", "off")
    assert explained_defaults(config) == {}
    # The default of callbacks.kl_band depends on the given rollout.max_new_tokens.
    del given["callbacks"]
    assert config_of(path, **given).callbacks.kl_band == (0.0, 20.0)


def test_no_band_where_no_kl_is_measured(model: Model):
    config = config_of(model(), loss={"kl_monitor": False})
    assert config.callbacks.kl_band is None
    assert "callbacks.kl_band" not in explained_defaults(config)


def test_invalid_values_are_refused_by_their_own_check(model: Model):
    path = model()
    for data, words in (
        ({"rollout": {"max_new_tokens": "many"}}, "rollout.max_new_tokens=many: must be"),
        ({"rounds": 0}, "rounds=0: must be"),
        ({"model": {"lora_rank": 0}}, "model.lora_rank=0: must be"),
        ({"optim": 3}, "optim=3: must be a mapping"),
    ):
        with pytest.raises(ValueError, match=words):
            config_of(path, **data)


def test_a_policy_of_this_package_keeps_the_defaults(tmp_path: Path):
    own = tmp_path / "own"
    shutil.copytree(SHIPPED_POLICY, own)
    for path in (own, tmp_path / "missing"):
        assert changed(config_of(str(path))) == {}


def test_a_model_that_is_not_on_this_machine_has_the_defaults_of_its_kind(monkeypatch):
    monkeypatch.setattr(json_files, "downloaded", lambda hub_id: None)
    assert facts_of("org/name") == ModelFacts()
    assert changed(config_of("org/name")) == {**OF_TEXT, "model.packing": False}


def test_files_of_a_download_decide(model: Model, monkeypatch):
    directory = Path(model(chat_template=TEMPLATE))
    monkeypatch.setattr(json_files, "downloaded", {"org/name": directory}.get)
    assert config_of("org/name").model.chat_template == "on"


def test_a_complete_config_reads_no_files(model: Model, monkeypatch):
    complete = config_of(model(chat_template=TEMPLATE)).to_dict()
    monkeypatch.setattr(parsing, "facts_of", lambda path: pytest.fail("reads the model"))
    assert GRPOConfig.from_dict(complete).to_dict() == complete


def test_a_model_is_read_once(model: Model, monkeypatch):
    path, read = model(chat_template=TEMPLATE), []
    monkeypatch.setattr(parsing, "facts_of", lambda path: (read.append(path), facts_of(path))[1])
    task = {"mix": {"math": 1, "hard": {"name": "math", "weight": 1}}}
    config = config_of(path, task=task)
    assert read == [path]
    assert explained_defaults(config)["model.chat_template"]
    assert read == [path] * 2


def test_settings_that_need_the_models_files_are_valid_once_these_are_fetched(
    tmp_path, monkeypatch
):
    hub = FakeHub(tmp_path, monkeypatch)
    hub.add("org/chat", chat_template=TEMPLATE)
    data = {"model": {"path": "org/chat", "system": "Be short."}}
    with pytest.raises(ConfigError, match=r"^model\.system=.*: has no effect"):
        GRPOConfig.from_dict(data)
    assert GRPOConfig.from_dict(prepared(data)).model.chat_template == "on"


def test_a_model_that_cannot_be_fetched_is_refused_unless_another_process_needs_it(
    tmp_path, monkeypatch
):
    FakeHub(tmp_path, monkeypatch)
    data = {"model": {"path": "org/none"}}
    with pytest.raises(ConfigError, match=r"^model\.path=org/none: no such directory, and"):
        prepared(data)
    assert prepared(data, must_fetch=False) == data


def test_tasks_of_a_mix_have_them_too(model: Model):
    mix = {"math": 1, "easy": {"name": "math", "weight": 1, "template": "question_only"}}
    config = config_of(model(chat_template=TEMPLATE), task={"mix": {**mix, "keyword": 1}})
    templates = {label: entry.get("template") for label, entry in mix_of(config.task.mix).items()}
    assert templates == {"math": "boxed", "easy": "question_only", "keyword": None}
    assert config.model.chat_template == "on"
    assert config.rollout.max_new_tokens == 256
    assert GRPOConfig.from_dict(config.to_dict()) == config


def test_reasons_name_what_decided(model: Model):
    full, lora = (
        explained_defaults(config_of(model(), model=settings))["optim.lr"]
        for settings in ({}, {"lora_rank": 2})
    )
    assert (full, lora) == (
        "all weights of a Hugging Face model",
        "adapters of a Hugging Face model",
    )


@pytest.mark.parametrize(
    ("files", "has"),
    [
        ({}, False),
        ({"chat_template.jinja": TEMPLATE}, True),
        ({"tokenizer_config.json": json.dumps({"chat_template": TEMPLATE})}, True),
        ({"tokenizer_config.json": json.dumps({"chat_template": None})}, False),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {"chat_template": [{"name": "default", "template": TEMPLATE}]}
                )
            },
            True,
        ),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {"chat_template": [{"name": "tool_use", "template": TEMPLATE}, 3]}
                )
            },
            False,
        ),
        ({"tokenizer_config.json": "[1, 2"}, False),
    ],
)
def test_where_a_chat_template_is_found(tmp_path: Path, files, has):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "n_positions": 128}')
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    facts = ModelFacts(has_chat_template=has, context_length=128, packs=True)
    assert facts_of(str(tmp_path)) == facts


TESTED = "packing is tested with this kind of model"
UNTESTED = "packing is not tested with this kind of model"


@pytest.mark.parametrize(
    ("config", "packs"),
    [
        ({"model_type": "llama"}, True),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}, True),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096}, False),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 2}, True),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"model_type": "qwen3", "layer_types": "full_attention"}, False),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}, True),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}}, True),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "dynamic"}}, False),
        ({"model_type": "llama", "rope_scaling": [2]}, False),
        ({"model_type": "mistral"}, False),
        ({"model_type": ["llama"]}, False),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, False),
        ({"architectures": ["LlamaForCausalLM"]}, False),
    ],
    ids=str,
)
def test_a_model_packs_by_default_if_tests_compare_its_packed_rows(
    tmp_path: Path, config: dict[str, Any], packs: bool
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = config_of(str(tmp_path))
    assert found.model.packing is packs
    assert explained_defaults(found)["model.packing"] == (TESTED if packs else UNTESTED)
    for given in (False, True):
        assert config_of(str(tmp_path), model={"packing": given}).model.packing is given


@pytest.mark.parametrize(
    ("placement", "key"), [("disaggregated", "learner_gpus"), ("colocated", "worker_gpus")]
)
@pytest.mark.parametrize("hugging_face", [False, True])
def test_no_policy_packs_by_default_on_a_gpu(
    model: Model, hugging_face: bool, placement: str, key: str
):
    data = {"placement": placement, "resources": {key: 1.0}}
    chosen = {"path": model()} if hugging_face else {}
    found = GRPOConfig.from_dict({**data, "model": chosen})
    assert not found.model.packing
    reason = "on a GPU, packing can take longer than padding"
    assert explained_defaults(found)["model.packing"] == reason
    assert GRPOConfig.from_dict({**data, "model": {**chosen, "packing": True}}).model.packing


def test_generators_on_a_gpu_do_not_decide_how_a_learner_on_a_cpu_packs():
    resources = {"generator_gpus": 1.0}
    config = GRPOConfig.from_dict({"placement": "disaggregated", "resources": resources})
    assert config.model.packing


def test_a_policy_without_text_has_no_default_for_packing_on_a_gpu():
    data = {"placement": "colocated", "resources": {"worker_gpus": 1.0}}
    config = GRPOConfig.from_dict({**data, "task": {"name": "control"}})
    assert explained_defaults(config) == {}


def test_every_policy_of_this_package_packs_by_default_on_a_cpu(tmp_path: Path):
    own = tmp_path / "own"
    shutil.copytree(SHIPPED_POLICY, own)
    assert config_of(str(own)).model.packing
    for data in ({}, MATH, {"task": {"name": "guess"}}, {"model": {"preset": "course"}}):
        config = GRPOConfig.from_dict(data)
        assert config.model.packing
        assert "model.packing" not in explained_defaults(config)
        without = {**data, "model": {**data.get("model", {}), "packing": False}}
        assert not GRPOConfig.from_dict(without).model.packing


def test_a_stored_trial_keeps_the_packing_that_it_began_with(model: Model):
    for data in ({}, {"model": {"path": model()}}, {"task": {"name": "control"}}):
        stored = GRPOConfig.from_dict(data).to_dict()
        for began in (False, True):
            stored["model"]["packing"] = began
            resumed = GRPOConfig.from_dict(json.loads(json.dumps(stored)))
            assert resumed.model.packing is began


def test_a_teacher_is_not_packed(model: Model):
    loss = {"teacher": model(), "teacher_coef": 1.0}
    config = GRPOConfig.from_dict({"loss": loss})
    assert config.model.packing
    assert config.teacher is not None
    assert not config.teacher.packing


@pytest.mark.parametrize("config", ["[1, 2", "{}", '{"vocab_size": 3}', None])
def test_other_directories_have_no_facts(tmp_path: Path, config):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert facts_of(str(tmp_path)) is None


def test_the_reference_shows_them():
    (row,) = (line for line in page().splitlines() if line.startswith("| `optim.lr` |"))
    assert "; Hugging Face model: `5e-05` with LoRA, else `5e-06` |" in row
    shown = " ".join(settings("warmup_rounds").split())
    assert "With a Hugging Face model the default is a twentieth of the rounds" in shown


def test_the_reference_shows_the_default_on_a_gpu():
    (row,) = (line for line in page().splitlines() if line.startswith("| `model.packing` |"))
    assert "| `true`; Hugging Face model: `true` for llama, qwen2, qwen3 without" in row
    assert ", else `false`; on a GPU: `false` |" in row
    assert "On a GPU the default is false." in " ".join(settings("packing").split())


def test_every_default_of_a_model_or_a_gpu_tells_its_reason_and_its_value():
    declared = [
        default for check in CHECKS.values() for default in (*check.of_models, *check.of_gpus)
    ]
    assert len(declared) == 11
    for default in declared:
        assert default.told
        assert len(default.because) <= 60
