"""Values of the states of a response, estimated from completions (VinePPO, arXiv 2410.01679).

State t of a response is the prompt followed by the response's first t tokens. The policy that
sampled the response also samples K completions of the state. The mean reward of these completions
is the value of the state. State 0 is the prompt, which the responses of a group share.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_trainable.config import VineSettings
from grpo_trainable.protocol.rollout import Request, RolloutGroup, SamplingLimits, StateOf

STREAM = "vine"  # stream of the completions: part of the key for their random draws
# Pattern of a token that ends a sentence. The token ends with a punctuation mark, then any closing
# quotes or brackets, then any spaces.
SENTENCE = re.compile(r"[.!?][\"')\]]*\s*\Z")

Sample = Callable[[Sequence[Request]], list[RolloutGroup]]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """Completions of the states of one group, for estimating the values of these states."""

    states: list[tuple[int, int]]  # (index of the response, number of its tokens in the state)
    # Token ids of whole responses: `samples` responses for each state, in the order of `states`.
    responses: list[list[int]]
    samples: int


class Completer:
    """Samples completions of the states in groups of responses."""

    def __init__(self, settings: VineSettings, decode: Decode, sample: Sample) -> None:
        """Create a completer.

        Args:
            settings: The states that get a value, and the number of completions per state.
            decode: Converts tokens to text.
            sample: Samples the responses to requests that have the same limits.
        """
        self._settings = settings
        self._decode = decode
        self._sample = sample

    def completions(
        self, groups: Sequence[RolloutGroup], limits: SamplingLimits
    ) -> list[Completions]:
        """Sample K completions of each state of each group.

        States with the same number of response tokens are completed together, because they have the
        same limits. If an engine runs each distinct prompt only once, it computes a state's
        key-value cache once for all K completions of the state.

        Args:
            groups: The groups.
            limits: The limits with which the responses of these groups were sampled.
        """
        found = [
            Completions(states=[], responses=[], samples=self._settings.samples) for _ in groups
        ]
        for tokens, states in sorted(self._by_tokens(groups).items()):
            rest = replace(
                limits,
                min_new_tokens=max(1, limits.min_new_tokens - tokens),
                max_new_tokens=limits.max_new_tokens - tokens,
            )
            requests = [self._request(groups[i], response, tokens, rest) for i, response in states]
            for (i, response), sampled in zip(states, self._sample(requests), strict=True):
                found[i].states.append((response, tokens))
                found[i].responses.extend(_completed(groups[i], response, tokens, sampled))
        return found

    def _by_tokens(self, groups: Sequence[RolloutGroup]) -> dict[int, list[tuple[int, int]]]:
        """Return the states of all groups, keyed by their number of response tokens.

        Each state is given as (index of the group, index of the response).
        """
        states: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for i, group in enumerate(groups):
            states[0].append((i, 0))
            for response in range(len(group.response_ids)):
                for tokens in self._states(_sampled(group, response)):
                    states[tokens].append((i, response))
        return states

    def _states(self, ids: list[int]) -> Iterator[int]:
        """Yield the states of a response that get a value, except the prompt.

        A state is given by its number of response tokens. The states are in ascending order.

        Args:
            ids: The tokens of the response.
        """
        step = self._settings.chunk_tokens
        if self._settings.states == "chunks":
            yield from range(step, len(ids), step)
            return
        last = 0
        for tokens in range(1, len(ids)):
            if tokens - last >= step and self._ends_sentence(ids[tokens - 1 : tokens + 1]):
                yield tokens
                last = tokens

    def _ends_sentence(self, pair: list[int]) -> bool:
        """Return True if a sentence or line ends between two tokens.

        For example, no sentence ends inside "3.14".
        """
        piece, following = self._decode(pair[:1]), self._decode(pair[1:])
        if "\n" in piece:
            return True
        return (
            bool(SENTENCE.search(piece))
            and (piece + following)[len(piece.rstrip()) :][:1].isspace()
        )

    def _request(
        self, group: RolloutGroup, response: int, tokens: int, limits: SamplingLimits
    ) -> Request:
        prefix = _sampled(group, response)[:tokens]
        return Request(
            stream=STREAM,
            prompt_index=group.prompt_index,
            prompt_ids=(*group.prompt_ids.tolist(), *prefix),
            group_size=self._settings.samples,
            limits=limits,
            state=StateOf(response=response, tokens=tokens),
        )


def state_values(group: RolloutGroup, completions: Completions, rewards: Sequence[float]) -> Tensor:
    """Return the values of the states, (G, R) float32.

    The value of a state is stored at the token that follows the state. All other entries are NaN.

    Args:
        group: The group.
        completions: Completions of the group's states.
        rewards: The rewards of `completions.responses`.
    """
    values = torch.full(group.response_mask.shape, torch.nan)
    means = torch.tensor(rewards, dtype=torch.float64).view(-1, completions.samples).mean(dim=1)
    for (response, tokens), mean in zip(completions.states, means.tolist(), strict=True):
        if tokens == 0:
            first = group.response_mask.int().argmax(dim=1)
            values[torch.arange(len(first)), first] = mean  # all responses share the prompt
        else:
            place = group.response_mask[response].nonzero()[tokens]
            values[response, place] = mean
    return values


def _completed(
    group: RolloutGroup, response: int, tokens: int, sampled: RolloutGroup
) -> Iterator[list[int]]:
    """Yield whole responses: the tokens of the state, followed by a completion."""
    prefix = _sampled(group, response)[:tokens]
    for row in range(len(sampled.response_ids)):
        yield [*prefix, *_sampled(sampled, row)]


def _sampled(group: RolloutGroup, response: int) -> list[int]:
    """Return the token ids of a response."""
    return group.response_ids[response][group.response_mask[response]].tolist()
