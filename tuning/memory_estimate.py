"""Estimate a trial's memory from its config, before anything starts.

docs/memory.md explains each formula. N is the number of parameters, T the number of trained
parameters, and b (4 or 2) the number of bytes per parameter of the model's body.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.config.engine_catalog import engine_record
from grpo_trainable.config.resources import sampling_gpus
from grpo_trainable.config.reward_kinds import MODEL, models_in
from grpo_trainable.models.directory import policy_directory, read_config
from grpo_trainable.models.hf.directory import refuse_unusable
from grpo_trainable.models.hf.json_files import is_hugging_face
from grpo_trainable.models.model_config import PRESETS, ModelConfig
from grpo_trainable.models.shape import HELD, PolicySettings
from tuning.model_dimensions import KNOWN, Dimensions, dimensions_of, stored_parameters

FLOAT = 4  # bytes of a float32
# Assumed number of tokens of a prompt, unless the context is too short. Prompts are read later.
PROMPT_TOKENS = 256
CHECKPOINT = "checkpoint"
PUBLISHED = "published snapshot"  # if there are several learners, only the first has a snapshot
# Bytes of a process that has imported torch and ray, measured on Linux without a GPU.
PROCESS_BYTES = 350_000_000
# Bytes of a process that plays episodes. Such a process imports neither torch nor ray. A user's
# environment may need more memory.
ENVIRONMENT_BYTES = 30_000_000
# Bytes of a rollout token: id, reference log-prob, log-prob, version, round, and one byte of mask.
TOKEN_BYTES = 8 + 4 + 4 + 4 + 4 + 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """One item that occupies memory in an actor."""

    what: str
    bytes: int
    gpus: float = 0.0  # GPUs that the actor reserves; 0 means that the item is in main memory


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory that one trial needs at its peak."""

    parts: Sequence[Part]

    @property
    def host_bytes(self) -> int:
        """Number of bytes in main memory."""
        return sum(part.bytes for part in self.parts if not part.gpus)

    @property
    def gpu_bytes(self) -> int:
        """Number of bytes on all GPUs together."""
        return sum(part.bytes for part in self.parts if part.gpus)

    def __str__(self) -> str:
        """Return the parts with their sizes, the largest first, in one line."""
        merged: dict[str, int] = {}
        for part in self.parts:
            merged[part.what] = merged.get(part.what, 0) + part.bytes
        largest = sorted(merged.items(), key=lambda item: -item[1])
        return ", ".join(f"{what} {size(count)}" for what, count in largest if count)


