"""The generator with the shipped policy, and the colocated worker."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from agreeing import assert_agree, assert_same_bits
from policies import Mailbox
from virtual_time import one_token_group

from grpo_trainable.cluster.colocated import Colocated
from grpo_trainable.config import GRPOConfig
from grpo_trainable.generator import generator
from grpo_trainable.generator.generator import Generator, _Rollouts, _scored
from grpo_trainable.learner.learner import Learner
from grpo_trainable.learner.log_probs import Reference
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.protocol.messages import Cancelled, FailedPrompt, Sampled, Scored
from grpo_trainable.protocol.rollout import PolicyWeights, Request, RolloutGroup
from grpo_trainable.tasks import RewardError, Score, as_score, keyword_inclusion_reward_fn
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.transports.in_process import InProcess


def config_of(**values: Any) -> GRPOConfig:
    data: dict[str, Any] = {
        "rollout": {"prompts": 4, "group_size": 3, "max_new_tokens": 16},
        "eval": {"prompts": 3, "samples": 2},
        "task": {"match": "substring"},
        "resources": {"generator_cpus": 1.0},
    }
    for name, value in values.items():
        data[name] = {**data[name], **value} if isinstance(data.get(name), dict) else value
    if "reward" in data["task"]:
        del data["task"]["match"]  # only the task's built-in reward reads `match`
    return GRPOConfig.from_dict(data)


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def prompts_of(config: GRPOConfig) -> Prompts:
    return Prompts(config, build_task(config), read_tokenizer(None))


def requests_of(config: GRPOConfig, stream: str, prompt_indices: Sequence[int]) -> list[Request]:
    prompts = prompts_of(config)
    return [prompts.request(stream, index) for index in prompt_indices]


def sample(config: GRPOConfig, stream: str, prompt_indices: Sequence[int]) -> Scored:
    generator = Generator(config, InProcess())
    try:
        unit = generator.generate(requests_of(config, stream, prompt_indices))
        return generator.score(unit.number) if isinstance(unit, Sampled) else unit
    finally:
        generator.close()


def score_groups(groups: list[RolloutGroup], scores: list[list[Score | RewardError]]) -> Scored:
    rollouts = _Rollouts(
        stream="train", groups=groups, rubrics=[None] * len(groups), completions=[]
    )
    return _scored(rollouts, scores, weights={}, loaded=[], spans=[])


def texts_of(unit: Scored) -> list[list[str]]:
    decode = read_tokenizer(None).decode
    return [
        [decode(i[m].tolist()) for i, m in zip(g.response_ids, g.response_mask, strict=True)]
        for g in unit.groups
    ]


@pytest.mark.slow
def test_groups_are_scored_by_the_task_in_the_order_of_the_requests() -> None:
    config = config_of()
    unit = sample(config, "train", [5, 2, 9])
    assert [group.prompt_index for group in unit.groups] == [5, 2, 9]
    prompts = prompts_of(config)
    for group, texts in zip(unit.groups, texts_of(unit), strict=True):
        truth = prompts.ground_truth("train", group.prompt_index)
        expected = [keyword_inclusion_reward_fn(text, truth) for text in texts]
        assert group.rewards.tolist() == expected
        assert group.rewards.dtype == torch.float32
        assert group.uses == 0
    means = [float(group.rewards.mean()) for group in unit.groups]
    assert [group.answer_mean for group in unit.groups] == pytest.approx(means)
    for group in unit.groups:
        assert group.answer_rewards is not None
        assert group.format_rewards is not None
        assert group.answer_rewards.equal(group.rewards.double())
        assert group.format_rewards.shape == group.rewards.shape
    assert (unit.failed, unit.reward_errors) == ([], 0)


def test_evaluation_is_one_stage_with_sizes_of_its_own() -> None:
    config = config_of(eval={"temperature": 0.5})
    unit = sample(config, "eval", [0, 1, 2])
    assert [len(group.response_ids) for group in unit.groups] == [2, 2, 2]
    assert [span.stage for span in unit.spans] == ["eval", "eval"]
    assert requests_of(config, "eval", [0])[0].limits.temperature == 0.5


@pytest.mark.slow
def test_training_and_held_out_prompts_never_share_a_draw() -> None:
    config = config_of(eval={"samples": 3})
    train, held_out = sample(config, "train", [0]), sample(config, "eval", [0])
    assert prompts_of(config).text("train", 0) != prompts_of(config).text("eval", 0)
    assert texts_of(train) != texts_of(held_out)


@pytest.mark.slow
def test_the_same_unit_gives_the_same_bits_in_any_generator() -> None:
    config = config_of()
    first, again = sample(config, "train", [3, 4]), sample(config, "train", [3, 4])
    assert_same_bits(first.groups, again.groups)
    for a, b in zip(first.groups, again.groups, strict=True):
        assert a.rewards.equal(b.rewards)


@pytest.mark.slow
def test_a_generator_with_the_reference_measures_what_is_trained_on_and_nothing_else() -> None:
    config = config_of(placement="disaggregated", resources={"reference": "generator"})
    unit = sample(config, "train", [3, 4])
    assert [span.stage for span in unit.spans] == ["rollout", "reference", "reward"]
    for group in unit.groups:
        # Before any training, the reference is the policy that sampled.
        assert group.reference_log_probs is not None
        assert torch.allclose(group.reference_log_probs, group.behaviour_log_probs, atol=1e-4)
        assert not group.reference_log_probs[~group.response_mask].any()
    held_out = sample(config, "eval", [0])
    assert [group.reference_log_probs for group in held_out.groups] == [None]
    assert [group.reference_log_probs for group in sample(config_of(), "train", [3]).groups] == [
        None
    ]


@pytest.mark.slow
def test_the_reference_stays_what_it_was_when_new_weights_are_loaded() -> None:
    config = config_of(placement="disaggregated", resources={"reference": "generator"})
    transport = InProcess()
    learner, generator = Learner(config, transport), Generator(config, transport)
    requests = requests_of(config, "train", [3, 4])
    first = generator.generate(requests).groups
    with torch.no_grad():
        learner.policy.embedding.weight.mul_(1.5)
    generator.load(learner.publish().handle)
    moved = generator.generate(requests).groups
    assert not moved[0].behaviour_log_probs.equal(first[0].behaviour_log_probs)
    (again,) = Reference(config, read_tokenizer(None), torch.device("cpu")).annotate(moved[:1])
    expected = again.reference_log_probs
    assert torch.allclose(moved[0].reference_log_probs, expected, atol=1e-4)
    assert not torch.allclose(moved[0].behaviour_log_probs, expected, atol=1e-2)


@pytest.mark.slow
def test_spans_are_what_the_generator_did_in_order() -> None:
    config = config_of()
    generator = Generator(config, InProcess())
    requests = requests_of(config, "train", [0])
    first, second = generator.generate(requests).spans, generator.generate(requests).spans
    assert [span.stage for span in first] == ["rollout", "reward"]
    assert [span.stage for span in second] == ["idle", "rollout", "reward"]
    times = [time for span in (*first, *second) for time in (span.start, span.end)]
    assert times == sorted(times)
    assert second[1].seconds > 0


@pytest.mark.slow
def test_progress_changes_with_every_token() -> None:
    generator = Generator(config_of(), InProcess())
    seen, between = [], generator.between_tokens

    def look() -> None:
        between()
        seen.append(generator.progress())

    generator.between_tokens = look
    generator.generate(requests_of(config_of(), "train", [0]))
    assert len(seen) > 1
    assert len(set(seen)) == len(seen)


# ---- Weight updates within a batch -------------------------------------------------------------


def learned(config: GRPOConfig, mailbox: Mailbox, steps: int) -> None:
    """Publish versions 0 to `steps` of a policy that changes."""
    learner = Learner(config, mailbox)
    learner.publish()
    for _ in range(steps):
        with torch.no_grad():
            for parameter in learner.policy.parameters():
                parameter.mul_(1.02)
        learner.optimizer.steps += 1
        learner.update([])  # a round without a batch
        learner.publish()


def mid_batch_config(weight_update: str) -> GRPOConfig:
    return config_of(
        placement="disaggregated",
        lag=2,
        weight_update=weight_update,
        rollout={"prompts": 4, "group_size": 3, "min_new_tokens": 16, "max_new_tokens": 16},
    )


def mid_batch(weight_update: str) -> tuple[Generator, Mailbox, list[Request]]:
    config = mid_batch_config(weight_update)
    mailbox = Mailbox()
    learned(config, mailbox, 3)
    generator = Generator(config, mailbox)
    generator.load(0)
    return generator, mailbox, requests_of(config, "train", [0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("weight_update", ["in_flight", "interrupt_recompute"])
def test_deposits_are_taken_in_before_the_next_token_and_told(weight_update: str) -> None:
    generator, _, requests = mid_batch(weight_update)
    between, calls = generator.between_tokens, 0

    def deposit_before_some() -> None:
        nonlocal calls
        if calls in (5, 9):
            # Deposit from another thread, as the actor does. Of two deposits, the newer one counts.
            for version in {5: (1,), 9: (2, 3)}[calls]:
                thread = Thread(target=generator.deposit, args=(version,))
                thread.start()
                thread.join()
        calls += 1
        between()

    generator.between_tokens = deposit_before_some
    unit = generator.generate(requests)
    for group in unit.groups:
        assert group.token_versions.tolist() == [[0] * 5 + [1] * 4 + [3] * 7] * 3
        assert group.token_rounds.equal(group.token_versions)
        assert (group.oldest_version, group.oldest_round) == (0, 0)
    assert [(loaded.version, loaded.round) for loaded in unit.loaded] == [(1, 1), (3, 3)]
    # Loading weights interrupts the rollout: the spans do not overlap.
    assert [span.stage for span in unit.spans] == [
        *("idle", "rollout", "sync", "rollout", "sync", "rollout", "reward")
    ]
    times = [time for span in unit.spans for time in (span.start, span.end)]
    assert times == sorted(times)
    assert generator.generate(requests).loaded == []


@pytest.mark.slow
def test_deposit_while_idle_is_taken_in_before_the_first_token() -> None:
    generator, mailbox, requests = mid_batch("in_flight")
    deposited = generator.deposit(2)
    assert (deposited.version, deposited.round) == (2, 2)
    assert deposited.bytes == sum(t.nbytes for t in mailbox.snapshots[2].tensors.values())
    unit = generator.generate(requests)
    assert [loaded.version for loaded in unit.loaded] == [2]
    assert all(group.token_versions.unique().tolist() == [2] for group in unit.groups)


def test_a_cancelled_call_ends_before_its_next_token_and_later_calls_are_whole() -> None:
    config = config_of()
    own = Generator(config, InProcess())
    requests = requests_of(config, "train", [3, 4])
    between, calls = own.between_tokens, 0

    def cancel_before_the_third() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            own.cancel(4)  # names no call: the first prompt of this call is 3
            thread = Thread(target=own.cancel, args=(3,))  # in another thread, as in the actor
            thread.start()
            thread.join()
        between()

    own.between_tokens = cancel_before_the_third
    answer = own.generate(requests)
    assert isinstance(answer, Cancelled)
    assert calls == 3
    assert [span.stage for span in answer.spans] == ["rollout"]
    own.between_tokens = between
    again = own.generate(requests)  # the cancellation does not apply to later calls
    assert isinstance(again, Scored)
    assert_same_bits(again.groups, sample(config, "train", [3, 4]).groups)
    own.close()


def test_a_reset_frees_the_old_engine_before_it_builds_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of()
    own = Generator(config, InProcess())
    old = weakref.ref(own.engine)
    build, alive = generator.build_engine, []

    def building(setup: Any) -> Any:
        alive.append(old() is not None)
        return build(setup)

    monkeypatch.setattr(generator, "build_engine", building)
    own.reset(config)
    assert alive == [False]


@pytest.mark.slow
def test_deposit_that_outlives_a_reset_is_lost() -> None:
    generator, mailbox, requests = mid_batch("in_flight")
    config = mid_batch_config("in_flight")
    fetch, reached, go_on = mailbox.fetch, Event(), Event()

    def slow(handle: int, received: Any) -> PolicyWeights:
        if handle == 3:
            reached.set()
            assert go_on.wait(30)
        return fetch(handle)

    mailbox.fetch = slow
    thread = Thread(target=generator.deposit, args=(3,))
    thread.start()
    assert reached.wait(30)
    generator.reset(config)
    generator.load(0)
    go_on.set()
    thread.join()
    unit = generator.generate(requests)
    assert unit.loaded == []
    assert all(group.token_versions.unique().tolist() == [0] for group in unit.groups)


def test_means_of_a_group_tell_form_and_answer_apart_and_what_is_unverified_counts() -> None:
    right, wrong, formless = Score(1.0, 1.0, 1.0), Score(0.0, 1.0, 0.0), Score(0.0, 0.0, 0.0)
    refused = Score(0.0, 1.0, 0.0, verified=False)
    scores: list[list[Score | RewardError]] = [
        [right, wrong, formless, formless],
        [refused, right, refused, right],
        [right, RewardError("no"), refused, right],
    ]
    groups = [one_token_group(i, rewards=[0.0] * 4) for i in range(3)]
    scored = score_groups(groups, scores)
    assert [group.rewards.tolist() for group in scored.groups] == [[1, 0, 0, 0], [0, 1, 0, 1]]
    assert [group.format_mean for group in scored.groups] == [0.5, 1.0]
    assert [group.answer_mean for group in scored.groups] == [0.25, 0.5]
    assert (scored.unverified, scored.reward_errors) == (3, 1)
    assert scored.failed == [FailedPrompt(2, "no", tokens=4)]


def test_a_reward_left_out_on_purpose_drops_its_group_and_is_no_error() -> None:
    right = Score(1.0, 1.0, 1.0)
    left_out, failed = RewardError("None", is_failure=False), RewardError("no", repeats=True)
    groups = [one_token_group(i, rewards=[0.0] * 3) for i in range(3)]
    scored = score_groups(
        groups, [[right] * 3, [right, left_out, right], [left_out, failed, right]]
    )
    assert [group.prompt_index for group in scored.groups] == [0]
    assert scored.failed == [
        FailedPrompt(1, "None", tokens=3, is_failure=False),
        FailedPrompt(2, "no", tokens=3, repeats=True),
    ]
    assert scored.reward_errors == 1


def test_a_reward_that_does_not_judge_the_format_has_no_format_mean() -> None:
    group = one_token_group(0, rewards=[0.0] * 2)
    (scored,) = score_groups([group], [[as_score(1.0), as_score(0.5)]]).groups
    assert (scored.format_mean, scored.answer_mean) == (None, 0.75)


def test_parts_of_a_reward_are_kept_as_the_task_tells_them() -> None:
    group = one_token_group(0, rewards=[0.0] * 2)
    (scored,) = score_groups([group], [[Score(1, 0.1, 0.7), Score(0, 0.1, 0.7)]]).groups
    # values that float32 cannot represent
    assert (scored.format_mean, scored.answer_mean) == (0.1, 0.7)
    assert scored.rewards.dtype == torch.float32


def test_a_group_keeps_every_part_that_the_reward_returned() -> None:
    scores = [Score(1, None, 1, parts={"short": 0.5}), Score(0, None, 0, parts={"found": 2.0})]
    group = one_token_group(0, rewards=[0.0] * 2)
    (scored,) = score_groups([group], [scores]).groups
    assert scored.parts == {"found": [None, 2.0], "short": [0.5, None]}
    (scored,) = score_groups([group], [[Score(1, None, 1), Score(0, None, 0)]]).groups
    assert scored.parts is None
    (scored,) = score_groups([replace(group, info={"found": 1.0})], [scores]).groups
    assert scored.parts is None  # the numbers of an episode are logged as env/NAME_mean


# ---- A user's reward ---------------------------------------------------------------------------

USER_REWARD = """
def length(response, ground_truth):
    return float(len(response))

