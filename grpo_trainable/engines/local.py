"""The sampling loops shared by engines that hold a policy in their own process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_trainable.config import ConfigError
from grpo_trainable.engines.decoder import Decoder, EpisodeDecoder, PromptBatch
from grpo_trainable.engines.engine import Partner
from grpo_trainable.engines.episode_rows import EpisodeRows
from grpo_trainable.engines.loaded_weights import LoadedWeights
from grpo_trainable.engines.rows import Rows
from grpo_trainable.engines.thinking_budget import ThinkingBudget
from grpo_trainable.models.policy import Policy
from grpo_trainable.models.stop_strings import stops_of
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.protocol.rollout import Request, RolloutGroup, SamplingLimits


class LocalEngine(LoadedWeights, ABC):
    """Samples token by token, and loads new weights between two tokens.

    Every random draw is a function of (seed, stream, prompt index, response, token). On one
    machine, the same list of requests in one call gives the same bits in any process with the same
    number of threads.
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
        """Build an engine around `policy`.

        Args:
            policy: Policy to sample from. Its parameters stop requiring gradients.
            tokenizer: Tokenizer of the policy.
            seed: Seed of all draws.
            recompute: When weights arrive in the middle of a call, rebuild the KV cache of the
                tokens sampled so far (AReaL, arXiv 2505.24298). Otherwise, keep the cache that was
                computed with the older weights (PipelineRL, arXiv 2509.19128).
            slots: Maximum number of rows in the batch, for an engine whose decoder lets rows enter
                later. With None, all rows of a call are in the batch from the start.
        """
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
        """Sample one unscored group for each request.

        The prompt of each request runs through the model once, whatever the group size. Prompts may
        differ in length.

        Raises:
            ConfigError: A prompt plus the maximum number of new tokens exceeds the context.
            ValueError: A prompt is empty, the requests differ in their limits, or there are no
                requests.
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
            # Load new weights before the forward pass, so that each token gets the version of the
            # weights that computed its logits.
            loads = self._loads
            between_tokens()
            if self._recompute and rows.running and self._loads != loads:
                decoder.rebuild(*rows.fed())
            rows.draw(_next_logits(decoder, rows), self._version, self._round)
            keep = rows.drop_ended()
            if keep is not None and not rows.over:
                decoder.keep(keep)
        return rows.groups()

    @torch.no_grad()
    def play(
        self, requests: Sequence[Request], between_tokens: Callable[[], None], partner: Partner
    ) -> list[RolloutGroup]:
        """Sample one unscored group of episodes for each request (`PlayingEngine`).

        Observations are fed token by token, so no token is prefilled twice. The t-th random draw of
        a response belongs to its t-th token, whether that token is sampled or fed.

        Raises:
            ValueError: For the same reasons as in `generate`.
        """
        batch = self._prompts(requests, common_limits(requests))
        rows = self._episode_rows(requests)
        decoder = self._episode_decoder(batch)
        between_tokens()
        logits = decoder.first()
        while True:
            for action in rows.draw(logits, self._version, self._round):
                partner.act(action)
            rows.listen_to(partner)
            keep = rows.drop_over()
            if keep is not None:
                if not len(keep):
                    return rows.groups()
                decoder.keep(keep)
            loads = self._loads
            between_tokens()
            if self._recompute and self._loads != loads:
                decoder.rebuild(rows.sequences())
            logits = decoder.next(*rows.last_tokens())

    @abstractmethod
    def _decoder(self, batch: PromptBatch) -> Decoder:
        """Return the decoder that computes the logits of one call of `generate`."""

    @abstractmethod
    def _episode_decoder(self, batch: PromptBatch) -> EpisodeDecoder:
        """Return the decoder that computes the logits of one call of `play`."""

    def _episode_rows(self, requests: Sequence[Request]) -> EpisodeRows:
        strings, vocab_size = requests[0].limits.stop_strings, self._policy.vocab_size
        on_cpu = torch.device("cpu")  # stop strings are searched for on the CPU
        return EpisodeRows(
            requests,
            pad_id=self._tokenizer.pad_id,
            seed=self._seed,
            stops=stops_of(strings, self._tokenizer, vocab_size, on_cpu),
            device=self.device,
        )

    def _thinking_budget(self, limits: SamplingLimits, rows: int) -> ThinkingBudget | None:
        """Return the interruptions of a call, or None if its limits define none."""
        if limits.interruption is None:
            return None
        on_cpu = torch.device("cpu")  # each response is copied to the CPU once
        strings, vocab_size = limits.interruption.answer_strings, self._policy.vocab_size
        answers = stops_of(strings, self._tokenizer, vocab_size, on_cpu)
        return ThinkingBudget(limits.interruption, answers, rows, self.device)

    def _prompts(self, requests: Sequence[Request], limits: SamplingLimits) -> PromptBatch:
        longest = max(len(request.prompt_ids) for request in requests)
        if not all(request.prompt_ids for request in requests):
            raise ValueError("a prompt has no tokens")
        if longest + limits.max_new_tokens > self._policy.context_length:
            raise ConfigError(
                f"rollout.max_new_tokens={limits.max_new_tokens}: a prompt of {longest} tokens and "
                f"{limits.max_new_tokens} new tokens do not fit the context of "
                f"{self._policy.context_length}"
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
    """Return the logits (A, V) for the rows in the batch, including those that enter now."""
    running = decoder.next(rows.last_tokens()) if rows.running else None
    entering = rows.enter()
    if not entering:
        assert running is not None, "no row is running, so at least one waiting row must enter"
        return running
    first = decoder.enter(entering)
    return first if running is None else torch.cat((running, first))


def common_limits(requests: Sequence[Request]) -> SamplingLimits:
    """Return the limits that all requests of one call share.

    Raises:
        ValueError: The limits differ, or there are no requests.
    """
    if not requests:
        raise ValueError("nothing to generate: no requests")
    limits = {request.limits for request in requests}
    if len(limits) > 1:
        raise ValueError(
            f"requests of one call must share their limits, got {sorted(map(str, limits))}"
        )
    return limits.pop()
