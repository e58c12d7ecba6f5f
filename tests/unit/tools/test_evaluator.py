"""Held-out prompts are sampled and scored as in a trial, from checkpoints and policies."""

from __future__ import annotations

import json
import math
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from agreeing import FORKS
from checkpoints import write_checkpoint
from policies import Mailbox, write_quick_policy
from pyarrow.fs import LocalFileSystem

from grpo_trainable.config import GRPOConfig
from grpo_trainable.generator.generator import Generator
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.models.parameters import unique_parameters
from grpo_trainable.models.store import build_policy
from grpo_trainable.pipeline.evaluation import held_out_chunks
from grpo_trainable.protocol.rollout import LiveWeights
from grpo_trainable.storage.checkpointing import (
    MANIFEST,
    CheckpointError,
    TrialState,
    checkpoints_named,
)
from grpo_trainable.storage.object_store import StoredPath
from grpo_trainable.tasks import eval_size
from grpo_trainable.tasks.input_files import input_digests
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.tools.evaluation.checkpoint import read_trained_policy
from grpo_trainable.tools.evaluation.evaluator import (
    PARAMETERS_PER_THREAD,
    Evaluator,
    sampling_threads,
    with_all_prompts,
)
from grpo_trainable.tools.evaluation.generation import Generation
from grpo_trainable.tools.evaluation.policy import digest, load_evaluated_policy
from grpo_trainable.tools.export import ExportError, export

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


def config(policy: str, **sections: Any) -> GRPOConfig:
    return GRPOConfig.from_dict(
        {
            "seed": 5,
            "model": {"path": policy},
            "task": {"match": "substring"},
            "rollout": {"prompts": 3, "group_size": 4, "max_new_tokens": 12},
            "eval": {"prompts": 7, "samples": 3, "temperature": 0.9},
            **sections,
        }
    )


def trained_weights(config: GRPOConfig) -> dict[str, torch.Tensor]:
    """Return the parameters of the config's policy after simulated training."""
    model, _ = build_policy(config.model, config.seed)
    rng = torch.Generator().manual_seed(1)
    tensors = unique_parameters(model)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=rng))
    return {name: tensor.detach() for name, tensor in tensors.items()}


def checkpoint(directory: Path, config: GRPOConfig) -> Path:
    """Write the checkpoint of a trial that has trained six rounds of two steps."""
    state = {
        "config": config.to_dict(),
        "inputs": input_digests(config),
        "learner": {"version": 12, "round": 6},
        "pipeline": {"learner_round": 6},
    }
    write_checkpoint(
        directory,
        TrialState(
            state=state,
            policy=trained_weights(config),
            optimizer={"step": torch.tensor(12.0)},
            groups=[],
        ),
    )
    return directory


def evaluated(config: GRPOConfig, source: Path | None = None, **options: Any) -> list[Generation]:
    trained = None if source is None else read_trained_policy(source)
    evaluator = Evaluator(config, load_evaluated_policy(config, trained), **options)
    with closing(evaluator):
        generations = [own for batch in evaluator.batches() for own in batch]
    assert len(generations) == evaluator.responses
    return generations


def by_the_generator(config: GRPOConfig) -> list[tuple[Any, ...]]:
    """Return the responses and scores of a trial's generator with the trained weights."""
    mailbox = Mailbox()
    weights = LiveWeights(version=12, round=6, tensors=trained_weights(config))
    generator = Generator(config, mailbox)
    generator.load(mailbox.publish(weights))
    _, tokenizer = build_policy(config.model, config.seed)
    prompts = Prompts(config, build_task(config), tokenizer)
    found = []
    for chunk in held_out_chunks(config):
        scored = generator.generate([prompts.request("eval", i) for i in chunk.prompt_indices])
        for group in scored.groups:
            for g, ids in enumerate(group.response_ids):
                mask = group.response_mask[g]
                log_prob = float(group.behaviour_log_probs[g].double().sum())
                text = tokenizer.decode(ids[mask].tolist())
                reward = float(group.rewards[g])
                found.append((group.prompt_index, g, text, int(mask.sum()), log_prob, reward))
    generator.close()
    return found


