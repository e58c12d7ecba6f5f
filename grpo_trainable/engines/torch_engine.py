"""Our own engine: batched sampling with a preallocated KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_trainable.models.kv_cache import decode, prefill
from grpo_trainable.models.parameters import copy_parameters, unique_parameters
from grpo_trainable.models.sampling import sample_tokens, uniforms
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.rollout import (
    PolicyWeights,
    Request,
    RolloutGroup,
    SamplingLimits,
    checksum,
)

# Rows that have ended are dropped from the batch once fewer than this share is left: copying the
# cache costs about as much as two tokens.
COMPACT_BELOW = 0.75


class TorchEngine:
    """Samples with a `TransformerLM` of its own.

    Every draw is keyed by (seed, stream, cursor, response, token). A unit, the list of requests
    of one call, gives the same bits wherever and whenever it is sampled.
    """

    def __init__(self, model: TransformerLM, *, eos_id: int, pad_id: int, seed: int) -> None:
        self.model = model.requires_grad_(False)
        self.eos_id = eos_id
        self.pad_id = pad_id
        self.seed = seed
        self._version = 0
        self._round = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def round(self) -> int:
        return self._round

    def load(self, weights: PolicyWeights) -> None:
        """Copies the snapshot in place.

        Raises:
            RuntimeError: what stands in the model afterwards has another checksum.
        """
        copy_parameters(self.model, weights.tensors, source=f"weights version {weights.version}")
        arrived = self.checksum()
        if arrived != weights.checksum:
            raise RuntimeError(
                f"weights version {weights.version} arrived torn: "
                f"checksum {arrived}, published {weights.checksum}"
            )
        self._version, self._round = weights.version, weights.round

    def checksum(self) -> str:
        return checksum(unique_parameters(self.model))

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> list[RolloutGroup]:
        """One unscored group a request.

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
            between_tokens()
            logits = batch.logits / limits.temperature
            if t < limits.min_new_tokens - 1:
                logits[:, self.eos_id] = -torch.inf
            tokens = batch.drop_finished(batch.sample(t, logits, self._version, self._round))
            if len(tokens) == 0 or t + 1 == limits.max_new_tokens:
                break
            batch.advance(t, tokens)
        return batch.groups()


def _common_limits(requests: Sequence[Request]) -> SamplingLimits:
    if not requests:
        raise ValueError("nothing to generate: no requests")
    limits = {request.limits for request in requests}
    if len(limits) > 1:
        raise ValueError(f"requests of one call must share their limits, got {sorted(limits)}")
    return limits.pop()


class _Batch:
    """The rows of one call while they grow. B rows to fill, A of them still in the batch."""

    def __init__(self, engine: TorchEngine, requests: Sequence[Request]) -> None:
        self.model = engine.model
        self.requests = requests
        self.eos_id = engine.eos_id
        device = self.model.embedding.weight.device
        limits = requests[0].limits
        prompt_lengths = torch.tensor([len(r.prompt_ids) for r in requests], device=device)
        longest = int(prompt_lengths.max())
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
            uniforms(engine.seed, r.stream, r.cursor, response, limits.max_new_tokens)
            for r in requests
            for response in range(r.group_size)
        ]

        shape = (len(fan_out), limits.max_new_tokens)
        self.ids = torch.full(shape, engine.pad_id, device=device)
        self.mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self.log_probs = torch.zeros(shape, device=device)
        self.versions = torch.zeros(shape, dtype=torch.int32, device=device)
        self.rounds = torch.zeros(shape, dtype=torch.int32, device=device)
        self.finished = torch.zeros(len(fan_out), dtype=torch.bool, device=device)

        self.rows = torch.arange(len(fan_out), device=device)  # (A,) which of the B
        self.uniforms = torch.from_numpy(np.stack(draws)).to(device)  # (A, R)
        self.next_positions = prompt_lengths[fan_out]  # (A,)
        self.prompt_columns = longest
        columns = longest + limits.max_new_tokens
        hidden, self.cache = prefill(
            self.model, prompt_ids.to(device), prompt_lengths, fan_out, columns
        )
        last = hidden[torch.arange(len(requests), device=device), prompt_lengths - 1]
        self.logits = self._head(last)[fan_out]  # (A, V)

    def _head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.head_weight)

    def sample(self, t: int, logits: Tensor, version: int, round_: int) -> Tensor:
        """Draws token t of every row and records it where the row has not ended: (A,)."""
        tokens, log_probs = sample_tokens(logits, self.uniforms[:, t])
        running = ~self.finished[self.rows]
        rows = self.rows[running]
        self.ids[rows, t] = tokens[running]
        self.mask[rows, t] = True
        self.log_probs[rows, t] = log_probs[running]
        self.versions[rows, t] = version
        self.rounds[rows, t] = round_
        self.finished[rows] = tokens[running] == self.eos_id
        return tokens

    def advance(self, t: int, tokens: Tensor) -> None:
        """Feeds token t of every row; `logits` are those of token t + 1 afterwards."""
        column = self.prompt_columns + t
        hidden = decode(self.model, tokens, self.next_positions, self.cache, column)
        self.next_positions = self.next_positions + 1
        self.logits = self._head(hidden)

    def drop_finished(self, tokens: Tensor) -> Tensor:
        """The tokens of the rows that stay in the batch, none when every response has ended."""
        running = ~self.finished[self.rows]
        left = int(running.sum())
        if left >= COMPACT_BELOW * len(running) and left > 0:
            return tokens
        keep = running.nonzero()[:, 0]
        self.rows = self.rows[keep]
        self.uniforms = self.uniforms[keep]
        self.next_positions = self.next_positions[keep]
        self.cache.keep(keep)
        return tokens[keep]

    def groups(self) -> list[RolloutGroup]:
        """One group a request, on the CPU, cut to its own longest response."""
        groups, start = [], 0
        fields = [
            field.cpu()
            for field in (self.ids, self.mask, self.log_probs, self.versions, self.rounds)
        ]
        finished = self.finished.cpu()
        for request in self.requests:
            rows = slice(start, start + request.group_size)
            start += request.group_size
            longest = int(fields[1][rows].sum(dim=1).max())
            ids, mask, log_probs, versions, rounds = (
                field[rows, :longest].clone() for field in fields
            )
            groups.append(
                RolloutGroup(
                    cursor=request.cursor,
                    prompt_ids=torch.tensor(request.prompt_ids),
                    response_ids=ids,
                    response_mask=mask,
                    behaviour_log_probs=log_probs,
                    rewards=torch.full((request.group_size,), torch.nan),
                    finished=finished[rows].clone(),
                    token_versions=versions,
                    token_rounds=rounds,
                )
            )
        return groups
