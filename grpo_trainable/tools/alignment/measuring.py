"""Measure a trained model on the held-out rows: scores of the rows' responses, and new responses.

TRL's trainer tokenizes the rows and computes the log-probs, so the scores agree with TRL's metrics.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from grpo_trainable.tasks.row_files import Row
from grpo_trainable.tools.alignment.rows import MeasuredRow
from grpo_trainable.tools.alignment.run import Run
from grpo_trainable.tools.alignment.training import ROW

ANSWERED = 8  # held-out rows for which the trained policy writes a response
MAX_NEW_TOKENS = 128


def measure(run: Run, trainer: Any) -> list[MeasuredRow]:
    """Return the held-out rows with the scores and responses of the trained model.

    The output of a reward model is the score. A policy that DPO trained scores a response by its
    implicit reward: beta * log(p / p_ref), with the response's probabilities under the policy
    and the reference (Rafailov et al. 2023, equation 5). Pairs that TRL has left out have no score,
    so they are left out here, too.
    """
    trainer.model.eval()
    rows = run.held_out.rows
    scores: list[tuple[float, float] | None] = [None] * len(rows)
    if run.stage.has_pairs:
        rows = [rows[i] for i in trainer.eval_dataset[ROW]]
        batches = trainer.get_eval_dataloader()
        scores = [pair for batch in batches for pair in _scores(run, trainer, batch)]
    answered = rows[: ANSWERED if run.stage.writes_text else 0]
    responses = dict(enumerate(_response(run, trainer, row) for row in answered))
    return [
        MeasuredRow(row=row, scores=pair, response=responses.get(i))
        for i, (row, pair) in enumerate(zip(rows, scores, strict=True))
    ]


@torch.no_grad()
def _scores(run: Run, trainer: Any, batch: dict[str, Any]) -> Iterable[tuple[float, float]]:
    """Return the scores of the chosen and the rejected response of each pair."""
    if not run.stage.writes_text:
        with trainer.accelerator.autocast():
            rewards = trainer.model(**batch).logits.squeeze(-1).float()
        chosen, rejected = rewards.chunk(2)  # TRL puts the chosen responses first
    else:
        own = trainer.compute_ref_log_probs(trainer.model, batch)
        if trainer.ref_model is None:  # precompute_ref_log_probs
            reference = batch["ref_chosen_logps"], batch["ref_rejected_logps"]
        else:
            reference = trainer.compute_ref_log_probs(trainer.ref_model, batch)
        chosen, rejected = (trainer.beta * (a - b) for a, b in zip(own, reference, strict=True))
    return zip(chosen.tolist(), rejected.tolist(), strict=True)


def _response(run: Run, trainer: Any, row: Row) -> str | None:
    """Return the most likely response, cut to `MAX_NEW_TOKENS`.

    Return None if the row has no separate prompt, or if the prompt fills the context.
    """
    prompt = row["messages"][:-1] if "messages" in row else row.get("prompt")
    if not prompt:
        return None
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
    room = MAX_NEW_TOKENS if run.context is None else min(MAX_NEW_TOKENS, run.context - len(ids))
    if room < 1:
        return None
    given = torch.tensor([ids], device=trainer.model.device)
    out = trainer.model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=room,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
