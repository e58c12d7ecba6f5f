"""The engine for Hugging Face models: their forward pass and cache, in our sampling loop.

The `generate()` method of `transformers` accepts neither our random draws nor new weights between
two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from grpo_trainable.engines.decoder import PromptBatch
from grpo_trainable.engines.engine import EngineSetup
from grpo_trainable.engines.hf.cache import cache_argument, preallocated_cache
from grpo_trainable.engines.hf.episode_decoder import HFEpisodeDecoder
from grpo_trainable.engines.local import LocalEngine
from grpo_trainable.models.hf.policy import HFPolicy
from grpo_trainable.models.store import build_adapted_policy, build_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.plugins import one_line
from grpo_trainable.protocol.rollout import PolicyWeights

Probe: TypeAlias = Callable[[PromptBatch, Tensor], tuple[Tensor, Tensor]]


class HFEngine(LocalEngine):
    """An engine that samples with an `HFPolicy`."""

    def __init__(
        self,
        policy: HFPolicy,
        tokenizer: Tokenizer,
        *,
        seed: int,
        recompute: bool = False,
        plays: bool = False,
    ) -> None:
        """Build an engine around `policy`. `LocalEngine` describes the other arguments.

        Args:
            policy: Policy to sample from.
            tokenizer: Tokenizer of the policy.
            seed: Seed of all draws.
            recompute: Rebuild the cache when weights arrive.
            plays: Check that the model's cache also suits `play`.

        Raises:
            ValueError: The engine cannot sample from the model token by token. The message is one
                line.
        """
        super().__init__(policy, tokenizer, seed=seed, recompute=recompute)
        self.policy = policy
        self._head: Tensor | None = None  # converted copy of the head; None until needed
        self._refuse_other_caches(self._probe_of_responses)
        if plays:
            self._refuse_other_caches(self._probe_of_episodes)

    def load(self, weights: PolicyWeights) -> None:
        """Load a snapshot (`LoadedWeights.load`) and drop the converted copy of the head."""
        super().load(weights)
        self._head = None

    def _decoder(self, batch: PromptBatch) -> HFDecoder:
        return HFDecoder(self.policy, self._logits, batch, self._tokenizer.pad_id)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits (A, V) of hidden states (A, D)."""
        if self._head is None:
            # The copy is computed only once per snapshot, because converting the head of a
            # bfloat16 model to float32 takes about as long as sampling a token.
            _, self._head = self.policy.head_operands(hidden)
        return (hidden.to(self._head.dtype) @ self._head.t()).float()

    def _episode_decoder(self, batch: PromptBatch) -> HFEpisodeDecoder:
        return HFEpisodeDecoder(self.policy, self._logits, batch, self._tokenizer.pad_id)

    def _probe_of_responses(self, batch: PromptBatch, token: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (B, V) of prompts, and of the same `token` (1,) after each prompt."""
        decoder, rows = self._decoder(batch), len(batch.prompts)
        return decoder.enter(range(rows)), decoder.next(token.expand(rows))

    def _probe_of_episodes(self, batch: PromptBatch, token: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of `_probe_of_responses`, computed with the cache for episodes."""
        decoder = self._episode_decoder(batch)
        positions = torch.tensor([len(prompt) for prompt in batch.prompts], device=self.device)
        return decoder.first(), decoder.next(token.expand(len(positions)), positions)

    @torch.no_grad()
    def _refuse_other_caches(self, probe: Probe) -> None:
        """Check that a padded cache gives the same logits as one pass over all tokens.

        Raises:
            ValueError: The logits differ or cannot be computed. The message is one line.
        """
        ids = torch.linspace(0, self.policy.vocab_size - 1, 9, dtype=torch.float64).long()
        prompts, last = [ids[:8], ids[3:6]], ids[8:].to(self.device)
        rows = torch.arange(2, device=self.device)
        batch = PromptBatch(prompts=prompts, fan_out=rows, max_new_tokens=1)
        try:
            on_cache = torch.stack(probe(batch, last), dim=1)
        except (AttributeError, NotImplementedError, TypeError) as error:
            raise ValueError(
                f"{self._name} has an unsupported kind of cache ({one_line(error)})"
            ) from error
        for prompt, logits in zip(prompts, on_cache, strict=True):
            whole = torch.cat((prompt.to(self.device), last))
            expected = self._logits(self.policy.hidden_states(whole[None])[0, -2:])
            # The allowed difference, relative to the largest logit, covers rounding in the layers.
            allowed = 2.0**-4 if self.policy.head_weight.dtype.itemsize < 4 else 2.0**-10
            if not bool((logits - expected).abs().max() <= allowed * expected.abs().max()):
                raise ValueError(
                    f"{self._name} computes different logits with a cache and padding than in one "
                    "pass, so it would not sample from the distribution that the learner scores"
                )

    @property
    def _name(self) -> str:
        return type(self.policy.model).__name__


def build_hf_engine(setup: EngineSetup) -> HFEngine:
    """Build the engine of a trial, with the model that its config names."""
    config = setup.config
    build = build_adapted_policy if config.adapters_apart else build_policy
    policy, _ = build(config.model, config.seed)
    if not isinstance(policy, HFPolicy):
        raise ValueError(
            "this engine samples from Hugging Face models, but model.path does not name one"
        )
    return HFEngine(
        policy.to(setup.device),
        setup.tokenizer,
        seed=config.seed,
        recompute=config.weight_update == "interrupt_recompute",
        plays=config.env.plays,
    )


class HFDecoder:
    """Computes logits with a cache from `transformers`.

    Prompts are padded on the left to P columns, so that no row has a gap after its prompt. Some
    architectures let a token see only a window of columns, and a gap would fill part of that
    window.
    """

    def __init__(
        self,
        policy: HFPolicy,
        logits: Callable[[Tensor], Tensor],
        batch: PromptBatch,
        pad_id: int,
    ) -> None:
        """Set up a decoder. `logits` maps hidden states (A, D) to logits (A, V)."""
        self._policy = policy
        self._logits = logits
        device = batch.fan_out.device
        prompts, columns = len(batch.prompts), batch.longest + batch.max_new_tokens
        ids = torch.full((prompts, batch.longest), pad_id)
        seen = torch.ones(prompts, columns, dtype=torch.int64)
        for row, prompt in enumerate(batch.prompts):
            ids[row, batch.longest - len(prompt) :] = prompt
            seen[row, : batch.longest - len(prompt)] = 0
        self._prompt_ids = ids.to(device)  # (prompts, P)
        self._seen = seen.to(device)  # (prompts, P + R), 0 where a column is padding
        self._padding = (seen == 0).sum(dim=1).to(device)  # (prompts,), padding columns
        self._is_padded = bool((seen == 0).any())
        self._fan_out = batch.fan_out  # (A,)
        self._cache_name = cache_argument(policy.body)

    def enter(self, rows: range) -> Tensor:
        """Run the model on the prompts; return the logits (B, V) for every row's first token."""
        assert len(rows) == len(self._fan_out), "all rows enter at once"
        return self._logits(self._prefill())[self._fan_out]

    def next(self, tokens: Tensor) -> Tensor:
        """Append one token (A,) to every row and return the logits (A, V) for the next token."""
        return self._logits(self._run(tokens[:, None], self._fan_out))

    def keep(self, rows: Tensor) -> None:
        """Keep only the rows at these indices of the batch."""
        self._fan_out = self._fan_out[rows]
        self._cache.batch_select_indices(rows)

    def rebuild(self, sampled: Tensor, lengths: Sequence[int]) -> None:
        """Recompute the cache for the prompts and the `sampled` tokens (A, T)."""
        self._prefill()
        if sampled.shape[1]:
            self._run(sampled, self._fan_out)

    def _prefill(self) -> Tensor:
        """Start a new cache for the rows; return each prompt's last hidden state, (prompts, D)."""
        self._cache = preallocated_cache(self._policy.model.config, self._seen.shape[1])
        hidden = self._run(self._prompt_ids, torch.arange(len(self._prompt_ids)))
        self._cache.batch_select_indices(self._fan_out)
        return hidden

    def _run(self, tokens: Tensor, prompts: Tensor) -> Tensor:
        """Append `tokens` (A, T) to the cache and return each row's last hidden state, (A, D).

        `prompts` (A,) is the index of each row's prompt.
        """
        begin = self._cache.get_seq_length()
        end = begin + tokens.shape[1]
        columns = torch.arange(begin, end, device=tokens.device)
        output = self._policy.body(
            input_ids=tokens,
            attention_mask=self._seen[prompts, :end] if self._is_padded else None,
            position_ids=(columns - self._padding[prompts, None]).clamp_(min=0),
            **{self._cache_name: self._cache},
            use_cache=True,
        )
        return output.last_hidden_state[:, -1]
