"""The part of a learner's state that training changes, and the learner's part of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_trainable.algo import sequence_kl, steered_coefficient
from grpo_trainable.config import GRPOConfig, LossSettings
from grpo_trainable.learner.critic import PREFIX, Critic
from grpo_trainable.learner.log_probs import BatchWithLogProbs
from grpo_trainable.learner.optimizer import PolicyOptimizer
from grpo_trainable.learner.ranks import ALONE, Ranks
from grpo_trainable.models.parameters import copy_parameters
from grpo_trainable.models.policy import NamedWeights
from grpo_trainable.protocol.messages import LearnerState
from grpo_trainable.storage.checkpointing import (
    CheckpointError,
    LearnerFiles,
    learner_messages,
    read_part,
    write_learner_files,
)
from grpo_trainable.telemetry.progress import advance

logger = logging.getLogger(__name__)


class TrainingState:
    """Policy, critic, optimizer, KL coefficient and round counter."""

    def __init__(
        self,
        config: GRPOConfig,
        policy: NamedWeights,
        device: torch.device,
        reference_checksum: str,
        ranks: Ranks = ALONE,
    ) -> None:
        """Build the state before training.

        Args:
            config: The trial's settings.
            policy: The policy, as returned by `Ranks.divide`.
            device: The critic's device.
            reference_checksum: Checksum of the reference policy. A loaded state must have the same
                checksum.
            ranks: The learners of the trial.
        """
        self._config = config
        self._ranks = ranks
        self._reference_checksum = reference_checksum
        self._parameters = policy.trained()
        self.policy = policy
        self.critic = Critic(config, policy, device, ranks) if config.has_critic else None
        self.kl_coefficient = KLCoefficient(config.loss)
        critic = {} if self.critic is None else self.critic.parameters
        self.optimizer = PolicyOptimizer(self._parameters, config, critic, ranks)
        self.round = 0
        self._messages: Iterator[tuple[str, bytes]] = iter(())

    @property
    def version(self) -> int:
        """Number of gradient steps that the policy has taken."""
        return self.optimizer.steps

    def gathered(self) -> LearnerState:
        """Return copies, in main memory, of the policy, the optimizer and the counters.

        Only the first rank's result contains tensors.
        """
        gathered = self._ranks.gathered
        return LearnerState(
            policy=_copies(gathered(self._parameters)),
            optimizer=_copies(gathered(self._optimizer_tensors())),
            counters=self._counters(),
        )

    def own(self) -> LearnerState:
        """Return copies of this rank's part of the state, without communication."""
        return LearnerState(
            policy=_copies(self._parameters.items()),
            optimizer=_copies(self._optimizer_tensors().items()),
            counters=self._counters(),
        )

    def write(self, directory: str, seen_by: str) -> LearnerFiles:
        """Write this rank's part of a checkpoint, as `write_learner_files` does.

        If this rank cannot see the directory, `next_message` returns the part in pieces.

        Args:
            directory: The checkpoint's directory.
            seen_by: A file in the directory. A process that finds this file can see the directory.
        """
        number, of = self._ranks.rank + 1, self._ranks.size
        tensors = {
            "policy": self._ranks.held(self._parameters),
            "optimizer": self._ranks.held(self._optimizer_tensors()),
        }
        files = write_learner_files(
            directory, seen_by, tensors, self._counters(), number=number, of=of, tick=advance
        )
        self._messages = learner_messages({} if files.written else tensors, number=number, of=of)
        return files

    def next_message(self) -> tuple[str, bytes] | None:
        """Return the next message of `learner_messages`, or None after the last one.

        The state must not have changed since the call of `write`.
        """
        return next(self._messages, None)

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the live tensors of the optimizer and the critic."""
        return self.optimizer.tensors() | (self.critic.parameters if self.critic else {})

    def _counters(self) -> dict[str, Any]:
        return {
            **self.optimizer.counters(),
            **self.kl_coefficient.counters(),
            "round": self.round,
            "reference_checksum": self._reference_checksum,
        }

    # ---- Continuing from a checkpoint --------------------------------------------------------

    def load(self, state: LearnerState) -> None:
        """Continue from a state, with the settings of this learner.

        Raises:
            ValueError: The state belongs to a different model, or was trained against a different
                reference.
        """
        self._take(dict(state.policy), dict(state.optimizer), state.counters)

    def _take(
        self, policy: dict[str, Tensor], optimizer: dict[str, Tensor], counters: dict[str, Any]
    ) -> None:
        """Continue from `policy` and `optimizer`, and empty these two dictionaries.

        Moments are copied one by one, so memory need not hold all of them twice.
        """
        expected = counters["reference_checksum"]
        if expected != self._reference_checksum:
            raise ValueError(
                f"the checkpoint's reference policy has checksum {expected}, but the policy of "
                f"model.preset={self._config.model.preset}, model.path={self._config.model.path} "
                f"has {self._reference_checksum}; use the policy that the run started from"
            )
        copy_parameters(self._parameters, self._parts_of(policy), source="checkpoint")
        policy.clear()
        self._load_critic(optimizer)
        self.optimizer.load_state(optimizer, counters)
        self.kl_coefficient.load_counters(counters)
        self.round = counters["round"]
        self._ranks.settle()

    def read(self, directory: Path, digests: Mapping[str, str], counters: dict[str, Any]) -> bool:
        """Continue from the state in a checkpoint.

        Args:
            directory: The checkpoint's directory.
            digests: SHA-256 of each file.
            counters: The counters in the checkpoint.

        Returns:
            False if this process cannot read the files. In that case, nothing has changed.

        Raises:
            ValueError: As in `load`.
        """
        try:
            policy = read_part(directory, digests, "policy", advance)
            optimizer = read_part(directory, digests, "optimizer", advance)
        except CheckpointError as error:
            logger.warning("%s; the trial's process sends the state instead", error)
            return False
        self._take(policy, optimizer, counters)
        return True

    def _parts_of(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's parts of a policy's tensors."""
        own = self._parameters
        return {name: self._ranks.part(t, own.get(name, t)) for name, t in stored.items()}

    def _load_critic(self, stored: dict[str, Tensor]) -> None:
        """Restore the critic from `stored`.

        If `stored` has no matching critic, the critic starts from scratch. In that case, the
        optimizer's current tensors for the critic replace those in `stored`, so that the critic's
        moments start from scratch too.
        """
        if self.critic is not None and self.critic.load_state(stored):
            return
        for name in [name for name in stored if name.startswith(PREFIX)]:
            del stored[name]
        anew = {n: v for n, v in self.optimizer.tensors().items() if n.startswith(PREFIX)}
        stored.update(anew)


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors}


