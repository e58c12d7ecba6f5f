"""The built-in engine: batched sampling with a preallocated KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_trainable.checksums import storage_checksum
from grpo_trainable.engines.base import EngineSetup
from grpo_trainable.models.kv_cache import decode, prefill
from grpo_trainable.models.parameters import adopt_parameters, unique_parameters
from grpo_trainable.models.sampling import draw_tokens, uniforms
from grpo_trainable.models.store import build_policy
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.rollout import (
    PolicyWeights,
    Request,
    RolloutGroup,
    SamplingLimits,
)

# Rows that have ended are dropped from the batch once a smaller share than this still runs. Copying
# the cache costs about as much as two tokens.
COMPACT_BELOW = 0.75


class TorchEngine:
    """Samples with a `TransformerLM` of its own.

    Every draw is keyed by (seed, stream, prompt index, response, token). A list
    of requests that one call samples gives the same bits wherever and whenever it is sampled.
    """

    def __init__(
        self,
        model: TransformerLM,
        *,
        eos_id: int,
        pad_id: int,
        seed: int,
        recompute: bool = False,
    ) -> None:
        """`recompute`: weights loaded in the middle of a call rebuild the KV cache of the tokens
        sampled so far (AReaL, arXiv 2505.24298). Otherwise the cache stays as the older weights
        left it (PipelineRL, arXiv 2509.19128)."""
        self.model = model.requires_grad_(False)
        self._parameters = unique_parameters(model)
        self.eos_id = eos_id
        self.pad_id = pad_id
        self.seed = seed
        self._recompute = recompute
        self._loads = 0
        self._version = 0
        self._round = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def round(self) -> int:
        return self._round

    def load(self, weights: PolicyWeights) -> None:
        """Samples with the snapshot from now on.

        It is not copied where it lies in the right memory, so it must stay as it is until the next
        one is loaded.

        Raises:
            RuntimeError: what stands in the model afterwards has another checksum.
        """
        source = f"weights version {weights.version}"
        adopt_parameters(self._parameters, weights.tensors, source=source)
        arrived = storage_checksum(
            {name: self._parameters[name].to(sent.dtype) for name, sent in weights.tensors.items()}
        )
        if arrived != weights.checksum:
            raise RuntimeError(
                f"{source} arrived torn: checksum {arrived}, published {weights.checksum}"
            )
        self._version, self._round = weights.version, weights.round
        self._loads += 1

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> list[RolloutGroup]:
        """Samples one unscored group for each request.

        Each distinct prompt runs through the model once, whatever its group size. Prompts may
        differ in length: they are padded on the right and the padded columns are masked, so that
        every row writes its t-th token to the same column.

        Raises:
            ValueError: a prompt and its longest response exceed the context, the requests differ
                in their limits, or there is none.
        """
        limits = _common_limits(requests)
        batch = _Batch(self, requests)
        for t in range(limits.max_new_tokens):
            # New weights are loaded before the forward pass, so that a token is stamped with the
            # weights that it is sampled from.
            loads = self._loads
            between_tokens()
            if self._recompute and t > 0 and self._loads != loads:
                batch.rebuild_cache(t)
            batch.advance(t)
            batch.sample(t, self._version, self._round)
            if batch.drop_finished():
                break
        return batch.groups()


def build_torch_engine(setup: EngineSetup) -> TorchEngine:
    """The engine of a trial, with the policy that its config names."""
    config, tokenizer = setup.config, setup.tokenizer
    model, _ = build_policy(config.model.preset, config.model.path, config.seed)
    return TorchEngine(
        model.to(setup.device),
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        seed=config.seed,
        recompute=config.weight_update == "interrupt_recompute",
    )


def _common_limits(requests: Sequence[Request]) -> SamplingLimits:
    if not requests:
        raise ValueError("nothing to generate: no requests")
    limits = {request.limits for request in requests}
    if len(limits) > 1:
        raise ValueError(
            f"requests of one call must share their limits, got {sorted(map(str, limits))}"
        )
    return limits.pop()


class _Batch:
    """The rows of one call while they grow: B rows to fill, of which A are still in the batch."""

    def __init__(self, engine: TorchEngine, requests: Sequence[Request]) -> None:
        self.model = engine.model
        self.requests = requests
        self.eos_id, self.pad_id = engine.eos_id, engine.pad_id
        self.limits = limits = requests[0].limits
        device = self.model.embedding.weight.device
        prompt_lengths = torch.tensor([len(r.prompt_ids) for r in requests], device=device)
        longest = int(prompt_lengths.max())
        if int(prompt_lengths.min()) == 0:
            raise ValueError("a prompt has no tokens")
        if longest + limits.max_new_tokens > self.model.config.context_length:
            raise ValueError(
                f"a prompt of {longest} tokens and {limits.max_new_tokens} new ones do not fit "
                f"the context of {self.model.config.context_length}"
            )
        prompt_ids = torch.full((len(requests), longest), engine.pad_id)
        for row, request in zip(prompt_ids, requests, strict=True):
            row[: len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
        fan_out = torch.repeat_interleave(
            torch.arange(len(requests)), torch.tensor([r.group_size for r in requests])
        ).to(device)
        draws = [
            uniforms(engine.seed, r.stream, r.prompt_index, response, limits.max_new_tokens)
            for r in requests
            for response in range(r.group_size)
        ]

        self.prompt_ids = prompt_ids.to(device)  # (prompts, P)
        self.prompt_lengths = prompt_lengths  # (prompts,)
        self.fan_out = fan_out  # (B,) which prompt

        shape = (len(fan_out), limits.max_new_tokens)
        self.ids = torch.full(shape, engine.pad_id, device=device)
        self.mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self.log_probs = torch.zeros(shape, device=device)
        self.finished = torch.zeros(len(fan_out), dtype=torch.bool, device=device)
        self.versions: list[int] = []  # token t of every row was sampled by weights of versions[t]
        self.rounds: list[int] = []

        self.rows = torch.arange(len(fan_out), device=device)  # (A,) which of the B
        self.uniforms = torch.from_numpy(np.stack(draws)).to(device)  # (A, R)
        self.next_positions = prompt_lengths[fan_out]  # (A,)

    def advance(self, t: int) -> None:
        """Computes `logits` (A, V) of token t, from the prompts or from every row's token t - 1."""
        if t == 0:
            hidden = self._prefill(self.fan_out)
            prompts = torch.arange(len(hidden), device=hidden.device)
            last = hidden[prompts, self.prompt_lengths - 1]
            self.logits = F.linear(last, self.model.head_weight)[self.fan_out]
            return
        tokens, positions = self.ids[self.rows, t - 1], self.next_positions
        column = self.prompt_ids.shape[1] + t - 1
        hidden = decode(self.model, tokens[:, None], positions[:, None], self.cache, column)
        self.next_positions = self.next_positions + 1
        self.logits = F.linear(hidden[:, 0], self.model.head_weight)

    def rebuild_cache(self, t: int) -> None:
        """Fills the cache anew, up to token t - 1, which `advance` feeds next."""
        fan_out = self.fan_out[self.rows]
        self._prefill(fan_out)
        if t > 1:
            steps = torch.arange(t - 1, device=fan_out.device)
            positions = self.prompt_lengths[fan_out][:, None] + steps
            tokens = self.ids[self.rows, : t - 1]
            decode(self.model, tokens, positions, self.cache, self.prompt_ids.shape[1])

    def _prefill(self, fan_out: Tensor) -> Tensor:
        """Hidden states (prompts, P, D), and a new cache of the rows that `fan_out` has."""
        hidden, self.cache = prefill(
            self.model,
            self.prompt_ids,
            self.prompt_lengths,
            fan_out,
            columns=self.prompt_ids.shape[1] + self.limits.max_new_tokens,
        )
        return hidden

    def sample(self, t: int, version: int, round_: int) -> None:
        """Draws token t of every row and records it where the row has not ended."""
        logits = self.logits
        if t < self.limits.min_new_tokens - 1:
            logits[:, self.eos_id] = -torch.inf
        tokens, log_probs = draw_tokens(logits, self.uniforms[:, t], self.limits.temperature)
        running = ~self.finished[self.rows]
        self.ids[self.rows, t] = tokens.where(running, self.pad_id)
        self.mask[self.rows, t] = running
        self.log_probs[self.rows, t] = log_probs.where(running, 0.0)
        self.finished[self.rows] = (tokens == self.eos_id).logical_or_(~running)
        self.versions.append(version)
        self.rounds.append(round_)

    def drop_finished(self) -> bool:
        """Drops rows that have ended, once they are many; returns whether every response has."""
        running = ~self.finished[self.rows]
        left = int(running.sum())
        if 0 < left < COMPACT_BELOW * len(running):
            keep = running.nonzero()[:, 0]
            self.rows = self.rows[keep]
            self.uniforms = self.uniforms[keep]
            self.next_positions = self.next_positions[keep]
            self.cache.keep(keep)
        return left == 0

    def groups(self) -> list[RolloutGroup]:
        """Returns a group for each request, on the CPU, cut to its own longest response."""
        groups, start = [], 0
        sampled = len(self.versions)
        mask = self.mask[:, :sampled].cpu()
        fields = (
            self.ids[:, :sampled].cpu(),
            mask,
            self.log_probs[:, :sampled].cpu(),
            torch.tensor(self.versions, dtype=torch.int32) * mask,
            torch.tensor(self.rounds, dtype=torch.int32) * mask,
        )
        finished = self.finished.cpu()
        for request in self.requests:
            rows = slice(start, start + request.group_size)
            start += request.group_size
            longest = int(mask[rows].sum(dim=1).max())
            ids, response_mask, log_probs, versions, rounds = (
                field[rows, :longest].clone() for field in fields
            )
            groups.append(
                RolloutGroup(
                    prompt_index=request.prompt_index,
                    prompt_ids=torch.tensor(request.prompt_ids),
                    response_ids=ids,
                    response_mask=response_mask,
                    behaviour_log_probs=log_probs,
                    rewards=torch.full((request.group_size,), torch.nan),
                    finished=finished[rows].clone(),
                    token_versions=versions,
                    token_rounds=rounds,
                )
            )
        return groups
