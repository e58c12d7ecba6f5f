"""Supervised training on documents, with loss on response tokens only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.tools.pretraining.corpus import Row
from grpo_trainable.tools.pretraining.recipe import Recipe

NO_LOSS = -100  # target of prompt and padding positions
WARMUP_SHARE = 0.03
DECAY_SHARE = 0.5
FINAL_LR_SHARE = 0.03
GRAD_CLIP = 1.0
WEIGHT_DECAY = 0.1


def collate(rows: Sequence[Row], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad rows into input ids and targets, both (B, S). Prompts and padding have no target."""
    length = max(len(row.ids) for row in rows) - 1
    input_ids = torch.full((len(rows), length), pad_id)
    targets = torch.full((len(rows), length), NO_LOSS)
    for i, row in enumerate(rows):
        ids = torch.tensor(row.ids)
        input_ids[i, : len(ids) - 1] = ids[:-1]
        first = row.prompt_length - 1  # this position predicts the first response token
        targets[i, first : len(ids) - 1] = ids[1 + first :]
    return input_ids, targets


def batches(rows: Sequence[Row], recipe: Recipe, *, shuffle: bool) -> Iterator[Sequence[Row]]:
    """Yield `recipe.steps` batches of rows. The rows repeat if there are too few.

    Args:
        rows: Encoded documents.
        recipe: Settings for the training.
        shuffle: Use the rows in a new random order in each pass, instead of the given order.
    """
    rng = Random(f"order {recipe.seed}")
    queue: list[Row] = []
    for _ in range(recipe.steps):
        while len(queue) < recipe.batch_size:
            queue += rng.sample(rows, len(rows)) if shuffle else rows
        yield queue[: recipe.batch_size]
        del queue[: recipe.batch_size]


def learning_rate(step: int, recipe: Recipe) -> float:
    """Return the learning rate: warmup, a constant phase, then linear decay.

    The decay covers only the last `DECAY_SHARE` of the steps, because later documents need a high
    rate too.
    """
    up = (step + 1) / max(1, round(WARMUP_SHARE * recipe.steps))
    down = (recipe.steps - step) / (DECAY_SHARE * recipe.steps)
    return recipe.lr * min(1.0, up, FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * down)


def token_losses(model: TransformerLM, input_ids: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood of every response token, as a flat tensor.

    The policy's head is evaluated only for response tokens.
    """
    mask = targets != NO_LOSS
    logits = F.linear(model.hidden_states(input_ids)[mask], model.head_weight)
    return F.cross_entropy(logits, targets[mask], reduction="none")


def train(
    model: TransformerLM, rows: Sequence[Row], recipe: Recipe, pad_id: int, *, shuffle: bool
) -> dict[str, int]:
    """Train a model in place. Return the number of tokens read and the number of tokens with loss.

    Raises:
        ValueError: If the loss is not finite.
    """
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": WEIGHT_DECAY},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    tokens_read = tokens_scored = 0
    average = None
    progress = tqdm(
        batches(rows, recipe, shuffle=shuffle), total=recipe.steps, desc="pretrain", unit="step"
    )
    for step, batch in enumerate(progress):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        losses = token_losses(model, *collate(batch, pad_id))
        loss = losses.mean()
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()} at step {step}: use a smaller --lr")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        tokens_read += sum(len(row.ids) for row in batch)
        tokens_scored += len(losses)
        average = loss.item() if average is None else 0.95 * average + 0.05 * loss.item()
        if step % 20 == 0 or step + 1 == recipe.steps:
            progress.set_postfix_str(f"loss {average:.3f} nats/token")
    return {"tokens_seen": tokens_read, "response_tokens_seen": tokens_scored}
