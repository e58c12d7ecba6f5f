"""Training with a teacher: advantages computed by hand, whole rounds, and rejected settings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policies import sharpened, write_quick_policy

from grpo_trainable.algo import ADVANTAGES, teacher_advantages
from grpo_trainable.command_line import UsageError
from grpo_trainable.config import ConfigError, GRPOConfig
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.learner import Learner
from grpo_trainable.learner.teacher import check_teacher
from grpo_trainable.models.directory import SHIPPED_POLICY, read_tokenizer
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.scoring import response_log_probs
from grpo_trainable.models.store import load_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.protocol.rollout import RolloutGroup, collate
from grpo_trainable.tasks.input_files import input_files
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.transports.in_process import InProcess
from tuning.memory import need_of

pytestmark = pytest.mark.numerics

# ---- Examples by hand --------------------------------------------------------------------------


def test_a_token_is_worth_how_much_likelier_the_teacher_finds_it():
    # log(0.5/0.25) = 0.6931472, log(0.1/0.4) = −1.3862944, and 0 outside the mask.
    behaviour = torch.tensor([[0.25, 0.4, 0.5]]).log()
    teacher = torch.tensor([[0.5, 0.1, 0.9]]).log()
    teacher[0, 2] = math.nan
    mask = torch.tensor([[True, True, False]])
    found = teacher_advantages(behaviour, teacher, mask)
    assert found.tolist() == [pytest.approx([0.6931472, -1.3862944, 0.0])]


def test_the_gradient_is_that_of_the_reverse_kl_to_the_teacher():
    # The vocabulary has three tokens. If each token is weighted by its probability, the policy
    # gradient of the advantages is minus the gradient of KL(π ‖ π_T).
    logits = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    log_probs = logits.log_softmax(0)
    kl = (log_probs.exp() * (log_probs - teacher)).sum()
    (wanted,) = torch.autograd.grad(kl, logits)

    every = torch.ones(1, 3, dtype=torch.bool)
    advantages = teacher_advantages(log_probs.detach()[None], teacher[None], every)[0]
    log_probs = logits.log_softmax(0)
    expected_loss = -(log_probs.detach().exp() * advantages * log_probs).sum()
    (found,) = torch.autograd.grad(expected_loss, logits)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_zero_leaves_rewards_out():
    assert ADVANTAGES["zero"](torch.tensor([[1.0, 5.0]]), eps=1e-8).tolist() == [[0.0, 0.0]]


# ---- In rounds ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a policy with a different shape, the same tokenizer and sharper probabilities."""
    directory = tmp_path_factory.mktemp("teacher")
    small = {"context_length": 64, "d_model": 16, "d_ff": 32}
    return write_quick_policy(directory, make=sharpened, seed=8, **small)


def config_of(policy_path: str, **loss: Any) -> GRPOConfig:
    return GRPOConfig.from_dict(
        {
            "model": {"path": policy_path},
            "rollout": {
                "prompts": 4,
                "group_size": 3,
                "min_new_tokens": 3,
                "max_new_tokens": 10,
                "temperature": 0.7,
            },
            "optim": {"lr": 1e-2},
            "loss": loss,
        }
    )


def learner_with_rollouts(config: GRPOConfig) -> tuple[Learner, list[RolloutGroup]]:
    transport = InProcess()
    learner, generator = Learner(config, transport), Generator(config, transport)
    generator.load(learner.publish().handle)
    prompts = Prompts(config, build_task(config), read_tokenizer(config.model.path))
    unit = generator.generate([prompts.request("train", index) for index in range(4)])
    rewards = torch.tensor([0.0, 1.0, 0.25])
    return learner, [replace(group, rewards=rewards, uses=1) for group in unit.groups]


def teacher_log_probs(config: GRPOConfig, path: str, groups: list[RolloutGroup]) -> Any:
    """Return the batch of the groups and the log-probs of its tokens under the policy at `path`."""
    model, tokenizer = load_policy(path)
    batch = collate(groups, [torch.zeros(3)] * len(groups), tokenizer.pad_id)
    with torch.no_grad():
        log_probs, _ = response_log_probs(
            model,
            batch.input_ids,
            batch.target_ids,
            batch.response_mask,
            temperature=config.rollout.temperature,
            min_new_tokens=config.rollout.min_new_tokens,
            end_ids=tokenizer.end_ids,
        )
    return batch, log_probs


