"""The collector, which accepts scored groups and selects those that a round trains on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.pipeline.by_task import ByTask
from grpo_trainable.pipeline.ledger import BatchId, Chunk, FilledBatch, Ledger
from grpo_trainable.pipeline.pools import DifficultyPools
from grpo_trainable.pipeline.replay_buffer import ReplayBuffer
from grpo_trainable.pipeline.report import Counts, Recorder
from grpo_trainable.pipeline.requeued_prompts import RequeuedPrompts
from grpo_trainable.pipeline.reward_errors import JUDGED_PROMPTS, refuse_reward_errors, what_scores
from grpo_trainable.pipeline.rubric_buffers import RubricBuffers
from grpo_trainable.protocol.messages import FailedPrompt, Scored
from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.protocol.versions import StalenessGate
from grpo_trainable.text import plural

# Last element of the key that seeds the replay buffer's random draws. Numpy pads shorter keys with
# zeros. Because this element is not zero, no other draw has the same key.
REPLAY = 1


class Collector:
    """Takes chunks from the ledger, keeps the scored groups, and assembles a round's batches."""

    def __init__(
        self,
        config: GRPOConfig,
        gate: StalenessGate,
        recorder: Recorder,
        by_task: ByTask,
        train_size: int | None = None,
    ) -> None:
        """Create a collector with an empty buffer.

        Args:
            config: The trial's settings.
            gate: Decides which groups may be trained on.
            recorder: Receives notes for the user.
            by_task: Computes the metrics of each task.
            train_size: Number of training examples; required with difficulty pools.
        """
        self.buffer = ReplayBuffer(config.buffer_sampling, config.buffer.fresh_fraction)
        self.ledger = Ledger(config)
        self.counts = Counts()
        self._config = config
        self._gate = gate
        self._recorder = recorder
        self._drawn_rewards = DrawnRewards(config.rollout.prompts)
        self._drawn_lengths = DrawnLengths(config.rollout.group_size)
        self.rubrics = RubricBuffers(config)
        self._by_task = by_task
        self._pools: DifficultyPools | None = None
        if config.pools.enabled:
            assert train_size is not None, "the task's size is checked when the task is built"
            self._pools = DifficultyPools(config, train_size)
        self._requeued: RequeuedPrompts | None = None
        if config.rollout.stragglers == "requeue":
            self._requeued = RequeuedPrompts()
        self._drawn_row: dict[str, float] = {}  # metrics of the prompts drawn for the round
        # Since the last note: responses whose reward failed, and their prompts.
        self._failed_responses = 0
        self._failed_prompts: list[FailedPrompt] = []

    # ---- Sampling ----------------------------------------------------------------------------

    def take(self) -> Chunk:
        """Return the next chunk to sample.

        If there are difficulty pools, they choose the example of each prompt. With
        `rollout.stragglers=requeue`, the prompts that were given up come first.
        """
        chunk = self.ledger.take()
        picker = self._requeued if self._pools is None else self._pools
        if picker is not None:
            chunk = replace(chunk, examples=tuple(picker.pick(chunk.prompt_indices)))
        # A prompt that is requested again under a new index counts once.
        again = self.counts.requeued - self._waiting_again
        self.counts.requested = self.ledger.next_prompt - again
        return chunk

    def put_back(self, chunk: Chunk) -> None:
        """Give a chunk of a lost generator back to the ledger, to be sampled again."""
        self.ledger.put_back(chunk)
        self.counts.redispatched += len(chunk.prompt_indices)

    # ---- Stragglers --------------------------------------------------------------------------

    def may_give_up(self, chunk: Chunk) -> bool:
        """Return True if a chunk may be given up. No prompt is given up twice."""
        return self._requeued is None or self._requeued.are_new(chunk.prompt_indices)

    def give_up(self, chunk: Chunk) -> None:
        """Record that the sampling of a chunk has been cancelled: drop or requeue its prompts."""
        self.ledger.give_up(chunk)
        count = len(chunk.prompt_indices)
        named = ", ".join(map(str, chunk.examples or chunk.prompt_indices))
        if self._requeued is None:
            self.counts.dropped_straggler += count
            done = "dropped"
        else:
            self._requeued.requeue(chunk.prompt_indices)
            self.counts.requeued += count
            done = "requeued"
        told = "example" if count == 1 else "examples"
        self._recorder.note(f"{done} {plural(count, 'straggler')} ({told} {named})")

    @property
    def _waiting_again(self) -> int:
        """Number of prompts that were given up and have not been requested again yet."""
        return 0 if self._requeued is None else self._requeued.waiting

    # ---- Scored groups -----------------------------------------------------------------------

    def accept(self, chunk: Chunk, scored: Scored) -> None:
        """Process the results of a chunk.

        Raises:
            ActorFailed: More rewards have failed than the task allows.
        """
        groups, counts = scored.groups, self.counts
        accepted = [group for group in groups if self._is_accepted(group)]
        self.ledger.settle(chunk, [group.prompt_index for group in accepted])
        self._count_rewards(scored, len(chunk.prompt_indices))
        self.buffer.add(accepted)
        self._drawn_rewards.add(groups)
        self._drawn_lengths.add(scored)
        self.rubrics.add(scored)
        counts.dropped_zero_advantage += len(groups) - len(accepted)
        counts.dropped_reward += len(scored.failed)
        counts.sampled_responses += sum(len(group.response_ids) for group in groups)
        counts.sampled_tokens += sum(group.num_tokens for group in groups)

    def _is_accepted(self, group: RolloutGroup) -> bool:
        """Return True if a scored group may be trained on."""
        return self._config.rollout.zero_advantage == "keep" or group.has_signal

    def _count_rewards(self, scored: Scored, prompts: int) -> None:
        group_size = self._config.rollout.group_size
        counts = self.counts
        counts.reward_errors += scored.reward_errors
        counts.unverified += scored.unverified
        counts.completions += scored.completions
        counts.add_usage(scored.usage)
        counts.scored_responses += prompts * group_size + scored.completions
        told = f"reward: {what_scores(self._config)} failed on {counts.reward_errors} of "
        told += plural(counts.scored_responses, "response")
        least = max(JUDGED_PROMPTS, schedule.prompts_per_round(self._config)) * group_size
        judged = max(counts.scored_responses, least)
        refuse_reward_errors(self._config, told, counts.reward_errors, judged, scored.failed)
        self._failed_responses += scored.reward_errors
        self._failed_prompts += [prompt for prompt in scored.failed if prompt.is_failure]

    # ---- Training ----------------------------------------------------------------------------

    def make_batches(self, round_: int) -> list[list[RolloutGroup]]:
        """Return the rollout batches that a round trains on. The gate checks each group once more.

        Batches without groups are left out, so the result may be empty. An empty result does not
        end the trial. Only a high share of failed rewards ends the trial.
        """
        batch_ids = self.ledger.batches_of(round_)
        self._close_draws([self.ledger.batch(batch_id) for batch_id in batch_ids])
        batches = [self._sample(batch_id) for batch_id in batch_ids]
        batches = [groups for groups in batches if groups]
        if len(batches) < len(batch_ids):
            self._note_missing(len(batches), len(batch_ids))
        return batches

    def _sample(self, batch_id: BatchId) -> list[RolloutGroup]:
        """Return the fresh and older groups that the replay buffer selects for a rollout batch."""
        batches = self._config.effective("buffer.sample_batches")
        count = batches * self._config.rollout.prompts
        rng = np.random.default_rng((self._config.seed, *batch_id, 0, REPLAY))
        fresh = self.ledger.batch(batch_id).accepted
        older = self.ledger.accepted_before(batch_id)
        sample = self.buffer.sample(fresh, older, count, self._gate, rng)
        self.counts.dropped_stale += sample.stale
        self.counts.trained += sample.first_used
        return sample.groups

    def _close_draws(self, filled: Sequence[FilledBatch]) -> None:
        """Compute the metrics of the prompts drawn for a round. Update pass rates and rubrics."""
        requeues = self._requeued is not None
        drawn = [i for batch in filled for i in (batch.came_back if requeues else batch.drawn)]
        examples = drawn if self._requeued is None else self._requeued.settle(drawn)
        answers = self._drawn_rewards.answers(drawn)
        self._drawn_row = self._drawn_rewards.take_metrics(drawn, filled)
        self._drawn_row |= self._by_task.drawn(examples)
        self._drawn_row |= self._drawn_lengths.take_metrics(drawn)
        self.rubrics.settle(drawn)
        if self._pools is not None:
            self._drawn_row |= self._pools.settle(drawn, answers)
        if schedule.redraws(self._config):
            self._note_short(filled)

    def _note_short(self, batches: Sequence[FilledBatch]) -> None:
        """Add a note if resampling could not fill some of a round's rollout batches."""
        rollout = self._config.rollout
        short = [batch for batch in batches if len(batch.accepted) < rollout.prompts]
        if not short:
            return
        self.counts.short_batches += len(short)
        groups = sum(len(batch.accepted) for batch in short)
        drawn = sum(len(batch.drawn) for batch in short)
        self._recorder.note(
            f"{plural(drawn, 'prompt')} gave only {groups} of "
            f"{plural(len(short) * rollout.prompts, 'group')} to train on: each of the other "
            "prompts had equal rewards or a failed reward "
            f"(rollout.oversample={rollout.oversample:g}, rollout.redraws={rollout.redraws})"
        )

    def _note_missing(self, batches: int, planned: int) -> None:
        """Add a note that one or more rollout batches had no group to train on.

        Args:
            batches: Number of the round's rollout batches that have a group.
            planned: Number of rollout batches that a round should have.
        """
        why = "had no group left to train on (rewards were missing or equal, or groups were stale)"
        if batches:
            note = f"{planned - batches} of {planned} rollout batches {why} and were left out"
        else:
            self.counts.skipped_rounds += 1
            note = f"the round {why} and took no gradient step"
        self._recorder.note(note)

    def note_failed_rewards(self) -> None:
        """If rewards have failed since the last call, add a note with an example."""
        failed, responses = self._failed_prompts, self._failed_responses
        self._failed_prompts, self._failed_responses = [], 0
        if not failed:
            return
        example = min(failed, key=lambda prompt: prompt.prompt_index)
        self._recorder.note(
            f"{what_scores(self._config)} failed on {plural(responses, 'response')}, so "
            f"{plural(len(failed), 'group')} cannot be trained on; for example on prompt "
            f"{example.prompt_index}: {example.reason}"
        )

    def evict(self) -> None:
        """Drop the groups that the learner's next round must not train on."""
        oldest_round = self._gate.learner_round - (self._config.buffer_capacity - 1)
        closed = self.ledger.close(oldest_round)
        self.counts.dropped_stale += self.buffer.evict(closed, self._gate)

    # ---- The report --------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return the collector's metrics for the round."""
        return {
            **self.counts.metrics(),
            "count/waiting": float(self.buffer.waiting),
            "count/in_flight": float(self.ledger.in_flight + self._waiting_again),
            "buffer/size": float(len(self.buffer)),
            **self._drawn_row,
        }

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the collector's state as plain data, without the groups in the buffer."""
        return {
            "ledger": self.ledger.state(),
            "counts": vars(self.counts).copy(),
            "drawn_rewards": self._drawn_rewards.state(),
            "drawn_lengths": self._drawn_lengths.state(),
            "pools": None if self._pools is None else self._pools.state(),
            "rubrics": self.rubrics.state(),
            "requeued": None if self._requeued is None else self._requeued.state(),
        }

    def load_state(
        self, state: Mapping[str, Any], groups: Sequence[RolloutGroup], *, same_sampling: bool
    ) -> None:
        """Continue from a state. Prompts that were in flight are requested again.

        Args:
            state: The result of `state`, plus the entry `learner_round`.
            groups: The buffer's groups.
            same_sampling: False if the settings in `state` lead to different rollouts than the
                current settings. In that case, all prompts that were not trained on are dropped
                and counted, and new prompts are requested.
        """
        self.counts = Counts(**state["counts"])
        if "rubrics" in state:  # checkpoints of earlier package versions lack this key
            self.rubrics.load_state(state["rubrics"], same_sampling=same_sampling)
        if same_sampling:
            self.ledger.load_state(state["ledger"])
            self.buffer.add(groups)
            self._drawn_rewards.load_state(state["drawn_rewards"])
            # Checkpoints of earlier package versions lack this key.
            self._drawn_lengths.load_state(state.get("drawn_lengths", ()))
            if self._pools is not None:
                self._pools.load_state(state["pools"])
            if self._requeued is not None:
                self._requeued.load_state(state["requeued"])
        else:
            next_prompt = state["ledger"]["next_prompt"]
            self.ledger = Ledger(
                self._config, first_round=state["learner_round"], next_prompt=next_prompt
            )
            # Prompts that wait to be requested again are dropped, so they do not count as requeued.
            self.counts.requeued -= len((state.get("requeued") or {"waiting": ()})["waiting"])
            if self._requeued is not None:
                self._requeued = RequeuedPrompts(next_prompt)
            self._drop_waiting()

    def _drop_waiting(self) -> None:
        counts = self.counts
        lost = counts.requested - counts.trained - counts.dropped
        counts.dropped_lost += lost
        if lost:
            self._recorder.note(
                f"dropped {plural(lost, 'prompt')} sampled under the checkpoint's settings, "
                "because the current settings lead to different samples"
            )


