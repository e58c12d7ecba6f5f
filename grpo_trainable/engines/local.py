"""What engines share that sample in their own process with a policy of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from grpo_trainable.engines.loaded_weights import LoadedWeights
from grpo_trainable.engines.rows import Rows
from grpo_trainable.engines.thinking_budget import ThinkingBudget
from grpo_trainable.models.policy import Policy
from grpo_trainable.models.stop_strings import stops_of
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.protocol.rollout import Request, RolloutGroup, SamplingLimits


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """The distinct prompts of one call, and which of them each row answers."""

    prompts: list[Tensor]  # (P,) int64 each
    fan_out: Tensor  # (B,) int64, which prompt
    max_new_tokens: int
    slots: int | None = None  # rows at a time, where that is fewer than B

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts))


class Decoder(Protocol):
    """Computes the logits of the next token for the rows of one call, on a cache of their tokens.

    B rows, of which A are in the batch; V vocabulary. Logits are float32 and the caller's to
    change.
    """

    def enter(self, rows: range) -> Tensor:
        """Logits (rows, V) of the first token of these of the B rows, which are in the batch from
        now on, behind those that were: all of them at once, unless the call has slots. Each
        distinct prompt among theirs is run once."""
        ...

    def next(self, tokens: Tensor) -> Tensor:
        """Logits (A, V) after one more token of every row, `tokens` (A,)."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Keeps only these of the A rows."""
        ...

    def rebuild(self, sampled: Tensor, lengths: Sequence[int]) -> None:
        """Fills the cache anew with the weights that are there now: the prompts and the tokens
        `sampled` (A, T) so far, of which each row has as many as `lengths` says: all T, unless the
        call has slots."""
        ...


class LocalEngine(LoadedWeights, ABC):
    """Samples token by token, and takes new weights between two tokens.

    Every draw is keyed by (seed, stream, prompt index, response, token). A list of requests that
    one call samples gives the same bits in any process on a machine, with as many threads.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        *,
        seed: int,
        recompute: bool = False,
        slots: int | None = None,
    ) -> None:
        """`recompute`: weights loaded in the middle of a call rebuild the KV cache of the tokens
        sampled so far (AReaL, arXiv 2505.24298). Otherwise the cache stays as the older weights
        left it (PipelineRL, arXiv 2509.19128). `slots`: rows in the batch at most, where the
        engine's decoder can let rows enter later; None: all of a call."""
        super().__init__(policy)
        self._policy = policy
        self._tokenizer = tokenizer
        self._seed = seed
        self._recompute = recompute
        self._slots = slots

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> list[RolloutGroup]:
        """Samples one unscored group for each request.

        Each distinct prompt runs through the model once, whatever its group size. Prompts may
        differ in length.

        Raises:
            ValueError: a prompt and its longest response exceed the context, the requests differ
                in their limits, or there is none.
        """
        limits = common_limits(requests)
        batch = self._prompts(requests, limits)
        stops = stops_of(limits.stop_strings, self._tokenizer, self._policy.vocab_size, self.device)
        rows = Rows(
            requests,
            pad_id=self._tokenizer.pad_id,
            seed=self._seed,
            stops=stops,
            device=self.device,
            slots=batch.slots,
            thinking_budget=self._thinking_budget(limits, len(batch.fan_out)),
        )
        decoder = self._decoder(batch)
        while not rows.over:
            # New weights are loaded before the forward pass, so that a token is stamped with the
            # weights that it is sampled from.
            loads = self._loads
            between_tokens()
            if self._recompute and rows.running and self._loads != loads:
                decoder.rebuild(*rows.fed())
            rows.draw(_next_logits(decoder, rows), self._version, self._round)
            keep = rows.drop_ended()
            if keep is not None and not rows.over:
                decoder.keep(keep)
        return rows.groups()

    @abstractmethod
    def _decoder(self, batch: PromptBatch) -> Decoder:
        """What computes the logits of one call."""

    def _thinking_budget(self, limits: SamplingLimits, rows: int) -> ThinkingBudget | None:
        """Those of a call of so many rows; None where its limits ask for none."""
        if limits.interruption is None:
            return None
        on_cpu = torch.device("cpu")  # each response is copied there once
        strings, vocab_size = limits.interruption.answer_strings, self._policy.vocab_size
        answers = stops_of(strings, self._tokenizer, vocab_size, on_cpu)
        return ThinkingBudget(limits.interruption, answers, rows, self.device)

    def _prompts(self, requests: Sequence[Request], limits: SamplingLimits) -> PromptBatch:
        longest = max(len(request.prompt_ids) for request in requests)
        if not all(request.prompt_ids for request in requests):
            raise ValueError("a prompt has no tokens")
        if longest + limits.max_new_tokens > self._policy.context_length:
            raise ValueError(
                f"a prompt of {longest} tokens and {limits.max_new_tokens} new ones do not fit "
                f"the context of {self._policy.context_length}"
            )
        sizes = torch.tensor([request.group_size for request in requests])
        waits = self._slots is not None and self._slots < int(sizes.sum())
        return PromptBatch(
            prompts=[torch.tensor(request.prompt_ids) for request in requests],
            fan_out=torch.repeat_interleave(torch.arange(len(requests)), sizes).to(self.device),
            max_new_tokens=limits.max_new_tokens,
            slots=self._slots if waits else None,
        )


def _next_logits(decoder: Decoder, rows: Rows) -> Tensor:
    """(A, V) of the rows in the batch, and of those that enter it now."""
    running = decoder.next(rows.last_tokens()) if rows.running else None
    entering = rows.enter()
    if not entering:
        assert running is not None, "no row runs, so those that wait enter"
        return running
    first = decoder.enter(entering)
    return first if running is None else torch.cat((running, first))


def common_limits(requests: Sequence[Request]) -> SamplingLimits:
    """The limits that the requests of one call share.

    Raises:
        ValueError: they differ in them, or there is no request.
    """
    if not requests:
        raise ValueError("nothing to generate: no requests")
    limits = {request.limits for request in requests}
    if len(limits) > 1:
        raise ValueError(
            f"requests of one call must share their limits, got {sorted(map(str, limits))}"
        )
    return limits.pop()