@pytest.mark.slow
def test_it_samples_and_scores_what_the_trials_generator_does(policy, tmp_path):
    own = config(policy)
    generations = evaluated(own, checkpoint(tmp_path / "checkpoint_000001", own))
    assert [
        (g.prompt_index, g.response_index, g.response, g.tokens, g.log_prob, g.reward)
        for g in generations
    ] == by_the_generator(own)
    assert len({g.response for g in generations}) > 7  # most responses differ
    task = build_task(own)
    for g in generations:
        example = task.eval_examples(7)[g.prompt_index]
        assert (g.prompt, g.ground_truth) == (example.prompt, example.ground_truth)
        assert g.answer is None
        assert g.format_reward == 1.0
        assert g.answer_reward == g.reward
        assert g.category == ("correct" if g.reward else "wrong_answer")


@pytest.mark.slow
def test_weights_that_travel_as_bfloat16_are_evaluated_as_such(policy, tmp_path):
    source = checkpoint(tmp_path / "checkpoint_000001", config(policy))
    half = config(policy, transport_dtype="bfloat16")
    weights = load_evaluated_policy(half, read_trained_policy(source)).weights
    for name, tensor in trained_weights(half).items():
        assert weights.tensors[name].equal(tensor.bfloat16())
    assert evaluated(half, source) != evaluated(config(policy), source)


@pytest.mark.slow
def test_a_policy_without_a_checkpoint_is_evaluated_untrained(policy, tmp_path):
    own = config(policy)
    untrained = load_evaluated_policy(own, None)
    assert (untrained.weights.version, untrained.weights.round) == (0, 0)
    assert (untrained.source, untrained.path) == ("directory", policy)
    trained = read_trained_policy(checkpoint(tmp_path / "checkpoint_000001", own))
    loaded = load_evaluated_policy(own, trained)
    assert (loaded.weights.version, loaded.weights.round) == (12, 6)
    assert (loaded.source, loaded.path) == ("checkpoint", str(tmp_path / "checkpoint_000001"))
    assert loaded.sha256 == digest(trained_weights(own)) != untrained.sha256
    assert evaluated(own) != evaluated(own, tmp_path / "checkpoint_000001")


@pytest.mark.slow
def test_batches_agree_to_rounding(policy):
    whole, single = evaluated(config(policy), batch=1000), evaluated(config(policy), batch=1)
    same = [
        pair for pair in zip(whole, single, strict=True) if pair[0].response == pair[1].response
    ]
    assert len(same) >= len(whole) - FORKS
    for one, other in same:
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-4)


@pytest.mark.slow
def test_more_samples_begin_with_the_fewer(policy):
    few, many = (
        evaluated(config(policy, eval={"prompts": 7, "samples": samples})) for samples in (3, 5)
    )
    begun = [g for g in many if g.response_index < 3]
    differ = [pair for pair in zip(begun, few, strict=True) if pair[0].response != pair[1].response]
    assert len(differ) <= FORKS


@pytest.mark.slow
def test_greedy_responses_do_not_depend_on_the_seed(policy):
    greedy = {"eval": {"prompts": 4, "samples": 1, "temperature": 0.0}}
    responses = [g.response for g in evaluated(config(policy, **greedy))]
    assert responses == [g.response for g in evaluated(config(policy, **greedy, seed=6))]
    sampled = {"eval": {"prompts": 4, "samples": 1, "temperature": 0.9}}
    assert responses != [g.response for g in evaluated(config(policy, **sampled))]


@pytest.mark.slow
def test_a_nucleus_is_sampled_in_evaluations_alone(policy):
    tail = {"prompts": 4, "samples": 3, "temperature": 1.0}
    own = config(policy, eval={**tail, "top_p": 1e-6})
    greedy = config(policy, eval={**tail, "samples": 1, "temperature": 0.0})
    # This nucleus contains only the most likely token, so that token gets the probability 1.
    nucleus = evaluated(own)
    assert [g.response for g in nucleus[::3]] == [g.response for g in evaluated(greedy)]
    assert {g.log_prob for g in nucleus} == {0.0}
    assert evaluated(config(policy, eval={**tail, "top_p": 0.9})) != evaluated(
        config(policy, eval=tail)
    )
    prompts = Prompts(own, build_task(own), read_tokenizer(policy))
    limits = [prompts.request(stream, 0).limits.top_p for stream in ("train", "eval")]
    assert limits == [1.0, 1e-6]