def flattened(config: ModelConfig, seed: int) -> TransformerLM:
    """Return a `sharpened` model with less certain tokens."""
    model = sharpened(config, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(0.7)
    return model


@pytest.mark.slow
def test_rounds_bring_the_policy_to_its_teacher(tmp_path):
    policy = write_quick_policy(tmp_path / "policy", make=flattened, seed=8)
    teacher = write_quick_policy(tmp_path / "teacher", make=sharpened, seed=8)
    loss = {"type": "reinforce_with_baseline", "aggregation": "token_mean", "advantage": "zero"}
    config = GRPOConfig.from_dict(
        {
            "model": {"path": policy},
            "rollout": {"prompts": 8, "group_size": 8, "max_new_tokens": 10, "temperature": 1.0},
            "optim": {"lr": 3e-3},
            "loss": {**loss, "teacher": teacher},
        }
    )
    transport = InProcess()
    learner, generator = Learner(config, transport), Generator(config, transport)
    prompts = Prompts(config, build_task(config), read_tokenizer(policy))
    nats = []
    for round_ in range(12):
        generator.load(learner.publish().handle)
        asked = [prompts.request("train", 8 * round_ + i) for i in range(8)]
        groups = [replace(group, uses=1) for group in generator.generate(asked).groups]
        nats.append(learner.update([groups]).teacher_nats)
    # The teacher is the only signal, so KL(π ‖ π_T) per response falls by about a third.
    assert sum(nats[-4:]) < 0.8 * sum(nats[:4])


@pytest.mark.slow
def test_a_step_minimises_reward_and_reverse_kl_together(policy_path, teacher_path):
    config = config_of(
        policy_path,
        type="reinforce_with_baseline",
        advantage="group_mean",
        aggregation="token_mean",
        teacher=teacher_path,
        teacher_coef=0.5,
    )
    learner, groups = learner_with_rollouts(config)
    batch, teacher = teacher_log_probs(config, teacher_path, groups)
    mask, behaviour = batch.response_mask, batch.behaviour_log_probs
    rewards = torch.cat([group.rewards - group.rewards.mean() for group in groups])
    advantages = rewards.unsqueeze(1) + 0.5 * (teacher - behaviour)
    # At lag 0, the policy is the one that sampled.
    expected = -(advantages * behaviour)[mask].mean()

    updated = learner.update([groups])

    assert updated.steps[0].loss == pytest.approx(float(expected), rel=1e-4)
    nats = float((behaviour - teacher)[mask].sum()) / len(mask)
    assert updated.teacher_nats == pytest.approx(nats, rel=1e-4)
    # The reported advantage of a response comes from its reward alone.
    assert updated.responses.advantages == pytest.approx(rewards.numpy(), abs=1e-6)


@pytest.mark.slow
def test_the_policy_itself_teaches_nothing(policy_path):
    config = config_of(policy_path, advantage="zero", teacher=policy_path)
    learner, groups = learner_with_rollouts(config)
    updated = learner.update([groups])
    assert updated.teacher_nats == pytest.approx(0, abs=1e-4)
    assert updated.steps[0].loss == pytest.approx(0, abs=1e-4)


@pytest.mark.slow
def test_without_a_teacher_nothing_is_measured(policy_path):
    learner, groups = learner_with_rollouts(config_of(policy_path))
    assert learner.update([groups]).teacher_nats is None


# ---- Refusals ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_teacher_with_other_tokens_is_refused(policy_path, tmp_path: Path):
    tokenizer = Tokenizer.train(["other words altogether " * 20], 270)
    write_quick_policy(tmp_path / "other", tokenizer=tokenizer)
    config = config_of(policy_path, teacher=str(tmp_path / "other"))
    for check in (check_teacher, lambda config: Learner(config, InProcess())):
        with pytest.raises(ValueError, match=r"^loss\.teacher=.*: its tokenizer differs"):
            check(config)


def test_a_teacher_that_is_not_there_is_refused_by_name(policy_path, tmp_path: Path):
    with pytest.raises(ValueError, match=rf"^loss\.teacher={tmp_path}/none: no such directory"):
        check_teacher(config_of(policy_path, teacher=f"{tmp_path}/none"))


def test_a_teacher_tells_its_context_and_no_teacher_none(policy_path, teacher_path):
    assert check_teacher(config_of(policy_path, teacher=teacher_path)) == 64
    assert check_teacher(config_of(policy_path)) is None


def test_the_files_of_a_teacher_are_inputs_of_the_trial(policy_path, teacher_path):
    files = input_files(config_of(policy_path, teacher=teacher_path))
    assert files["loss.teacher/policy.safetensors"] == Path(teacher_path) / "policy.safetensors"
    assert files["model.path/policy.safetensors"] == Path(policy_path) / "policy.safetensors"
    assert not [key for key in input_files(config_of(policy_path)) if key.startswith("loss.")]


def test_a_tokenizer_is_part_of_one_with_more_tokens():
    shipped = read_tokenizer(str(SHIPPED_POLICY))
    assert shipped.is_part_of(read_tokenizer(None))
    bytes_alone = Tokenizer.train(["a"], 258)
    assert bytes_alone.is_part_of(shipped)
    assert not shipped.is_part_of(bytes_alone)


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        ({"advantage": "zero"}, r"loss\.advantage=zero: needs loss\.teacher"),
        ({"teacher_coef": 0.5}, r"loss\.teacher_coef=0\.5: has no effect with loss\.teacher=none"),
    ],
)
def test_settings_that_need_a_teacher_are_refused_without_one(loss, line):
    with pytest.raises(ConfigError, match=line):
        GRPOConfig.from_dict({"loss": loss})


def test_the_memory_of_a_trial_includes_its_teacher(policy_path, teacher_path):
    trial = config_of(policy_path, teacher=teacher_path)
    parameters = sum(p.numel() for p in load_policy(teacher_path)[0].parameters())
    need = need_of(trial)
    assert need.estimate is not None
    (bytes_,) = [part.bytes for part in need.estimate.parts if part.what == "teacher"]
    assert bytes_ == 4 * parameters
    with pytest.raises(UsageError, match=r"^loss\.teacher=/none: no such directory"):
        need_of(config_of(policy_path, teacher="/none"))