class DrawnRewards:
    """Keeps the rewards of groups until the round that drew their prompts reports the rewards."""

    def __init__(self, planned: int) -> None:
        """Create an empty record.

        Args:
            planned: Number of prompts that a rollout batch draws before any redraws.
        """
        self._planned = planned
        # Prompt index -> mean reward and mean answer reward of its group.
        self._rewards: dict[int, tuple[float, float]] = {}

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Record the rewards of groups, including groups that are left out of training."""
        self._rewards |= {
            group.prompt_index: (float(group.rewards.mean()), group.answer_mean) for group in groups
        }

    def answers(self, drawn: Iterable[int]) -> dict[int, float]:
        """Return the mean answer reward of each scored prompt in `drawn`."""
        return {index: self._rewards[index][1] for index in drawn if index in self._rewards}

    def take_metrics(
        self, drawn: Sequence[int], batches: Sequence[FilledBatch]
    ) -> dict[str, float]:
        """Return metrics of the prompts drawn for a round's batches, and forget their rewards."""
        rewards = [self._rewards.pop(index)[0] for index in drawn if index in self._rewards]
        accepted = sum(len(batch.accepted) for batch in batches)
        row = {
            "group/drawn": float(len(drawn)),
            "group/filtered": float(len(rewards) - accepted),
            "group/resampled": float(len(drawn) - self._planned * len(batches)),
            "group/accepted_fraction": accepted / len(drawn),
        }
        if rewards:
            # fsum is exact, so the order in which groups arrive does not matter.
            row["reward/drawn_mean"] = math.fsum(rewards) / len(rewards)
        return row

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> list[list[Any]]:
        """Return the rewards as plain data."""
        return [[index, *rewards] for index, rewards in sorted(self._rewards.items())]

    def load_state(self, state: Sequence[Sequence[Any]]) -> None:
        """Continue from the result of `state`."""
        self._rewards = {index: (reward, answer) for index, reward, answer in state}


