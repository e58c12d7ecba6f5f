"""How good a pretrained policy is: loss, keyword inclusion, lengths, variety and samples."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from grpo_trainable.config import TaskSettings
from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.pretraining.corpus import Row, encode
from grpo_trainable.pretraining.stories import Document, count_sentences
from grpo_trainable.pretraining.training import collate, token_losses
from grpo_trainable.rollout import Request, SamplingLimits
from grpo_trainable.tasks.keyword import NOUNS_FILE, KeywordTask, read_keywords, split_of
from grpo_trainable.tasks.messages import as_text

SAMPLED_KEYWORDS = 250
RESPONSES_PER_KEYWORD = 8
PROMPTS_AT_ONCE = 32
# Responses end with end-of-text, whose id a tokenizer knows.
LIMITS = SamplingLimits(min_new_tokens=1, max_new_tokens=60, temperature=0.8, end_ids=())
CARD_SAMPLES = 20


@torch.no_grad()
def mean_loss(model: TransformerLM, rows: Sequence[Row], pad_id: int) -> float:
    """Nats per response token, end-of-text included, over all tokens of `rows`."""
    losses = [
        token_losses(model, *collate(rows[i : i + PROMPTS_AT_ONCE], pad_id))
        for i in range(0, len(rows), PROMPTS_AT_ONCE)
    ]
    return torch.cat(losses).double().mean().item()


@dataclass(frozen=True, slots=True)
class Response:
    text: str
    tokens: int  # end-of-text included
    finished: bool  # it ended with end-of-text, within the limit


def sample(
    model: TransformerLM, tokenizer: Tokenizer, prompts: Sequence[str], each: int, seed: int
) -> list[list[Response]]:
    """`each` responses to every prompt, under LIMITS."""
    engine = TorchEngine(model, tokenizer, seed=seed)
    limits = replace(LIMITS, end_ids=tokenizer.end_ids)
    requests = [
        Request(
            stream="eval",
            prompt_index=index,
            prompt_ids=tuple(tokenizer.encode(prompt)),
            group_size=each,
            limits=limits,
        )
        for index, prompt in enumerate(prompts)
    ]
    groups = []
    for i in tqdm(range(0, len(requests), PROMPTS_AT_ONCE), desc="sample", unit="batch"):
        groups += engine.generate(requests[i : i + PROMPTS_AT_ONCE], between_tokens=lambda: None)
    return [
        [
            Response(tokenizer.decode(ids[mask].tolist()), int(mask.sum()), bool(finished))
            for ids, mask, finished in zip(
                group.response_ids, group.response_mask, group.finished, strict=True
            )
        ]
        for group in groups
    ]


def distinct_trigram_share(texts: Sequence[str]) -> float:
    """Distinct / all runs of three words (punctuation aside, case kept) within the texts.

    It falls as texts are added: compare equal numbers of them.
    """
    trigrams = []
    for text in texts:
        words = re.findall(r"[\w']+", text)
        trigrams += zip(words, words[1:], words[2:], strict=False)
    return len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def mean_length(responses: Sequence[Response]) -> dict[str, float] | None:
    """Mean tokens and sentences of the responses; None without any."""
    if not responses:
        return None
    return {
        "responses": len(responses),
        "tokens": statistics.mean(response.tokens for response in responses),
        "sentences": statistics.mean(count_sentences(response.text) for response in responses),
    }


def measure(
    model: TransformerLM, tokenizer: Tokenizer, held_out: Sequence[Document], seed: int
) -> dict[str, Any]:
    """The numbers of the card, and responses to read."""
    config, limit = model.config, LIMITS.max_new_tokens
    rows = [encode(tokenizer, document, config.context_length) for document in held_out]
    readable = [
        document
        for document, row in zip(held_out, rows, strict=True)
        if row.prompt_length + limit <= config.context_length
    ]
    responses = [
        response for (response,) in sample(model, tokenizer, [d.prompt for d in readable], 1, seed)
    ]
    texts = [tokenizer.decode(tokenizer.encode(d.response)[:limit]) for d in readable]
    corpus = [
        Response(document.response, len(row.ids) - row.prompt_length, True)
        for document, row in zip(held_out, rows, strict=True)
    ]

    words = [word for word in read_keywords(NOUNS_FILE) if split_of(word) == "heldout"]
    task = KeywordTask(TaskSettings(), seed)
    examples = task.eval_examples(min(len(words), SAMPLED_KEYWORDS))
    prompts = [as_text(example.prompt) for example in examples]
    stories = sample(model, tokenizer, prompts, RESPONSES_PER_KEYWORD, seed + 1)
    included: dict[bool, list[Response]] = {True: [], False: []}
    for example, group in zip(examples, stories, strict=True):
        for story in group:
            included[task.reward(story.text, example.ground_truth).reward == 1.0].append(story)
    responses_to_keywords = included[True] + included[False]
    return {
        "held_out_loss_nats": mean_loss(model, rows, tokenizer.pad_id),
        "held_out_documents": len(rows),
        "held_out_inclusion_rate": len(included[True]) / len(responses_to_keywords),
        "held_out_inclusion_responses": len(responses_to_keywords),
        "held_out_inclusion_keywords": len(examples),
        "mean_length": {
            "all": mean_length(responses_to_keywords),
            "with_keyword": mean_length(included[True]),
            "without_keyword": mean_length(included[False]),
            "corpus": mean_length(corpus),
        },
        "distinct_trigram_share": distinct_trigram_share([r.text for r in responses]),
        "distinct_trigram_share_corpus": distinct_trigram_share(texts),
        "distinct_trigram_responses": len(responses),
        "finished_share": statistics.mean(r.finished for r in responses_to_keywords),
        "samples": [
            {"prompt": d.prompt, "response": r.text, "finished": r.finished}
            for d, r in zip(readable[:CARD_SAMPLES], responses, strict=False)
        ],
    }