def test_a_response_that_is_cut_off_says_so(policy):
    generations = evaluated(config(policy))
    assert {g.finished for g in generations if g.tokens < 12} <= {True}
    assert any(not g.finished for g in generations)
    assert all(math.isfinite(g.log_prob) and g.log_prob < 0 for g in generations)


def test_all_prompts_are_those_of_one_pass(policy):
    own = config(policy)
    own = with_all_prompts(own, build_task(own))
    examples = build_task(own).eval_examples(own.eval.prompts + 1)
    assert len({example.prompt for example in examples}) == own.eval.prompts
    assert examples[-1].prompt in {example.prompt for example in examples[:-1]}


def test_pairs_of_words_are_fewer_prompts(policy, tmp_path):
    words = config(policy)
    two = config(policy, task={"keywords_per_prompt": 2})
    assert eval_size(build_task(two)) == eval_size(build_task(words)) // 2
    rows = tmp_path / "test.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"p{i}", "answer": "a"}) + "\n" for i in range(9))
    )
    files = config(policy, task={"eval_file": str(rows), "train_file": str(rows)})
    assert eval_size(build_task(files)) == 9


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_sampled(policy, tmp_path):
    rows = tmp_path / "test.jsonl"
    rows.write_text(json.dumps({"prompt": "far too long " * 30, "answer": "a"}) + "\n")
    own = config(policy, task={"eval_file": str(rows), "train_file": str(rows)})
    with pytest.raises(ValueError, match=r"the held-out prompt .far too long.*\d"):
        Evaluator(own, load_evaluated_policy(own, None))
    own = config(policy, rollout={"prompts": 3, "max_new_tokens": 47})
    with pytest.raises(ValueError, match=r"rollout\.max_new_tokens=47: .* valid: at most \d+"):
        Evaluator(own, load_evaluated_policy(own, None))


# ---- Checkpoints -----------------------------------------------------------------------------