class DrawnLengths:
    """Keeps the lengths of responses until the round that drew their prompts reports the lengths.

    Unlike `DrawnRewards`, this record includes prompts whose rewards failed.
    """

    def __init__(self, group_size: int) -> None:
        """Create an empty record.

        Args:
            group_size: Number of responses to each prompt.
        """
        self._group_size = group_size
        self._tokens: dict[int, int] = {}  # prompt index -> tokens of all responses to the prompt

    def add(self, scored: Scored) -> None:
        """Record the lengths of a chunk's responses."""
        self._tokens |= {group.prompt_index: group.num_tokens for group in scored.groups}
        self._tokens |= {prompt.prompt_index: prompt.tokens for prompt in scored.failed}

    def take_metrics(self, drawn: Iterable[int]) -> dict[str, float]:
        """Return the metrics of the prompts drawn for a round, and forget their lengths."""
        tokens = [self._tokens.pop(index) for index in drawn if index in self._tokens]
        if not tokens:
            return {}
        return {"response/drawn_length_mean": sum(tokens) / (len(tokens) * self._group_size)}

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> list[tuple[int, int]]:
        """Return the lengths as plain data."""
        return sorted(self._tokens.items())

    def load_state(self, state: Iterable[tuple[int, int]]) -> None:
        """Continue from the result of `state`."""
        self._tokens = dict(state)
