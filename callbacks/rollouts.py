"""Records every response, sampled for training or for an evaluation."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from callbacks.round_writer import RoundWriter
from callbacks.trial_files import (
    config_of,
    cut_parts,
    label,
    trial_directory,
    write_part,
)
from grpo_trainable.protocol.round_records import RoundDetails

_RESPONSE = {
    "round": pa.int32(),  # round that trained on it; for held-out ones, rounds trained before
    "cursor": pa.int64(),  # index of the prompt in its stream
    "response_index": pa.int32(),  # index among the responses to one prompt
    "task": pa.string(),  # task of the prompt, where the trial mixes several
    "prompt": pa.string(),
    "response": pa.string(),
    "ground_truth": pa.string(),  # the true answer, as JSON
    "reward": pa.float32(),
    "format_reward": pa.float32(),  # of a task that tells the two apart, such as mathematics
    "answer_reward": pa.float32(),
    "finished": pa.bool_(),  # ended with end-of-text, or by its environment, not by length
    "tokens": pa.int32(),  # tokens that were sampled
    "turns": pa.string(),  # an episode as JSON: action, its reward, observation; else null
}
EVALUATIONS = pa.schema(_RESPONSE)
ROLLOUTS = pa.schema(
    {
        **_RESPONSE,
        "advantage": pa.float32(),
        "uses": pa.int32(),  # times the group was trained on, this one included
        "version": pa.int32(),  # version of the weights that sampled the oldest token
        "weights_round": pa.int32(),  # round of those weights
        "lag": pa.int32(),  # rounds trained before this one - weights_round
        "first_use": pa.bool_(),
        # Log-prob sums in nats: when sampled, after the round, and under the reference.
        "behaviour_log_prob": pa.float32(),
        "policy_log_prob": pa.float32(),
        "reference_log_prob": pa.float32(),
    }
)


class RolloutsCallback(RoundWriter):
    """Writes one Parquet part for each round to `rollouts/`, and for each evaluation to
    `evaluations/`.

    The held-out prompts are the same at every evaluation, so responses can be read side by side.
    Prints two of them after each one where `callbacks.verbose` of the trial says so.
    """

    def cut(self, trial: Any, last: int) -> None:
        for name in ("rollouts", "evaluations"):
            cut_parts(trial_directory(trial) / name, last)

    def write(self, trial: Any, iteration: int, details: RoundDetails) -> None:
        directory = trial_directory(trial)
        rollouts = pa.Table.from_pydict(details.rollouts, ROLLOUTS)
        write_part(directory / "rollouts", iteration, rollouts)
        if not details.evaluations:
            return
        evaluations = pa.Table.from_pydict(details.evaluations, EVALUATIONS)
        write_part(directory / "evaluations", iteration, evaluations)
        if config_of(trial).callbacks.verbose:
            for example in evaluations.slice(0, 2).to_pylist():
                text = " ".join(example["response"].split())
                print(f"{label(trial):<18} {example['prompt']!r} ({example['reward']:g}): {text}")
