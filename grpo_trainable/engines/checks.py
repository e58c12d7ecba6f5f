"""Checks of the groups that an engine returns, made before anything uses these groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_trainable.engines.engine import Engine, EngineError
from grpo_trainable.models.stop_strings import StopStrings, stops_of
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.protocol.rollout import PolicyWeights, Request, RolloutGroup

# Fields of a group with one entry per token, (G, R), or one entry per response, (G,). G is the
# number of responses, and R the number of token columns.
PER_TOKEN = {
    "response_ids": torch.int64,
    "response_mask": torch.bool,
    "behaviour_log_probs": torch.float32,
    "token_versions": torch.int32,
    "token_rounds": torch.int32,
}
PER_RESPONSE = {"rewards": torch.float32, "finished": torch.bool}
ROUNDED_UP = 1e-4  # rounding can raise a log-prob of 0 by this much


def check_load(name: str, engine: Engine, weights: PolicyWeights) -> None:
    """Check that an engine reports the version and round of the weights that it received.

    Raises:
        EngineError: The engine reports a different version or round.
    """
    said, given = (engine.version, engine.round), (weights.version, weights.round)
    if said != given:
        raise EngineError(
            f"engine={name}: after loading version {given[0]} (round {given[1]}), it reports "
            f"version {said[0]} (round {said[1]})"
        )


def check_played(
    name: str,
    engine: Engine,
    requests: Sequence[Request],
    groups: Sequence[RolloutGroup],
    vocab_size: int,
    *,
    densities: bool = False,
) -> None:
    """Check groups of episodes, as far as possible without the environments.

    The groups come from a `PlayingEngine` or an `EarningEngine`. With `densities`, log-probs are
    log-densities of continuous actions and may be above 0.

    Raises:
        EngineError: A group has a mistake. The message names the first mistake found.
    """
    for request, group in zip(requests, groups, strict=True):
        for wrong in _mistakes_in_play(engine, request, group, vocab_size, densities):
            raise EngineError(f"engine={name}: prompt {request.prompt_index}: {wrong}")


def _mistakes_in_play(
    engine: Engine, request: Request, group: RolloutGroup, vocab_size: int, densities: bool
) -> Iterator[str]:
    yield from _wrong_shapes(request, group)
    yield from _wrong_prompt(request, group)
    if not bool(group.response_mask[:, 0].all()):
        yield "a response does not begin with a sampled token"
    if int(group.extents.max()) > request.limits.max_new_tokens:
        yield f"a response exceeds the limit of {request.limits.max_new_tokens} tokens"
    yield from _wrong_tokens(engine, group, vocab_size, densities)


def check_groups(
    name: str,
    engine: Engine,
    requests: Sequence[Request],
    groups: Any,
    tokenizer: Tokenizer,
    vocab_size: int,
) -> None:
    """Check the result of `engine.generate(requests, …)`.

    Raises:
        EngineError: The number of groups is wrong; a group has a wrong prompt, shape, type, length,
            token, log-prob or version; or a response ends in the wrong place. The message names the
            first mistake.
    """
    if not isinstance(groups, list) or len(groups) != len(requests):
        got = f"{len(groups)} groups" if isinstance(groups, list) else type(groups).__name__
        raise EngineError(f"engine={name}: returned {got} for {len(requests)} requests")
    strings = requests[0].limits.stop_strings
    stops = stops_of(strings, tokenizer, vocab_size, torch.device("cpu"))
    for request, group in zip(requests, groups, strict=True):
        for wrong in _mistakes(engine, request, group, vocab_size, stops):
            where = f"prompt {request.prompt_index} of stream {request.stream}"
            raise EngineError(f"engine={name}: {where}: {wrong}")


def _mistakes(
    engine: Engine,
    request: Request,
    group: Any,
    vocab_size: int,
    stops: StopStrings | None,
) -> Iterator[str]:
    """Yield the mistakes in a group. Each check assumes that the earlier ones found no mistake."""
    if not isinstance(group, RolloutGroup):
        yield f"generate returned a {type(group).__name__} instead of a RolloutGroup"
        return
    yield from _wrong_shapes(request, group)
    yield from _wrong_prompt(request, group)
    yield from _wrong_lengths(request, group)
    yield from _wrong_tokens(engine, group, vocab_size)
    yield from _wrong_holes(request, group)
    yield from _wrong_ends(request, group, stops)


def _wrong_shapes(request: Request, group: RolloutGroup) -> Iterator[str]:
    tokens = group.response_ids.shape[-1] if isinstance(group.response_ids, Tensor) else 0
    wanted = [(name, dtype, (request.group_size, tokens)) for name, dtype in PER_TOKEN.items()]
    wanted += [(name, dtype, (request.group_size,)) for name, dtype in PER_RESPONSE.items()]
    wanted.append(("prompt_ids", torch.int64, (len(request.prompt_ids),)))
    for name, dtype, shape in wanted:
        value = getattr(group, name)
        if not isinstance(value, Tensor):
            yield f"{name} is a {type(value).__name__}, not a tensor"
        elif (value.dtype, tuple(value.shape)) != (dtype, shape):
            yield f"{name} is {value.dtype} {tuple(value.shape)}, not {dtype} {shape}"
        elif value.device.type != "cpu":
            yield f"{name} is on {value.device}, not on the CPU"


def _wrong_prompt(request: Request, group: RolloutGroup) -> Iterator[str]:
    if group.prompt_index != request.prompt_index:
        yield (
            f"the group belongs to prompt {group.prompt_index}: return the groups in the order of "
            "the requests"
        )
    if group.prompt_ids.tolist() != list(request.prompt_ids):
        yield "prompt_ids differ from those of the request"
    if group.example_index != request.example_index:
        yield "example_index differs from that of the request: build groups with RolloutGroup.of"


def _wrong_lengths(request: Request, group: RolloutGroup) -> Iterator[str]:
    limits, lengths = request.limits, group.extents
    longest = max(int(lengths.max()), group.response_ids.shape[1])
    if longest > limits.max_new_tokens:
        yield f"a response of {longest} tokens exceeds the limit of {limits.max_new_tokens}"
    if int(lengths.min()) < limits.min_new_tokens:
        least = limits.min_new_tokens
        yield f"a response of {int(lengths.min())} tokens is shorter than the minimum of {least}"


def _wrong_tokens(
    engine: Engine, group: RolloutGroup, vocab_size: int, densities: bool = False
) -> Iterator[str]:
    mask, log_probs = group.response_mask, group.behaviour_log_probs
    if not bool(torch.isfinite(log_probs[mask]).all()):
        yield "behaviour_log_probs are missing (NaN or infinite) for some tokens"
    if not densities and float(log_probs[mask].max()) > ROUNDED_UP:
        yield f"a log-prob of {float(log_probs[mask].max()):g} is above 0"
    if bool(log_probs[~mask].any()):
        yield "behaviour_log_probs must be 0 where response_mask is false"
    ids = group.response_ids[mask]
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        yield (
            f"token ids range from {int(ids.min())} to {int(ids.max())}, "
            f"but must be at least 0 and below {vocab_size}"
        )
    for name, newest in (("token_versions", engine.version), ("token_rounds", engine.round)):
        stamps = getattr(group, name)[mask]
        if int(stamps.min()) < 0 or int(stamps.max()) > newest:
            yield (
                f"{name} must be from 0 to {newest}, the value for the weights in use, but are "
                f"{int(stamps.min())} to {int(stamps.max())}"
            )


def _wrong_holes(request: Request, group: RolloutGroup) -> Iterator[str]:
    interruption = request.limits.interruption
    if interruption is None:
        return
    first, ids = interruption.after_tokens, list(interruption.ids)
    for row, extent in enumerate(group.extents.tolist()):
        holes = (~group.response_mask[row, :extent]).nonzero()[:, 0].tolist()
        if not holes:
            continue
        fed = group.response_ids[row, holes].tolist()
        if holes != list(range(first, first + len(ids))) or fed != ids:
            yield (
                f"response {row} was not fed the interruption's tokens, or was fed them at the "
                "wrong position"
            )


def _wrong_ends(request: Request, group: RolloutGroup, stops: StopStrings | None) -> Iterator[str]:
    for row, extent in enumerate(group.extents.tolist()):
        ids, sampled = group.response_ids[row, :extent], group.response_mask[row, :extent]
        end, finished = _end(request, ids, sampled, stops), bool(group.finished[row])
        if end is not None and end + 1 < len(ids):
            yield f"response {row} continues after token {end + 1}, which ends it"
        if finished != (end is not None):
            why = "nothing ends it" if finished else "an end id or a stop string ends it"
            yield f"finished is {finished} for response {row}, but {why}"
        if not finished and len(ids) < request.limits.max_new_tokens:
            yield (
                f"response {row} is cut off after {len(ids)} of "
                f"{request.limits.max_new_tokens} tokens"
            )


def _end(request: Request, ids: Tensor, sampled: Tensor, stops: StopStrings | None) -> int | None:
    """Return the index of the first token that ends a response, or None. `ids` is (R,).

    Only tokens that were `sampled` (R,) can end a response. An end id counts at any position,
    because no end id can be sampled before `min_new_tokens`.
    """
    end_ids, start = request.limits.end_ids, request.limits.min_new_tokens - 1
    own = zip(ids.tolist(), sampled.tolist(), strict=True)
    by_id = next((t for t, (index, ours) in enumerate(own) if ours and index in end_ids), None)
    by_string = None if stops is None else _first_completed(request, ids, stops, start)
    while by_string is not None and not sampled[by_string]:
        assert stops is not None
        by_string = _first_completed(request, ids, stops, by_string + 1)
    return min((t for t in (by_id, by_string) if t is not None), default=None)


def _first_completed(request: Request, ids: Tensor, stops: StopStrings, start: int) -> int | None:
    """Return the index of the first token, from `start` on, that completes a stop string.

    Return None if no such token exists. A stop string may begin in `request.answered`: these tokens
    at the end of the prompt count as the start of the response.
    """
    answered = torch.tensor(request.answered, dtype=ids.dtype)
    found = stops.first_completed(torch.cat((answered, ids)), start + len(answered))
    return None if found is None else found - len(answered)
