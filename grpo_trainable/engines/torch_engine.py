"""The engine for this package's policies: a `TransformerLM` with a preallocated KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_trainable.engines.agreement import TOKENS, probes, refuse_disagreement
from grpo_trainable.engines.decoder import Decoder, EpisodeDecoder, PromptBatch
from grpo_trainable.engines.engine import EngineSetup
from grpo_trainable.engines.local import LocalEngine
from grpo_trainable.models.kv_cache import KVCache, decode, decode_in_place, padded, prefill
from grpo_trainable.models.narrow import narrow
from grpo_trainable.models.shelved_cache import ShelvedCache
from grpo_trainable.models.store import build_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.protocol.rollout import SamplingLimits


class TorchEngine(LocalEngine):
    """An engine that samples with a `TransformerLM`."""

    def __init__(
        self,
        model: TransformerLM,
        tokenizer: Tokenizer,
        *,
        seed: int,
        recompute: bool = False,
        slots: int | None = None,
    ) -> None:
        """Build an engine around `model`. `LocalEngine` describes the other arguments."""
        super().__init__(model, tokenizer, seed=seed, recompute=recompute, slots=slots)
        self.model = model

    def _decoder(self, batch: PromptBatch) -> Decoder:
        if batch.slots is not None:
            return SlotDecoder(self.model, batch, batch.slots, self._tokenizer.pad_id)
        return TorchDecoder(self.model, batch, self._tokenizer.pad_id)

    def _episode_decoder(self, batch: PromptBatch) -> EpisodeDecoder:
        return TorchEpisodeDecoder(self.model, batch, self._tokenizer.pad_id)


def build_torch_engine(setup: EngineSetup) -> TorchEngine:
    """Build the engine of a trial, with the policy that its config names."""
    config, tokenizer = setup.config, setup.tokenizer
    model, _ = build_policy(config.model, config.seed)
    if not isinstance(model, TransformerLM):
        raise ValueError(
            "the model is not a policy of this package; engine=torch works only with such policies"
        )
    narrows = config.model.sampler_dtype == "bfloat16"
    if narrows:
        narrow(model)
    engine = TorchEngine(
        model.to(setup.device),
        tokenizer,
        seed=config.seed,
        recompute=config.weight_update == "interrupt_recompute",
        slots=config.rollout.slots,
    )
    if narrows:
        _compare_with_learner(engine, setup)
    return engine


def _compare_with_learner(engine: TorchEngine, setup: EngineSetup) -> None:
    """Sample a few tokens in bfloat16 and compare their log-probs with the learner's.

    Raises:
        ValueError: The log-probs disagree (`refuse_disagreement`).
    """
    learner, tokenizer = build_policy(setup.config.model, setup.config.seed)
    limits = SamplingLimits(
        min_new_tokens=1, max_new_tokens=TOKENS, temperature=1.0, end_ids=tokenizer.end_ids
    )
    requests = probes(limits, learner.vocab_size, learner.context_length)
    learner = learner.to(setup.device)
    refuse_disagreement(engine, learner, requests, tokenizer.pad_id, precision=torch.bfloat16)


class TorchDecoder:
    """Computes logits with a `KVCache`.

    Prompts are padded on the right to P tokens and the padded columns are masked. All rows
    therefore write their t-th token to the same column.
    """

    _cache: KVCache

    def __init__(self, model: TransformerLM, batch: PromptBatch, pad_id: int) -> None:
        self._model = model
        device = batch.fan_out.device
        self._prompt_ids = padded(batch.prompts, pad_id).to(device)  # (prompts, P)
        lengths = torch.tensor([len(prompt) for prompt in batch.prompts], device=device)
        self._prompt_lengths = lengths  # (prompts,)
        self._columns = batch.longest + batch.max_new_tokens
        self._fan_out = batch.fan_out  # (A,)
        self._next_positions = lengths[batch.fan_out]  # (A,)
        self._next_column = batch.longest

    def enter(self, rows: range) -> Tensor:
        """Run the model on the prompts; return the logits (B, V) for every row's first token."""
        assert len(rows) == len(self._fan_out), "all rows enter at once"
        hidden = self._prefill()
        prompts = torch.arange(len(hidden), device=hidden.device)
        last = hidden[prompts, self._prompt_lengths - 1]
        return self._model.head(last)[self._fan_out]

    def next(self, tokens: Tensor) -> Tensor:
        """Append one token (A,) to every row and return the logits (A, V) for the next token."""
        positions, column = self._next_positions, self._next_column
        hidden = decode(self._model, tokens[:, None], positions[:, None], self._cache, column)
        self._next_positions, self._next_column = positions + 1, column + 1
        return self._model.head(hidden[:, 0])

    def keep(self, rows: Tensor) -> None:
        """Keep only the rows at these indices of the batch."""
        self._fan_out = self._fan_out[rows]
        self._next_positions = self._next_positions[rows]
        self._cache.keep(rows)

    def rebuild(self, sampled: Tensor, lengths: Sequence[int]) -> None:
        """Recompute the cache for the prompts and the `sampled` tokens (A, T)."""
        self._prefill()
        count = sampled.shape[1]
        if count:
            steps = torch.arange(count, device=sampled.device)
            positions = self._prompt_lengths[self._fan_out][:, None] + steps
            decode(self._model, sampled, positions, self._cache, self._prompt_ids.shape[1])

    def _prefill(self) -> Tensor:
        """Start a new cache for the rows, and return the prompts' hidden states (prompts, P, D)."""
        hidden, self._cache = prefill(
            self._model,
            self._prompt_ids,
            self._prompt_lengths,
            self._fan_out,
            columns=self._columns,
        )
        return hidden