def test_the_directory_of_a_trial_stands_for_its_last_checkpoint(policy, tmp_path):
    own = config(policy)
    for number in (1, 2):
        checkpoint(tmp_path / f"checkpoint_00000{number}", own)
    (tmp_path / "result.json").touch()
    assert checkpoints_named(tmp_path)[-1] == tmp_path / "checkpoint_000002"
    assert checkpoints_named(tmp_path / "checkpoint_000001") == [tmp_path / "checkpoint_000001"]
    (tmp_path / "checkpoint_000002" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint_000002/manifest\.json"):
        read_trained_policy(tmp_path)


def test_a_policy_is_read_from_a_store_as_from_a_directory(policy, tmp_path):
    trial = tmp_path / "experiment" / "trial"
    checkpoint(trial / "checkpoint_000001", config(policy))
    stored = StoredPath(LocalFileSystem(), str(trial), "file")
    here, there = read_trained_policy(trial), read_trained_policy(stored)
    assert str(there.directory) == f"file://{here.directory}"
    assert (there.config, there.version, there.round) == (here.config, here.version, here.round)
    for name, tensor in here.tensors.items():
        assert torch.equal(there.tensors[name], tensor)

    assert export(stored, tmp_path / "exported").parameters > 0
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    above = StoredPath(LocalFileSystem(), str(trial.parent), "file")
    with pytest.raises(CheckpointError, match=rf"is an experiment; .*: file://{trial}$"):
        read_trained_policy(above)
    with pytest.raises(ExportError, match="nowhere: is not a directory"):
        export(above / "nowhere", tmp_path / "other")


def test_a_directory_without_a_checkpoint_is_told_so(tmp_path):
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        read_trained_policy(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        read_trained_policy(tmp_path / "nowhere")


def test_an_experiment_is_told_its_trials_by_both_commands(tmp_path):
    """`launch/evaluate.py` and `launch/export.py` take a trial, not a whole experiment."""
    for name in ("sync-0", "sync-1"):
        (tmp_path / name / "checkpoint_000001").mkdir(parents=True)
    (tmp_path / "plots").mkdir()
    (tmp_path / "report.html").touch()
    said = f"{tmp_path}: is an experiment; name one of its trials: {tmp_path}/sync-0, {tmp_path}/s"
    with pytest.raises(CheckpointError, match=re.escape(said) + r"ync-1$"):
        read_trained_policy(tmp_path)
    with pytest.raises(ExportError, match=re.escape(said) + r"ync-1$"):
        export(tmp_path, tmp_path / "out")
    for number in range(2, 11):
        (tmp_path / f"sync-{number}" / "checkpoint_000001").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"sync-6 or one of 3 more$"):
        read_trained_policy(tmp_path)


def test_a_torn_checkpoint_is_refused_by_name(policy, tmp_path):
    directory = checkpoint(tmp_path / "checkpoint_000001", config(policy))
    file = directory / "policy-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"policy-00001-of-00001\.safetensors: damaged"):
        read_trained_policy(directory)


@pytest.mark.parametrize("state", [{}, {"config": 3}, {"config": {"lag": 9}, "learner": {}}])
def test_a_checkpoint_that_is_no_trials_is_refused(state, tmp_path):
    directory = tmp_path / "checkpoint_000001"
    policy = {"a": torch.zeros(1)}
    write_checkpoint(directory, TrialState(state=state, policy=policy, optimizer=policy, groups=[]))
    with pytest.raises(CheckpointError, match="not a grpo_trainable checkpoint"):
        read_trained_policy(directory)


def test_a_checkpoint_of_another_policy_is_refused(policy, tmp_path):
    trained = read_trained_policy(checkpoint(tmp_path / "checkpoint_000001", config(policy)))
    with pytest.raises(ValueError, match="checkpoint_000001: parameters do not match the model"):
        load_evaluated_policy(GRPOConfig(), trained)


# ---- Threads ---------------------------------------------------------------------------------


def test_a_small_policy_samples_on_one_thread():
    assert sampling_threads(None, None, 1_000_000) == 1
    assert sampling_threads(None, None, 4 * PARAMETERS_PER_THREAD) >= 1
    assert sampling_threads(3, None, 1_000_000) == 3


def test_a_large_policy_samples_on_at_most_the_threads_of_torch(monkeypatch):
    """The environment variable OMP_NUM_THREADS sets their number when torch is imported."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert sampling_threads(None, None, 4 * PARAMETERS_PER_THREAD) == 1


def test_a_checkpoint_is_sampled_with_the_threads_of_its_trial(policy, tmp_path):
    own = config(policy, resources={"generator_cpus": 1.95})
    trained = read_trained_policy(checkpoint(tmp_path / "checkpoint_000001", own))
    assert sampling_threads(None, trained, 1) == 2


def test_the_reward_of_an_evaluation_is_the_weighted_sum_as_in_the_trial(
    policy: str, tmp_path: Path
):
    (tmp_path / "mine.py").write_text(
        "def score(response, ground_truth):\n"
        '    return {"reward": 1.0, "parts": {"letters": len(response)}}\n'
    )
    own = {"reward": f"{tmp_path}/mine.py:score", "reward_weights": '{"letters": 0.5, "answer": 3}'}
    generations = evaluated(config(policy, task=own))
    assert [each.reward for each in generations] == [
        3 + 0.5 * len(each.response) for each in generations
    ]
    assert {each.answer_reward for each in generations} == {1.0}


def test_an_evaluation_refuses_the_weights_that_a_trial_refuses(policy: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text("def score(response, ground_truth): return 1.0")
    own = {"reward": f"{tmp_path}/mine.py:score", "reward_weights": '{"mine": 5}'}
    generations = evaluated(config(policy, task=own))
    wanted = "task.reward_weights names mine, but the parts of the reward are answer"
    assert {(each.reward, each.error) for each in generations} == {(None, wanted)}
