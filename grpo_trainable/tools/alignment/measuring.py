"""Measure a trained model on the held-out rows: scores of both responses, and sampled responses.

The model is read from its directory, so the figures describe the files that the run leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from grpo_trainable.tasks.messages import as_text
from grpo_trainable.tools.alignment.held_out import HeldOutRow
from grpo_trainable.tools.alignment.rows import Row
from grpo_trainable.tools.alignment.run import Run
from grpo_trainable.tools.alignment.stages import Stage

SAMPLED = 8  # held-out rows for which the trained policy writes a response
MAX_NEW_TOKENS = 128
_PAIR = ("chosen", "rejected")

Score = Callable[[Sequence["_Encoded"]], list[float]]


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """Ids of a prompt with a response. `prompt` is the number of ids before the response."""

    ids: list[int]
    prompt: int


def measure(
    run: Run, *, beta: float | None, max_length: int | None, batch: int
) -> list[HeldOutRow]:
    """Return every held-out row that fits, with the scores and responses of the trained model.

    A reward model scores a response by its output. A policy that DPO trained scores a response by
    its implicit reward: `beta` times the log of the ratio of its probability to that under the
    initial policy (Rafailov et al. 2023, equation 5).

    Args:
        run: A run with a trained model.
        beta: The beta of DPO, or None for another stage.
        max_length: Longest sequence in tokens. Pairs with a longer sequence are left out.
        batch: Number of pairs that are scored together.
    """
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.trained_model, local_files_only=True)
    model = _loaded(run.trained_model, run.stage, device)
    rows = [_split(row) for row in run.held_out.rows]
    scores: list[tuple[float | None, float | None]] = [(None, None)] * len(rows)
    if run.stage.has_pairs:
        pairs = [tuple(_encode(tokenizer, row, name) for name in _PAIR) for row in rows]
        fits = [max(len(own.ids) for own in pair) <= (max_length or math.inf) for pair in pairs]
        rows, pairs = list(compress(rows, fits)), list(compress(pairs, fits))
        scores = list(_scored(_scorer(run, model, tokenizer, device, beta), pairs, batch))
    found = [_texts(row, own) for row, own in zip(rows, scores, strict=True)]
    if run.stage.writes_text:
        for i, row in enumerate(rows[:SAMPLED]):
            response = _response(model, tokenizer, row["prompt"], run.context, device)
            found[i] = replace(found[i], response=response)
    return found


def _texts(row: Row, scores: tuple[float | None, float | None]) -> HeldOutRow:
    rejected = row.get("rejected")
    return HeldOutRow(
        prompt=as_text(row["prompt"]),
        chosen=as_text(row["completion"] if rejected is None else row["chosen"]),
        rejected=None if rejected is None else as_text(rejected),
        chosen_score=scores[0],
        rejected_score=scores[1],
    )


def _loaded(directory: Path, stage: Stage, device: torch.device) -> Any:
    head = getattr(transformers, stage.head)
    # The trainer computes in float32 by default, whatever the type in which weights are stored.
    model: Any = head.from_pretrained(directory, local_files_only=True, dtype=torch.float32)
    return model.to(device).eval()


# ---- Rows as a prompt and responses ------------------------------------------------------------


def _split(row: Row) -> Row:
    """Return a row with an explicit prompt, as TRL's trainers see it.

    The prompt of a conversation is everything before its last message. The prompt of a text is its
    first half. The prompt of a pair without one is the longest common beginning of both responses.
    """
    if "prompt" in row:
        return row
    if "messages" in row:
        return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
    if "text" in row:
        middle = len(row["text"]) // 2
        return {"prompt": row["text"][:middle], "completion": row["text"][middle:]}
    chosen, rejected = row["chosen"], row["rejected"]
    shorter = min(len(chosen), len(rejected))
    same = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
    if isinstance(chosen, str) and same and chosen[same - 1] == " ":
        same -= 1  # a space belongs to the word that follows it
    return {"prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}


def _encode(tokenizer: Any, row: Row, name: str) -> _Encoded:
    """Return the ids of the prompt and the response `name`, as TRL's trainers make them."""
    prompt, response = row["prompt"], row[name]
    if isinstance(prompt, list):
        before = _template_ids(tokenizer, prompt, generation=True)
        ids = _template_ids(tokenizer, prompt + response, generation=False)
    else:
        end = tokenizer.eos_token
        response = response if response.endswith(end) else response + end
        before, ids = tokenizer(prompt)["input_ids"], tokenizer(prompt + response)["input_ids"]
    same = next((i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), None)
    return _Encoded(ids=ids, prompt=min(len(before), len(ids)) if same is None else same)


