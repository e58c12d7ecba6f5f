"""Rollouts between generators and learner: what comes back, and what a round trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_trainable.config import GRPOConfig
from grpo_trainable.messages import Scored
from grpo_trainable.pipeline.ledger import BatchId, Chunk, Ledger, ledger_of_format_2
from grpo_trainable.pipeline.report import Counts, Recorder
from grpo_trainable.pipeline.reward_errors import refuse_reward_errors
from grpo_trainable.replay_buffer import ReplayBuffer
from grpo_trainable.rollout import RolloutGroup
from grpo_trainable.versions import StalenessGate
from grpo_trainable.wording import plural

# Ends the key of a draw from the replay buffer: numpy fills shorter keys up with zeros, so that no
# other draw has it.
REPLAY = 1

# Failed rewards are judged as a share of the responses to at least so many prompts: a few failures
# among the first responses say nothing of the rate.
JUDGED_PROMPTS = 32


class Collector:
    """Asks for prompts, keeps the scored groups, and puts a round's batches together."""

    def __init__(self, config: GRPOConfig, gate: StalenessGate, recorder: Recorder) -> None:
        self.buffer = ReplayBuffer(config.buffer_sampling, config.buffer.fresh_fraction)
        self.ledger = Ledger(config)
        self.counts = Counts()
        self._config = config
        self._gate = gate
        self._recorder = recorder
        # Mean (format, answer) rewards of the groups in the buffer, by prompt index.
        self._partial_rewards: dict[int, tuple[float, float]] = {}

    # ---- Sampling ----------------------------------------------------------------------------

    def take(self) -> Chunk:
        """The next chunk to sample."""
        chunk = self.ledger.take()
        self.counts.requested = self.ledger.next_prompt
        return chunk

    def put_back(self, chunk: Chunk) -> None:
        """Takes note that the generator of a chunk was lost: it is sampled once more."""
        self.ledger.put_back(chunk)
        self.counts.redispatched += len(chunk.prompt_indices)

    def accept(self, chunk: Chunk, scored: Scored) -> None:
        """Takes in what came of a chunk.

        Raises:
            ActorFailed: more rewards have failed than the task allows.
        """
        groups, counts = scored.groups, self.counts
        self.ledger.settle(chunk, [group.prompt_index for group in groups])
        self._count_rewards(scored, len(chunk.prompt_indices))
        self.buffer.add(groups)
        counts.dropped_reward += len(scored.unscored)
        counts.sampled_responses += sum(len(group.response_ids) for group in groups)
        counts.sampled_tokens += sum(group.num_tokens for group in groups)
        rewards = zip(groups, scored.format_rewards, scored.answer_rewards, strict=True)
        self._partial_rewards |= {
            group.prompt_index: (format_, answer) for group, format_, answer in rewards
        }

    def _count_rewards(self, scored: Scored, prompts: int) -> None:
        group_size = self._config.rollout.group_size
        counts = self.counts
        counts.reward_errors += scored.reward_errors
        counts.unverified += scored.unverified
        counts.completions += scored.completions
        counts.scored_responses += prompts * group_size + scored.completions
        told = f"reward: the reward function failed on {counts.reward_errors} of "
        told += plural(counts.scored_responses, "response")
        least = max(JUDGED_PROMPTS, self._config.prompts_per_round) * group_size
        judged = max(counts.scored_responses, least)
        refuse_reward_errors(self._config, told, counts.reward_errors, judged, scored.unscored)

    # ---- Training ----------------------------------------------------------------------------

    def draw(self, round_: int) -> list[list[RolloutGroup]]:
        """The rollout batches that a round trains on, once the gate has judged each group a second
        time. Batches without any group are left out, and that may be all of them: only the error
        rate ends a trial."""
        batch_ids = self.ledger.batches_of(round_)
        drawn = [self._draw(batch_id) for batch_id in batch_ids]
        batches = [groups for groups in drawn if groups]
        if len(batches) < len(batch_ids):
            self._note_missing(len(batches), len(batch_ids))
        return batches

    def _draw(self, batch_id: BatchId) -> list[RolloutGroup]:
        count = self._config.buffer.sample_batches * self._config.rollout.prompts
        rng = np.random.default_rng((self._config.seed, *batch_id, 0, REPLAY))
        fresh, older = self.ledger.accepted(batch_id), self.ledger.accepted_before(batch_id)
        drawn = self.buffer.draw(fresh, older, count, self._gate, rng)
        self.counts.dropped_stale += drawn.stale
        self.counts.trained += drawn.first_used
        return drawn.groups

    def _note_missing(self, batches: int, planned: int) -> None:
        """`batches`: how many of the round's rollout batches have a group to train on."""
        why = "had no group left to train on (rewards failed, or groups were stale)"
        if batches:
            note = f"{planned - batches} of {planned} rollout batches {why} and were left out"
        else:
            self.counts.skipped_rounds += 1
            note = f"the round {why} and took no gradient step"
        self._recorder.note(note)

    def evict(self) -> None:
        """Drops what the learner's next round may not train on any more."""
        oldest_round = self._gate.learner_round - (self._config.buffer_capacity - 1)
        closed = self.ledger.close(oldest_round)
        self.counts.dropped_stale += self.buffer.evict(closed, self._gate)

    # ---- The report --------------------------------------------------------------------------

    def take_partial_rewards(self, groups: Sequence[RolloutGroup]) -> list[tuple[float, float]]:
        """Mean (format, answer) rewards of these groups; forgets those of groups that are gone."""
        taken = [self._partial_rewards[group.prompt_index] for group in groups]
        kept = (group.prompt_index for group in self.buffer.groups())
        self._partial_rewards = {index: self._partial_rewards[index] for index in kept}
        return taken

    def metrics(self) -> dict[str, float]:
        return {
            **self.counts.metrics(),
            "count/waiting": float(self.buffer.waiting),
            "count/in_flight": float(self.ledger.in_flight),
            "buffer/size": float(len(self.buffer)),
        }

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything but the buffer's groups, as plain data."""
        return {
            "ledger": self.ledger.state(),
            "counts": vars(self.counts).copy(),
            "partial_rewards": [[i, *pair] for i, pair in sorted(self._partial_rewards.items())],
        }

    def load_state(
        self, state: Mapping[str, Any], groups: Sequence[RolloutGroup], *, same_work: bool
    ) -> None:
        """Goes on from a state. What was in flight then is asked for again. Where the state's
        settings sampled other work than these, whatever was not trained on is dropped and counted,
        and new prompts are asked for."""
        self.counts = Counts(**state["counts"])
        self._partial_rewards = {
            index: (format_, answer) for index, format_, answer in state["partial_rewards"]
        }
        ledger = state["ledger"] if "ledger" in state else ledger_of_format_2(state, self._config)
        if same_work:
            self.ledger.load_state(ledger)
            self.buffer.add(groups)
        else:
            first_round, next_prompt = state["learner_round"], ledger["next_prompt"]
            self.ledger = Ledger(self._config, first_round=first_round, next_prompt=next_prompt)
            self._drop_waiting()

    def _drop_waiting(self) -> None:
        counts = self.counts
        lost = counts.requested - counts.trained - counts.dropped
        counts.dropped_lost += lost
        if lost:
            self._recorder.note(
                f"dropped {plural(lost, 'prompt')} sampled under the checkpoint's settings; these "
                "settings sample others"
            )