class KLCoefficient:
    """The KL coefficient β of the current round.

    With `loss.kl_target`, β changes from round to round and is saved in checkpoints.
    """

    def __init__(self, settings: LossSettings) -> None:
        self._settings = settings
        self.value = settings.kl_coef

    @property
    def is_steered(self) -> bool:
        """True if `loss.kl_target` controls β."""
        return self._settings.kl_target is not None

    @property
    def in_loss(self) -> float:
        """Weight of the KL in the loss."""
        return self.value if self._settings.kl_in == "loss" else 0.0

    @property
    def in_reward(self) -> float:
        """Weight of the KL in the reward."""
        return self.value if self._settings.kl_in == "reward" else 0.0

    def after_round(self, batches: Sequence[BatchWithLogProbs]) -> None:
        """Adjust β according to the KL from the sampling policy to the reference."""
        target = self._settings.kl_target
        if target is not None:
            kl = _sampled_kl(batches)
            self.value = steered_coefficient(self.value, kl, target, self._settings.kl_gain)

    def counters(self) -> dict[str, float]:
        """Return β for a checkpoint, or {} if `loss.kl_target` does not control β."""
        return {"kl_coef": self.value} if self.is_steered else {}

    def load_counters(self, counters: dict[str, float]) -> None:
        """Restore β from a checkpoint. If the checkpoint has no β, keep the current β."""
        if self.is_steered:
            self.value = counters.get("kl_coef", self.value)


def _sampled_kl(batches: Sequence[BatchWithLogProbs]) -> float:
    """Return the KL from the sampling policy to the reference, in nats per response."""
    total, responses = 0.0, 0
    for batch in batches:
        assert batch.reference is not None, "the KL needs the reference's log-probs"
        mask, behaviour = batch.train_batch.response_mask, batch.train_batch.behaviour_log_probs
        count = int(mask.any(dim=1).sum())
        kl = sequence_kl(behaviour.double(), batch.reference.double(), mask, "k1")
        total, responses = total + count * float(kl), responses + count
    return total / max(responses, 1)