def _template_ids(tokenizer: Any, messages: list[Any], *, generation: bool) -> list[int]:
    if not messages:
        return []
    return tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, add_generation_prompt=generation
    )["input_ids"]


# ---- Scores ------------------------------------------------------------------------------------


def _scorer(
    run: Run, model: Any, tokenizer: Any, device: torch.device, beta: float | None
) -> Score:
    """Return the function that scores a batch of responses."""
    padding = tokenizer.pad_token_id

    def rewards(batch: Sequence[_Encoded]) -> list[float]:
        ids, mask = _padded(batch, padding, device)
        return model(input_ids=ids, attention_mask=mask).logits.squeeze(-1).float().tolist()

    if not run.stage.writes_text:
        return rewards
    assert beta is not None
    reference = _loaded(run.model, run.stage, device)

    def implicit_rewards(batch: Sequence[_Encoded]) -> list[float]:
        ids, mask = _padded(batch, padding, device)
        own, first = (_log_probs(policy, ids, mask, batch) for policy in (model, reference))
        return (beta * (own - first)).tolist()

    return implicit_rewards


def _padded(batch: Sequence[_Encoded], padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ids, padded on the right, and their mask, both (B, S)."""
    rows = [torch.tensor(own.ids) for own in batch]
    ids = pad_sequence(rows, batch_first=True, padding_value=padding)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids.to(device), mask.to(device)


def _log_probs(policy: Any, ids: Tensor, mask: Tensor, batch: Sequence[_Encoded]) -> Tensor:
    """Return the log-prob of each response, in nats, (B,)."""
    logits = policy(input_ids=ids, attention_mask=mask).logits.float()
    # The logits at a position are about the next token.
    nll = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    first = torch.tensor([own.prompt for own in batch], device=ids.device).unsqueeze(1)
    positions = torch.arange(1, ids.shape[1], device=ids.device)
    return -(nll * mask[:, 1:] * (positions >= first)).sum(1)


@torch.no_grad()
def _scored(
    score: Score, pairs: Sequence[Sequence[_Encoded]], batch: int
) -> Iterator[tuple[float, float]]:
    """Yield the scores of the chosen and the rejected response of each pair."""
    starts = range(0, len(pairs), batch)
    for start in tqdm(starts, desc="measure", unit="batch", disable=None):
        part = pairs[start : start + batch]
        scores = score([own for pair in part for own in pair])
        yield from zip(scores[::2], scores[1::2], strict=True)


# ---- Responses ---------------------------------------------------------------------------------


@torch.no_grad()
def _response(
    model: Any, tokenizer: Any, prompt: Any, context: int | None, device: torch.device
) -> str | None:
    """Return the most likely response, cut to `MAX_NEW_TOKENS`, or None without room for one."""
    if isinstance(prompt, list):
        ids = _template_ids(tokenizer, prompt, generation=True)
    else:
        ids = tokenizer(prompt)["input_ids"]
    room = MAX_NEW_TOKENS if context is None else min(MAX_NEW_TOKENS, context - len(ids))
    if not ids or room < 1:
        return None
    given = torch.tensor([ids], device=device)
    out = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=room,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