class SlotDecoder:
    """Computes logits with a `ShelvedCache`, so that a new row can replace one that has ended."""

    def __init__(self, model: TransformerLM, batch: PromptBatch, slots: int, pad_id: int) -> None:
        self._model = model
        self._pad_id = pad_id
        self._prompts = batch.prompts
        self._prompt_of: list[int] = batch.fan_out.tolist()  # (B,) index of each row's prompt
        self._rows: list[int] = []  # (A,) indices among the B rows
        self._device = batch.fan_out.device
        columns = batch.longest + batch.max_new_tokens
        self._cache = ShelvedCache(model.config, columns, slots, self._device)

    def enter(self, rows: range) -> Tensor:
        """Add `rows` to the batch and return the logits (rows, V) for their first tokens."""
        # Rows enter in the order of their prompts, so the prompts of these rows are consecutive.
        first, last = self._prompt_of[rows[0]], self._prompt_of[rows[-1]]
        fan_out = [self._prompt_of[row] - first for row in rows]
        self._rows += rows
        return self._first(self._prompts[first : last + 1], fan_out)

    def next(self, tokens: Tensor) -> Tensor:
        """Append one token (A,) to every row and return the logits (A, V) for the next token."""
        return self._model.head(self._cache.decode(self._model, tokens))

    def keep(self, rows: Tensor) -> None:
        """Keep only the rows at these indices of the batch."""
        places = rows.tolist()
        self._rows = [self._rows[place] for place in places]
        self._cache.keep(places)

    def rebuild(self, sampled: Tensor, lengths: Sequence[int]) -> None:
        """Recompute the cache for each row: its prompt and its first `lengths` sampled tokens."""
        prompts = [self._prompts[self._prompt_of[row]] for row in self._rows]
        sampled = sampled.cpu()
        sequences = [
            torch.cat((prompt, own[:length]))
            for prompt, own, length in zip(prompts, sampled, lengths, strict=True)
        ]
        self._cache.clear()
        self._prefill(sequences, range(len(sequences)))

    def _first(self, prompts: Sequence[Tensor], fan_out: Sequence[int]) -> Tensor:
        """Add rows with these prompts, and return the logits (rows, V) for their first tokens."""
        hidden = self._prefill(prompts, fan_out)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        hidden = hidden[torch.arange(len(prompts), device=self._device), last]
        logits = self._model.head(hidden)
        return logits[torch.tensor(fan_out, device=self._device)]

    def _prefill(self, sequences: Sequence[Tensor], fan_out: Sequence[int]) -> Tensor:
        """Add rows with these sequences to the cache; return hidden states (sequences, S, D)."""
        ids = padded(sequences, self._pad_id).to(self._device)
        return self._cache.prefill(self._model, ids, [len(s) for s in sequences], fan_out)


class TorchEpisodeDecoder(EpisodeDecoder):
    """Computes logits with a `KVCache`, for rows with different numbers of tokens."""

    _cache: KVCache

    def __init__(self, model: TransformerLM, batch: PromptBatch, pad_id: int) -> None:
        super().__init__(batch, pad_id)
        self._model = model

    def next(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits (A, V) after one more token (A,) of every row."""
        return self._logits(decode_in_place(self._model, tokens, positions, self._cache))

    def keep(self, rows: Tensor) -> None:
        """Keep only the rows at these indices of the batch."""
        self._cache.keep(rows)

    def _prefill(self, ids: Tensor, lengths: Tensor, fan_out: Tensor) -> Tensor:
        hidden, self._cache = prefill(self._model, ids, lengths, fan_out, columns=self._columns)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._model.head(hidden)