def size(count: int) -> str:
    """Return a number of bytes as text, in GB or MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{max(1, round(count / 1e6))} MB"


# ---- The policy ------------------------------------------------------------------------------


def policy_dimensions(model: PolicySettings) -> Dimensions | None:
    """Return the sizes of the policy that a trial starts from, or None if they are not known.

    For a hub id that a preset names, the sizes are known without the files of the model.

    Raises:
        ValueError: The directory cannot be used. The message is one line that begins with the
            directory.
    """
    if model.env is not None:
        return None
    if model.path in KNOWN:
        return dimensions_of(KNOWN[model.path])
    directory = policy_directory(model)
    if directory is None or not is_hugging_face(directory):
        return _of_ours(PRESETS[model.preset] if directory is None else read_config(directory))
    refuse_unusable(directory)  # call this first, because its message is the clearest
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    found = dimensions_of(config)
    return found and replace(found, parameters=stored_parameters(directory))


def _of_ours(config: ModelConfig) -> Dimensions:
    head = config.vocab_size * config.d_model
    norms = (2 * config.num_layers + 1) * config.d_model
    return Dimensions(
        hidden=config.d_model,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_heads,
        head_dim=config.head_dim,
        inner=config.d_ff,
        vocab=config.vocab_size,
        context=config.context_length,
        parameters=config.matmul_parameters + norms + head * (1 if config.tied_head else 2),
        ours=True,
    )


# ---- A trial ---------------------------------------------------------------------------------


def estimate(
    config: GRPOConfig, dimensions: Dimensions, teacher: Dimensions | None = None
) -> Estimate:
    """Estimate the peak memory of all actors of a trial with this policy and teacher.

    Raises:
        ValueError: A reward model cannot be read. The message is one line that names the setting.
    """
    trial = _Trial(config, dimensions, teacher)
    r = config.resources
    if config.placement == "colocated":
        # One process runs these phases in turn and reuses the memory that it frees in between.
        held = [*trial.learner(), *trial.sampling_weights()]
        phases = trial.training(), trial.sampling(), trial.loading()
        actors = [(r.worker_gpus, [*held, *max(phases, key=_sum)])]
    else:
        first = [*trial.learner(), *max(trial.training(), trial.loading(), key=_sum)]
        other = [part for part in first if part.what != PUBLISHED]
        learners = [first, *[other] * (r.num_learners - 1)]
        generator = [*trial.sampling_weights(), *trial.sampling()]
        actors = [(r.learner_gpus, parts) for parts in learners]
        actors += [(r.generator_gpus, generator)] * r.num_generators
    parts = [
        Part(what=part.what, bytes=part.bytes, gpus=gpus) for gpus, held in actors for part in held
    ]
    processes = (1 + len(actors)) * PROCESS_BYTES
    rest = [
        Part(what="buffer", bytes=trial.buffer_bytes()),
        Part(what=CHECKPOINT, bytes=trial.checkpoint_host_bytes()),
        Part(what="processes", bytes=processes + _beside(config)),
        Part(what="reward models", bytes=_reward_models(config), gpus=sampling_gpus(config)),
    ]
    return Estimate(parts=[*parts, *rest])


def _beside(config: GRPOConfig) -> int:
    """Return the number of bytes that all reward processes or environment processes need."""
    r, samplers = config.resources, _samplers(config)
    if config.env.plays:
        return samplers * schedule.unit_prompts(config) * ENVIRONMENT_BYTES
    scored_apart = sum(trial.task.is_scored_apart for trial in config.alone)
    return samplers * scored_apart * r.reward_workers * PROCESS_BYTES


def _reward_models(config: GRPOConfig) -> int:
    """Return the number of bytes of the reward models in all reward processes, in float32."""
    total = 0
    for directory in (name for trial in config.alone for name in models_in(trial.task.reward)):
        try:
            total += FLOAT * stored_parameters(Path(directory))
        except ValueError as error:
            raise ValueError(f"task.reward={MODEL}:{error}") from None
    return _samplers(config) * config.resources.reward_workers * total


def _samplers(config: GRPOConfig) -> int:
    """Return the number of actors that sample."""
    return 1 if config.placement == "colocated" else config.resources.num_generators


def _sum(parts: Sequence[Part]) -> int:
    return sum(part.bytes for part in parts)


class _Trial:
    """Parts of the memory of one trial. Every number of bytes applies to one actor."""

    def __init__(
        self, config: GRPOConfig, dimensions: Dimensions, teacher: Dimensions | None
    ) -> None:
        self.config, self.size, self.teacher = config, dimensions, teacher
        model, rollout = config.model, config.rollout
        self.body = 2 if model.dtype == "bfloat16" else FLOAT  # b
        self.lora = model.lora_rank is not None
        self.trained = (
            dimensions.parameters
            if model.lora_rank is None
            else dimensions.adapter_parameters(model.lora_rank, model.lora_targets)
        )
        room = max(1, dimensions.context - rollout.max_new_tokens)
        self.prompt_tokens = min(PROMPT_TOKENS, room)
        self.row_tokens = self.prompt_tokens + rollout.max_new_tokens

    @property
    def own_critic(self) -> bool:
        """Return True if the critic has a body separate from the policy's."""
        return self.config.has_critic and self.config.critic.body == "own"

    @property
    def weights_bytes(self) -> int:
        """Number of bytes of one copy of the weights, N b (docs/memory.md)."""
        return self.size.parameters * self.body

    # ---- Held all the time -------------------------------------------------------------------

    def learner(self) -> list[Part]:
        """Return the parts that a learner keeps in memory all the time.

        If learners share a policy, these are the parts of one learner.
        """
        r = self.config.resources
        adapters = self.trained * FLOAT if self.lora else 0
        masters = self.master_bytes
        # With LoRA, the reference is the model with the adapters that the trial started from, if
        # any, so the weights of the model are not held twice.
        start = adapters if self.config.model.adapter is not None else 0
        held = start if self.lora else self.weights_bytes // self.sharers
        reference = held if self.config.reference_role == "learner" else 0
        teacher = 0 if self.teacher is None else self.teacher.parameters * self.body
        travel = 2 if self.config.transport_dtype == "bfloat16" else self.body
        # The first learner gathers all weights before it takes the snapshot that it publishes.
        gathered = self.weights_bytes if self.sharers > 1 else 0
        return [
            Part(what="weights", bytes=(self.weights_bytes + adapters) // self.sharers),
            Part(what="gradients", bytes=self.trained * FLOAT // self.sharers),
            Part(what="optimizer moments", bytes=2 * self.trained * FLOAT // self.sharers),
            Part(what="master weights", bytes=masters),
            Part(what="reference", bytes=reference),
            Part(what="teacher", bytes=teacher // self.sharers),
            Part(what="gathered layers", bytes=self.gathered_bytes()),
            Part(what=PUBLISHED, bytes=self.size.parameters * travel + gathered + self.apart_bytes),
            Part(what="critic", bytes=self.critic_bytes(adapters + masters)),
            # Kept if the learners can continue after one of them is lost.
            Part(what="recovery copy", bytes=self.state_bytes() if r.elastic else 0),
        ]

    @property
    def _bodies(self) -> int:
        return 2 if self.own_critic else 1

    @property
    def apart_bytes(self) -> int:
        """Number of bytes of the adapters if they are published apart from the model, else 0."""
        return self.trained * FLOAT if self.config.adapters_apart else 0

    def state_bytes(self) -> int:
        """Return the number of bytes of the learners' checkpoint.

        The checkpoint contains parameters, master weights and moments.
        """
        parameters = self.trained * FLOAT if self.lora else self.weights_bytes
        return self._bodies * (parameters + self.master_bytes + 2 * self.trained * FLOAT)

    @property
    def master_bytes(self) -> int:
        """Number of bytes of the float32 master weights."""
        return 0 if self.lora or self.body == FLOAT else self.trained * FLOAT

    @property
    def sharers(self) -> int:
        """Number of learners that share one policy, each holding a part of it."""
        r = self.config.resources
        return r.num_learners if r.learner_strategy == "fsdp2" else 1

    def gathered_bytes(self) -> int:
        """Return the number of bytes of parameters and gradients that a learner gathers in a pass.

        The learner gathers everything outside the layers, plus two layers: the current layer, and
        the next layer, which is transferred at the same time.
        """
        if self.sharers == 1:
            return 0
        outside = min(self.size.parameters, 2 * self.size.vocab * self.size.hidden)
        layer = (self.size.parameters - outside) // self.size.layers
        return 2 * (outside + 2 * layer) * self.body

    def critic_bytes(self, beside: int) -> int:
        """Return the number of bytes of the critic's own body, with gradients and moments.

        Args:
            beside: Number of bytes of adapters and master weights, in addition to the weights. The
                critic's head is only a vector, so it is not counted.
        """
        if not self.own_critic:
            return 0
        return self.weights_bytes + beside + 3 * self.trained * FLOAT

    def sampling_weights(self) -> list[Part]:
        """Return the parts for the generator's weights, and for its reference if it has one."""
        reference = self.config.reference_role == "generator"
        narrow = self.config.model.sampler_dtype == "bfloat16"
        weights = self.size.parameters * 2 if narrow else self.weights_bytes
        return [
            Part(what="sampling weights", bytes=weights + self.apart_bytes),
            Part(what="reference", bytes=self.weights_bytes if reference else 0),
        ]

    # ---- Held for a while --------------------------------------------------------------------

    def sampling(self) -> list[Part]:
        """Return the parts that one sampling call needs: KV cache, logits and probabilities."""
        engine = engine_record(self.config.engine)
        if engine.fits_cache and sampling_gpus(self.config):
            return []
        rows, size = schedule.most_rows(self.config), self.size
        # Without slots, the cache has one place per row. With slots, it consists of shelves of
        # different lengths (`models/shelved_cache.py`). A slot has a place on every shelf, and the
        # shelves together are at most twice as long as a row.
        places, slots = rows, self.config.rollout.slots
        if slots is not None:
            rows, places = slots, 2 * slots
        of_cache = FLOAT if size.ours else self.body
        if engine.narrows_cache and self.config.model.sampler_dtype == "bfloat16":
            of_cache = 2
        token = 2 * size.layers * size.keys * of_cache
        head = size.vocab * size.hidden * FLOAT if self._widens_head else 0
        return [
            Part(what="KV cache", bytes=places * self.row_tokens * token),
            Part(what="sampling logits", bytes=2 * rows * size.vocab * FLOAT + head),
        ]

    def training(self) -> list[Part]:
        """Return the parts for the activations of a microbatch, and for the output head."""
        rows = self.microbatch_rows()
        responses = rows * self.config.rollout.max_new_tokens
        size = self.size
        probabilities = min(responses * size.vocab, max(size.vocab, HELD))
        matrix = size.vocab * size.hidden * FLOAT
        # The gradient of the head during its computation, and the head in float32.
        matrices = matrix * ((not self.lora) + self._widens_head)
        hidden = 2 * responses * size.hidden * FLOAT
        tokens = rows * (self.row_tokens - 1)
        return [
            Part(
                what="activations", bytes=tokens * self.activation_bytes() * (1 + self.own_critic)
            ),
            Part(what="head", bytes=probabilities * FLOAT + matrices + hidden),
        ]

    def loading(self) -> list[Part]:
        """Return the checkpoint's part while a learner reads it, minus memory that is still unused.

        While a learner loads, it has no gradients or moments. The learner reads the whole
        checkpoint, even if learners share the policy.
        """
        if self._trains_on_gpu:
            return []
        shares = 1 / self.sharers + self._bodies - 1
        waiting = int(shares * 3 * self.trained * FLOAT)
        return [Part(what=CHECKPOINT, bytes=max(0, self.state_bytes() - waiting))]

    def checkpoint_host_bytes(self) -> int:
        """Return the number of bytes of main memory for checkpoints that GPU learners read."""
        learners = self.config.resources.num_learners
        return learners * self.state_bytes() if self._trains_on_gpu else 0

    @property
    def _widens_head(self) -> bool:
        return self.body < FLOAT and self.config.model.head_fp32

    def microbatch_rows(self) -> int:
        """Return the number of rows in a microbatch if all rows have the maximum length."""
        optim, rollout = self.config.optim, self.config.rollout
        most = optim.microbatch
        if optim.microbatch_tokens is not None:
            most = max(1, optim.microbatch_tokens // (self.row_tokens - 1))
        return min(most, rollout.prompts * rollout.group_size)

    def activation_bytes(self) -> int:
        """Return the number of bytes per token that autograd keeps for the backward pass."""
        size, layer = self.size, sum(self._activations_of_a_layer())
        around = 3 * size.hidden * self.body  # embedding and last norm
        if not self.config.model.gradient_checkpointing:
            return size.layers * layer + around
        # The input of each layer, plus the recomputed activations of one layer.
        return size.layers * size.hidden * self.body + layer + around

    @property
    def _trains_on_gpu(self) -> bool:
        r = self.config.resources
        return (r.worker_gpus if self.config.placement == "colocated" else r.learner_gpus) > 0

    def _activations_of_a_layer(self) -> Iterator[int]:
        """Yield the sizes, in bytes per token, of the tensors that autograd keeps for one layer.

        A test compares the total with the sizes of real tensors.
        """
        d, f = self.size.hidden, self.size.inner
        q, k = self.size.queries, self.size.keys
        yield FLOAT * (self.size.heads + 2)  # a log-sum per head, and a root mean square per norm
        if self.size.ours:
            yield FLOAT * (12 * d + 4 * f)
            return
        yield self.body * (6 * d + 2 * q + 2 * k + 4 * f)
        if self.body < FLOAT:
            # Norms compute in float32, and so does attention on CPUs.
            yield FLOAT * d
            yield 0 if self._trains_on_gpu else 6 * q + 4 * k
        if self.size.normed_heads:
            yield (8 if self.body == FLOAT else 6) * (q + k)
        if self.lora and self.body < FLOAT:
            yield FLOAT * (5 * d + q + f)  # the input of every adapter, in float32

    # ---- The trial's own process -------------------------------------------------------------

    def buffer_bytes(self) -> int:
        """Return the number of bytes of rollouts in the trial's process: buffered and in flight."""
        config = self.config
        rounds = config.buffer_capacity + config.lag
        response = config.rollout.max_new_tokens * TOKEN_BYTES
        prompts = schedule.prompts_per_round(config) * self.prompt_tokens * 8
        return rounds * (schedule.responses_per_round(config) * response + prompts)
