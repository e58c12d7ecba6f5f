"""Settings under the names of TRL and verl: the error message, and the page that lists them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_trainable.config import CHECKS, ConfigError, GRPOConfig, parse_assignment
from grpo_trainable.config.describe import settings
from grpo_trainable.config.foreign_names import ForeignName
from grpo_trainable.config.parsing import advice_for, advice_for_option
from grpo_trainable.config.schema import TRL, VERL

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "from-trl.md"
ALL = [*TRL.values(), *VERL.values()]


def said(assignment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_assignment(assignment)
    return str(caught.value)


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("learning_rate=1e-5", "learning_rate: unknown key; TRL's learning_rate is optim.lr here"),
        ("optim.learning_rate=1", "unknown key; TRL's learning_rate is optim.lr here"),
        ("beta=0.04", "TRL's beta is loss.kl_coef here"),
        ("num_generations=8", "TRL's num_generations is rollout.group_size here"),
        ("max_completion_length=9", "TRL's max_completion_length is rollout.max_new_tokens here"),
        ("epsilon=0.2", "TRL's epsilon is loss.clip here"),
        (
            "loss_type=dapo",
            "TRL's loss_type is loss.type and loss.aggregation here: grpo, bnpo and dapo are "
            "loss.type=grpo_clip",
        ),
        (
            "per_device_train_batch_size=8",
            "TRL's per_device_train_batch_size is optim.microbatch here: the number of responses "
            "in one forward and backward pass; a gradient step uses rollout.prompts × "
            "rollout.group_size responses",
        ),
        ("top_p=0.9", "TRL's top_p has no counterpart here: responses are sampled from the whole"),
        ("top_p=0.9", "the loss needs log-probs under it; eval.top_p is only for evaluations"),
        (
            "report_to=wandb",
            "TRL's report_to has no counterpart here: every trial writes a log for",
        ),
        ("report_to=wandb", "--tracker wandb, mlflow or trackio also sends each round"),
        ("use_vllm=true", "is engine=vllm here: on CPUs, vLLM also needs placement=disaggregated"),
        ("vllm_gpu_memory_utilization=0.3", "is resources.vllm_memory_share here"),
        ("vllm_tensor_parallel_size=2", "is resources.generator_gpus here"),
        ("vllm_mode=server", "TRL's vllm_mode is placement here: colocate is colocated, server is"),
        ("torch_dtype=bfloat16", "TRL's torch_dtype is model.dtype here"),
        ("use_peft=true", "TRL's use_peft is model.lora_rank here"),
        ("fp16=true", "TRL's fp16 has no counterpart here: model.dtype is float32 or bfloat16"),
        (
            "actor_rollout_ref.rollout.n=8",
            "verl's actor_rollout_ref.rollout.n is rollout.group_size here",
        ),
        ("critic.optim.lr=1e-5", "verl's critic.optim.lr is critic.lr here"),
        ("data.shuffle=true", "verl's data.shuffle has no counterpart here: each pass over the"),
        ("trainer.logger=wandb", "verl's trainer.logger has no counterpart here: every trial"),
        ("target_modules=q_proj", "TRL's target_modules is model.lora_targets here: a field of"),
        (
            "actor_rollout_ref=1",
            "it is a section of verl's config; docs/howto/from-trl.md lists our names",
        ),
    ],
)
def test_the_error_names_our_key(assignment, text):
    error = said(assignment)
    assert "unknown key" in error
    assert text in error
    assert "\n" not in error


def test_a_config_says_the_same_as_the_command_line():
    with pytest.raises(ConfigError, match=r"TRL's num_generations is rollout.group_size here"):
        GRPOConfig.from_dict({"num_generations": 8})
    with pytest.raises(ConfigError, match="it is a section of verl's"):
        GRPOConfig.from_dict({"actor_rollout_ref": {"rollout": {"n": 8}}})


def test_keys_of_ours_are_never_taken_for_theirs():
    assert not {entry.name for entry in ALL} & CHECKS.keys()
    assert advice_for("optim.lrr") is None
    assert said("optim.lrr=1") == "optim.lrr: unknown key; did you mean optim.lr?"


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        (
            "--learning_rate",
            "TRL's learning_rate is optim.lr here; write --set optim.lr=VALUE",
        ),
        ("--learning-rate=1e-5", "write --set optim.lr=VALUE"),
        ("--use_vllm", "write --set engine=vllm"),
        ("--lag", "write --set lag=VALUE"),
        ("--optim.lr", "write --set optim.lr=VALUE"),
        ("--lr", "write --set critic.lr=VALUE or --set optim.lr=VALUE"),
    ],
)
def test_an_option_that_names_a_setting_is_refused_with_the_assignment(option, advice):
    said = advice_for_option(option)
    assert said is not None
    assert said.startswith(advice) or said.endswith(advice)


def test_an_option_without_a_counterpart_is_refused_with_the_reason():
    assert advice_for_option("--output_dir") == TRL["output_dir"].advice
    assert advice_for_option("--bogus") is None


def test_the_list_of_settings_finds_names_of_trl_and_verl():
    shown = settings("learning_rate")
    assert shown.startswith("optim.lr=")
    assert "Elsewhere: learning_rate (TRL), actor_rollout_ref.actor.optim.lr (verl)." in " ".join(
        shown.split()
    )
    with pytest.raises(ConfigError, match="report_to in its name or meaning; TRL's report_to has"):
        settings("report_to")


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
def test_what_is_named_exists_here(entry: ForeignName):
    for ours in entry.ours:
        if "=" in ours:
            key, value = parse_assignment(ours)
            assert CHECKS[key].convert(value) is not None
        else:
            assert ours in CHECKS
    assert entry.ours or entry.hint
    named = re.findall(r"\b(?:rollout|optim|loss|eval|task|model|checkpoint)\.\w+", entry.hint)
    assert set(named) <= CHECKS.keys()


@pytest.mark.parametrize(("library", "table"), [("TRL", TRL), ("verl", VERL)])
def test_the_page_has_the_table(library, table):
    _, _, after = PAGE.read_text(encoding="utf-8").partition(f"## Names of {library}\n")
    rows = [line for line in after.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(
        f"| `{entry.name}` | {', '.join(f'`{key}`' for key in entry.ours) or 'nothing'} | "
        f"{entry.hint} |"
        for entry in table.values()
    )