def parts(response, ground_truth):
    return {"reward": 2.0, "format_reward": 1.0, "answer_reward": 0.5}

def picky(response, ground_truth):
    # Fails on every response to some prompts and on one response to some other prompts.
    if len(response) % 3 == 0:
        raise KeyError("no such word")
    return 1.0
"""


@pytest.fixture
def user_reward(tmp_path: Path) -> Any:
    file = tmp_path / "my_reward.py"
    file.write_text(USER_REWARD)
    return lambda function: config_of(task={"reward": f"{file}:{function}"})


@pytest.mark.slow
def test_reward_of_a_users_file(user_reward: Any) -> None:
    unit = sample(user_reward("length"), "train", [0, 1])
    assert [group.rewards.tolist() for group in unit.groups] == [
        [float(len(text)) for text in texts] for texts in texts_of(unit)
    ]


@pytest.mark.slow
def test_users_format_and_answer_rewards(user_reward: Any) -> None:
    unit = sample(user_reward("parts"), "train", [0])
    assert unit.groups[0].rewards.tolist() == [2.0] * 3
    assert (unit.groups[0].format_mean, unit.groups[0].answer_mean) == (1.0, 0.5)


@pytest.mark.slow
def test_one_failed_reward_drops_its_whole_group(user_reward: Any) -> None:
    prompt_indices = list(range(16))
    texts = texts_of(sample(config_of(), "train", prompt_indices))
    failing = [sum(len(text) % 3 == 0 for text in group) for group in texts]
    assert 0 in failing
    assert any(0 < count < 3 for count in failing)

    unit = sample(user_reward("picky"), "train", prompt_indices)
    kept = [index for index in prompt_indices if failing[index] == 0]
    assert [group.prompt_index for group in unit.groups] == kept
    failed = [i for i in prompt_indices if failing[i]]
    assert [prompt.prompt_index for prompt in unit.failed] == failed
    assert all("no such word" in prompt.reason and prompt.repeats for prompt in unit.failed)
    assert unit.reward_errors == sum(failing)


@pytest.mark.slow
def test_users_reward_is_asked_for_beside_the_calls_and_told_once(user_reward: Any) -> None:
    config = user_reward("length")
    generator = Generator(config, InProcess())
    requests = requests_of(config, "train", [0, 1])
    first, second = generator.generate(requests), generator.generate(requests)
    assert isinstance(first, Sampled)
    assert isinstance(second, Sampled)
    assert [span.stage for span in (*first.spans, *second.spans)] == ["rollout", "idle", "rollout"]
    scored = generator.score(first.number)
    assert [(span.stage, span.concurrent) for span in scored.spans] == [("reward", True)]
    assert scored.loaded == []
    held_out = generator.generate(requests_of(config, "eval", [0]))
    assert isinstance(held_out, Sampled)
    assert [span.stage for span in generator.score(held_out.number).spans] == ["eval"]
    generator.close()


@pytest.mark.slow
def test_reward_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    config = config_of(task={"reward": f"{tmp_path}/missing.py:reward"})
    with pytest.raises(ValueError, match=r"task\.reward=.*missing\.py:reward"):
        Generator(config, InProcess())


# ---- Colocated ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_colocated_is_both_roles_with_weights_of_its_own_for_sampling() -> None:
    config = config_of(optim={"lr": 1e-3})
    worker = Colocated(config, InProcess())
    assert worker.load(worker.publish().handle).version == 0
    unit = worker.generate(requests_of(config, "train", range(4)))
    updated = worker.update([unit.groups])
    assert (updated.version, updated.round) == (1, 1)
    assert updated.steps[0].ratio_max == pytest.approx(1.0, abs=1e-5)

    # Until the next load, the worker samples with the weights from before the update.
    again = worker.generate(requests_of(config, "train", range(4)))
    assert all(
        a.response_ids.equal(b.response_ids) for a, b in zip(unit.groups, again.groups, strict=True)
    )
    assert worker.load(worker.publish().handle).version == 1
    groups = worker.generate(requests_of(config, "train", range(4))).groups
    assert {group.oldest_round for group in groups} == {1}

    state = worker.state()
    other = Colocated(config, InProcess())
    other.load_state(state)
    assert all(other.state().policy[name].equal(w) for name, w in state.policy.items())
    assert other.load(other.publish().handle).version == 1
    worker.close()
    other.close()


class Sleeper:
    """An engine that records when it sleeps, among other calls of a worker."""

    def __init__(self, engine: Any, calls: list[str]) -> None:
        self._engine = engine
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        if name in ("load", "generate"):
            self._calls.append(name)
        return getattr(self._engine, name)

    def sleep(self) -> None:
        self._calls.append("sleep")


@pytest.mark.slow
def test_an_engine_that_can_sleeps_while_the_learner_of_its_worker_works(monkeypatch) -> None:
    calls: list[str] = []

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        return call

    build = generator.build_engine
    monkeypatch.setattr(generator, "build_engine", lambda setup: Sleeper(build(setup), calls))
    for name in ("__init__", "warm_up", "update"):
        monkeypatch.setattr(Learner, name, recorded(f"learner.{name}", getattr(Learner, name)))
    config = config_of()
    worker = Colocated(config, InProcess())
    worker.warm_up(requests_of(config, "train", [0]), 8)
    worker.load(worker.publish().handle)
    worker.update([worker.generate(requests_of(config, "train", range(4))).groups])
    worker.close()
    learner = [n for n, name in enumerate(calls) if name.startswith("learner")]
    assert len(learner) == 3
    assert [calls[n - 1] for n in learner] == ["sleep"] * 3


@pytest.mark.slow
def test_each_role_of_a_colocated_worker_has_its_own_threads() -> None:
    config = config_of(resources={"worker_cpus": 3.0, "generator_cpus": 1.0})
    worker = Colocated(config, InProcess())
    worker.load(worker.publish().handle)
    assert torch.get_num_threads() == 1
    unit = worker.generate(requests_of(config, "train", [0, 1]))
    assert torch.get_num_threads() == 1
    worker.update([unit.groups])
    assert torch.get_num_threads() == 3
    worker.close()


@pytest.mark.slow
def test_with_slots_a_generator_samples_the_same_responses() -> None:
    usual, few = (config_of(rollout={"slots": slots}) for slots in (None, 5))
    whole, queued = (sample(config, "train", range(4)) for config in (usual, few))
    assert_agree(queued.groups, whole.groups, atol=1e-4)
