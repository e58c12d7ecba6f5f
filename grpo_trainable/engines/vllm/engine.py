"""The engine vLLM (extra `vllm` or `vllm-gpu`), which samples token by token.

Random draws use the same keys as in the other engines, but vLLM's rounding depends on which rows
are processed together. So this engine promises neither identical bits when a call is repeated, nor
log-probs within 1e-4 of the learner's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from grpo_trainable.config import ConfigError
from grpo_trainable.engines.engine import Action, EngineError, Observation, Partner
from grpo_trainable.engines.local import common_limits
from grpo_trainable.engines.recorded import RecordedRow, as_group
from grpo_trainable.engines.vllm.transfer import Renaming, send_weights
from grpo_trainable.models.sampling import response_seed
from grpo_trainable.models.stop_strings import StopStrings, stops_of
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.protocol.rollout import PolicyWeights, Request, RolloutGroup, SamplingLimits

if TYPE_CHECKING:
    from vllm import LLM  # pyright: ignore

CPU = torch.device("cpu")


@dataclass(kw_only=True)
class _Row(RecordedRow):
    """A response that vLLM samples. Each action is a separate request to vLLM."""

    request: Request
    response: int  # index among the responses to its prompt
    index: int  # index among all responses of the call
    begin: int = 0  # index of the current action's first token

    @property
    def action(self) -> list[int]:
        """The tokens of the current action. Without an environment, they are the whole response."""
        return self.ids[self.begin :]


class VLLMEngine:
    """Samples with a vLLM model, which has no weights before the first `load`."""

    def __init__(
        self,
        llm: LLM,
        tokenizer: Tokenizer,
        *,
        renamed: Renaming,
        vocab_size: int,
        longest: int,
        rows: int,
        seed: int,
        recompute: bool = False,
        workers: int = 1,
    ) -> None:
        """Build an engine around `llm`.

        Args:
            llm: vLLM, started without weights.
            tokenizer: Tokenizer of the policy.
            renamed: Function that gives the learner's tensors their names in `transformers`.
            vocab_size: Size of the vocabulary.
            longest: Maximum number of tokens of a prompt plus its response.
            rows: Maximum number of rows that are sampled together.
            seed: Seed of all draws.
            recompute: Recompute the KV cache when weights arrive in the middle of a call.
            workers: Number of devices that vLLM has divided the model among.
        """
        self.llm = llm
        self._engine = llm.llm_engine
        self._tokenizer = tokenizer
        self._renamed = renamed
        self._vocab_size = vocab_size
        self._longest = longest
        self._rows = rows
        self._seed = seed
        self._recompute = recompute
        self._workers = workers
        self._asleep = False
        self._keys = map(str, count())
        self._running: dict[str, _Row] = {}  # rows by their keys in vLLM
        self._loads = 0
        self._version = 0
        self._round = 0
        llm.init_weight_transfer_engine({"init_info": {}})

    @property
    def version(self) -> int:
        """Number of gradient steps that produced the weights now in use."""
        return self._version

    @property
    def round(self) -> int:
        """Number of training rounds that produced the weights now in use."""
        return self._round

    def load(self, weights: PolicyWeights) -> None:
        """Load a snapshot and sample with it from the next token on.

        Raises:
            RuntimeError: The snapshot arrived corrupted, or lacks a tensor of the model.
        """
        self._wake()
        send_weights(self.llm, weights, self._renamed, leaves_process=self._workers > 1)
        self._version, self._round = weights.version, weights.round
        self._loads += 1
        if self._recompute or not self._running:
            self._forget_cache()

    def _forget_cache(self) -> None:
        """Drop the KV cache of older weights. Running rows recompute their parts of the cache."""
        if not self._engine.reset_prefix_cache(reset_running_requests=bool(self._running)):
            raise EngineError("engine=vllm: the KV cache of older weights could not be dropped")

    def sleep(self) -> None:
        """Release the GPU memory until the next call of `load` or `generate`.

        vLLM moves its weights to main memory and drops its KV cache.
        """
        if not self._asleep:
            self.llm.sleep(level=1)
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            torch.cuda.empty_cache()  # release the memory that the learner has freed
            self.llm.wake_up()
            self._asleep = False

    # ---- Sampling ----------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> list[RolloutGroup]:
        """Sample one unscored group for each request.

        Raises:
            ValueError: A prompt is empty or longer than any prompt examined when the engine was
                built, the requests differ in their limits, or there are no requests.
            EngineError: vLLM samples no token in a step, or samples with weights of an unexpected
                version.
        """
        return self._sampled(requests, between_tokens, None)

    def play(
        self, requests: Sequence[Request], between_tokens: Callable[[], None], partner: Partner
    ) -> list[RolloutGroup]:
        """Sample one unscored group of episodes for each request (`PlayingEngine`).

        Unlike in other engines, an observation is prefilled, and so is every token before it that
        vLLM no longer has in its cache. The draws of an action depend on the index of its first
        token.

        Raises:
            ValueError, EngineError: For the same reasons as in `generate`.
        """
        return self._sampled(requests, between_tokens, partner)

    def _sampled(
        self,
        requests: Sequence[Request],
        between_tokens: Callable[[], None],
        partner: Partner | None,
    ) -> list[RolloutGroup]:
        """Sample a group for each request. With a partner, the responses are episodes."""
        limits = common_limits(requests)
        self._refuse_too_long(requests, limits)
        self._wake()
        stops = stops_of(limits.stop_strings, self._tokenizer, self._vocab_size, CPU)
        indices = count()
        groups = [
            [
                _Row(request=request, response=g, index=next(indices))
                for g in range(request.group_size)
            ]
            for request in requests
        ]
        rows = [row for group in groups for row in group]
        waiting = deque(rows)
        acting: set[int] = set()  # indices of the rows that wait for their environments
        with self._nothing_left_running():
            while waiting or self._running or acting:
                if partner is not None and acting:
                    can_go_on = bool(waiting or self._running)
                    for observation in partner.observations(waits=not can_go_on):
                        acting.remove(observation.row)
                        if _continues(rows[observation.row], observation, limits):
                            waiting.append(rows[observation.row])
                    if not waiting and not self._running:
                        continue
                between_tokens()
                self._admit(waiting)
                for row in self._step(limits, stops):
                    if partner is not None and row.finished:
                        acting.add(row.index)
                        partner.act(Action(row.index, row.action, len(row.ids) - 1))
        return [
            as_group(request, group, self._tokenizer.pad_id)
            for request, group in zip(requests, groups, strict=True)
        ]

    def _refuse_too_long(self, requests: Sequence[Request], limits: SamplingLimits) -> None:
        longest = max(len(request.prompt_ids) for request in requests)
        if not all(request.prompt_ids for request in requests):
            raise ValueError("a prompt has no tokens")
        if longest + limits.max_new_tokens > self._longest:
            raise ConfigError(
                f"rollout.max_new_tokens={limits.max_new_tokens}: a prompt of {longest} tokens and "
                f"{limits.max_new_tokens} new tokens do not fit the {self._longest} tokens that "
                "vLLM was started for"
            )

    @contextmanager
    def _nothing_left_running(self) -> Iterator[None]:
        """If a call fails, make vLLM drop the rows of the call."""
        try:
            yield
        finally:
            if self._running:
                self._engine.abort_request(list(self._running))
                self._running.clear()

    def _admit(self, waiting: deque[_Row]) -> None:
        """Pass waiting rows to vLLM, until it has as many rows as it can process together.

        The remaining rows begin later, with the weights that are loaded at that time.
        """
        while waiting and len(self._running) < self._rows:
            row, key = waiting.popleft(), next(self._keys)
            prompt = {
                "prompt_token_ids": [*row.request.prompt_ids, *row.ids],
                # An action shares a cache only with actions that began with the same weights.
                "cache_salt": str(self._loads),
            }
            self._engine.add_request(key, prompt, self._parameters(row))
            self._running[key] = row

    def _parameters(self, row: _Row) -> Any:
        """Return the sampling parameters of a row for vLLM."""
        from vllm import SamplingParams  # pyright: ignore
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore

        request, limits = row.request, row.request.limits
        # Every action except the first continues a response, as a request with a state does.
        state = (row.response, row.begin) if row.begin else request.state
        return SamplingParams(
            temperature=limits.temperature,
            top_p=limits.top_p,
            max_tokens=limits.max_new_tokens - row.begin,
            min_tokens=limits.min_new_tokens - 1,  # our minimum includes the end token
            stop_token_ids=list(limits.end_ids),
            ignore_eos=True,  # only `end_ids` end a response
            logprobs=0,  # only the log-prob of the sampled token
            # One request per response. With n > 1, vLLM would use the seeds seed + i, which could
            # be the seeds of other requests.
            seed=response_seed(
                self._seed, request.stream, request.prompt_index, row.response, state
            ),
            detokenize=False,
            skip_special_tokens=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _step(self, limits: SamplingLimits, stops: StopStrings | None) -> list[_Row]:
        """Run one step of vLLM, which samples one token for every row that it processes.

        Returns:
            The rows whose action ended. `finished` is False if the token limit cut off the action.
        """
        outputs = self._engine.step()
        if not outputs:
            raise EngineError("engine=vllm: a step sampled no token")
        ended, stopped = [], []
        for output in outputs:
            key, part = output.request_id, output.outputs[0]
            row = self._running[key]
            for token, law in zip(part.token_ids, part.logprobs, strict=True):
                row.add(token, law[token].logprob, self._version, self._round)
            if output.finished:
                row.finished = part.finish_reason == "stop"
                del self._running[key]
                _refuse_other_versions(row, part.weight_versions)
            if stops is not None and _is_stopped(row, limits, stops):
                row.finished = True
                if self._running.pop(key, None) is not None:
                    stopped.append(key)
            if key not in self._running:
                ended.append(row)
        if stopped:
            self._engine.abort_request(stopped)
        return ended


def _continues(row: _Row, observation: Observation, limits: SamplingLimits) -> bool:
    """Feed a row the answer of its environment, and return True if the row acts again.

    The row ends if the answer would leave no room for another sampled token.
    """
    row.finished = observation.finished
    if observation.over or len(row.ids) + len(observation.ids) >= limits.max_new_tokens:
        return False
    row.feed(observation.ids)
    row.begin = len(row.ids)
    return True


def _is_stopped(row: _Row, limits: SamplingLimits, stops: StopStrings) -> bool:
    """Return True if a row is long enough to end and its last token completes a stop string."""
    early = len(row.ids) < limits.min_new_tokens
    return (
        not early
        and bool(stops.may_complete[row.ids[-1]])
        and stops.completed([*row.request.answered, *row.action])
    )


def _refuse_other_versions(row: _Row, spans: Sequence[Any] | None) -> None:
    """Compare the versions that vLLM recorded for a row's tokens with those that the row recorded.

    Raises:
        EngineError: The versions differ.
    """
    noted = [span.version for span in spans or () for _ in range(span.start, span.end)]
    ours = list(map(str, row.versions[row.begin :]))
    if noted != ours:
        raise EngineError(
            f"engine=vllm: prompt {row.request.prompt_index} of stream {row.request.stream}: vLLM "
            f"sampled with versions {noted}, but should have used {ours}"
        )
