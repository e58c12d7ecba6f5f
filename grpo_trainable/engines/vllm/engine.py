"""The engine vLLM (extra `vllm`), in this process and token by token.

Draws are seeded as ours are keyed, but how vLLM rounds depends on what it computes together: it
promises neither the same bits again nor the log-probs of the learner to 1e-4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from grpo_trainable.engines.engine import EngineError
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
    """A response that vLLM samples."""

    request: Request
    response: int  # index among the responses to its prompt


class VLLMEngine:
    """Samples with a model of vLLM that has no weights before the first `load`."""

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
    ) -> None:
        """`renamed`: gives tensors of the learner the names that they have in transformers.
        `longest`: tokens of a prompt and its response together; `rows`: sampled at once. With
        `recompute` weights that come in the middle of a call have the KV cache computed anew."""
        self.llm = llm
        self._engine = llm.llm_engine
        self._tokenizer = tokenizer
        self._renamed = renamed
        self._vocab_size = vocab_size
        self._longest = longest
        self._rows = rows
        self._seed = seed
        self._recompute = recompute
        self._keys = map(str, count())
        self._running: dict[str, _Row] = {}  # rows by vLLM's own key
        self._loads = 0
        self._version = 0
        self._round = 0
        llm.init_weight_transfer_engine({"init_info": {}})

    @property
    def version(self) -> int:
        return self._version

    @property
    def round(self) -> int:
        return self._round

    def load(self, weights: PolicyWeights) -> None:
        """Samples with the snapshot from the next token on.

        Raises:
            RuntimeError: it arrived torn, or does not fill the model.
        """
        send_weights(self.llm, weights, self._renamed)
        self._version, self._round = weights.version, weights.round
        self._loads += 1
        if self._recompute or not self._running:
            self._forget_cache()

    def _forget_cache(self) -> None:
        """Drops the KV cache of older weights; rows that run compute theirs anew."""
        if not self._engine.reset_prefix_cache(reset_running_requests=bool(self._running)):
            raise EngineError("engine=vllm: the KV cache of older weights could not be dropped")

    # ---- Sampling ----------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> list[RolloutGroup]:
        """Samples one unscored group for each request.

        Raises:
            ValueError: a prompt is longer than those that were looked at when the engine was built,
                the requests differ in their limits, or there is none.
            EngineError: vLLM answers something else than one token of every row that it computes.
        """
        limits = common_limits(requests)
        self._refuse_too_long(requests, limits)
        stops = stops_of(limits.stop_strings, self._tokenizer, self._vocab_size, CPU)
        groups = [
            [_Row(request=request, response=g) for g in range(request.group_size)]
            for request in requests
        ]
        waiting = deque(row for rows in groups for row in rows)
        with self._nothing_left_running():
            while waiting or self._running:
                between_tokens()
                self._admit(waiting)
                self._step(limits, stops)
        return [
            as_group(request, rows, self._tokenizer.pad_id)
            for request, rows in zip(requests, groups, strict=True)
        ]

    def _refuse_too_long(self, requests: Sequence[Request], limits: SamplingLimits) -> None:
        longest = max(len(request.prompt_ids) for request in requests)
        if not all(request.prompt_ids for request in requests):
            raise ValueError("a prompt has no tokens")
        if longest + limits.max_new_tokens > self._longest:
            raise ValueError(
                f"a prompt of {longest} tokens and {limits.max_new_tokens} new ones do not fit the "
                f"{self._longest} that vLLM was started for"
            )

    @contextmanager
    def _nothing_left_running(self) -> Iterator[None]:
        """Lets vLLM drop the rows of a call that does not come to its end."""
        try:
            yield
        finally:
            if self._running:
                self._engine.abort_request(list(self._running))
                self._running.clear()

    def _admit(self, waiting: deque[_Row]) -> None:
        """Hands vLLM as many of the waiting rows as it computes at once. Those behind them begin
        with the weights that are there by then."""
        while waiting and len(self._running) < self._rows:
            row, key = waiting.popleft(), next(self._keys)
            prompt = {
                "prompt_token_ids": list(row.request.prompt_ids),
                # Rows share the cache of a prompt only with rows that began with the same weights.
                "cache_salt": str(self._loads),
            }
            self._engine.add_request(key, prompt, self._parameters(row))
            self._running[key] = row

    def _parameters(self, row: _Row) -> Any:
        """How a row is sampled, in vLLM's terms."""
        from vllm import SamplingParams  # pyright: ignore
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore

        request, limits = row.request, row.request.limits
        return SamplingParams(
            temperature=limits.temperature,
            max_tokens=limits.max_new_tokens,
            min_tokens=limits.min_new_tokens - 1,  # ours counts the token that ends it
            stop_token_ids=list(limits.end_ids),
            ignore_eos=True,  # `end_ids` are all that end it
            logprobs=0,  # log-prob of the sampled token alone
            # One request a response: with n > 1 vLLM seeds them by seed + i, which collide.
            seed=response_seed(
                self._seed, request.stream, request.prompt_index, row.response, request.state
            ),
            detokenize=False,
            skip_special_tokens=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _step(self, limits: SamplingLimits, stops: StopStrings | None) -> None:
        """Samples one token of every row that vLLM computes in a step."""
        outputs = self._engine.step()
        if not outputs:
            raise EngineError("engine=vllm: a step has sampled no token")
        stopped = []
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
        if stopped:
            self._engine.abort_request(stopped)


def _is_stopped(row: _Row, limits: SamplingLimits, stops: StopStrings) -> bool:
    """Whether the last token of a row completes a stop string where that counts."""
    early = len(row.ids) < limits.min_new_tokens
    return (
        not early
        and bool(stops.may_complete[row.ids[-1]])
        and stops.completed([*row.request.answered, *row.ids])
    )


def _refuse_other_versions(row: _Row, spans: Sequence[Any] | None) -> None:
    """Compares the versions that vLLM has noted for the tokens of a row with ours.

    Raises:
        EngineError: they are not the same.
    """
    noted = [span.version for span in spans or () for _ in range(span.start, span.end)]
    ours = list(map(str, row.versions))
    if noted != ours:
        raise EngineError(
            f"engine=vllm: prompt {row.request.prompt_index} of stream {row.request.stream}: vLLM "
            f"has sampled with versions {noted}, it should have been {ours}"
        )
