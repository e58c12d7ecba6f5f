"""The story corpus: generated stories. Stories that contain all their keywords come first.

The order is essential. The first documents all contain their keywords and teach the policy to copy.
Only a share of the later documents contain the keywords, and this share sets the inclusion rate at
the start of GRPO. Without the first documents, the policy writes fluently but never copies, and
GRPO learns nothing. All documents have similar lengths, so a story with the keyword differs from
other stories only in the keyword.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

from grpo_trainable.config import TaskSettings
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.protocol.rollout import SamplingLimits
from grpo_trainable.tasks.keyword import NOUNS_FILE, KeywordTask, read_keywords, split_of
from grpo_trainable.tasks.messages import as_text
from grpo_trainable.tools.pretraining.corpus import Corpus, Document, Measurements, encode
from grpo_trainable.tools.pretraining.measuring import (
    Response,
    described,
    distinct_trigram_share,
    first_samples,
    lengths,
    mean_length,
    mean_loss,
    sample,
)
from grpo_trainable.tools.pretraining.recipe import StoryRecipe
from grpo_trainable.tools.pretraining.stories import Storyteller, count_sentences

FRONT_SEVERAL_SHARE = 2 / 3  # share of prompts with several keywords, which teach copying faster
HELD_OUT_STORIES = 1000
TOKENIZER_PROMPTS = 20_000  # more prompts take more time and give no better tokenizer
TOKENIZER_STORIES = 2000
HELD_OUT_SOURCE = (
    "new documents of the same grammar with another seed, and with the keyword share of the later "
    "part of the corpus"
)


def story_corpus(recipe: StoryRecipe) -> Corpus:
    """Generate the story corpus."""
    documents, held_out = story_documents(recipe)
    # Prompts contain every noun equally often. With many prompts and few stories, more nouns become
    # a single token, and a single token is easier to copy.
    texts = [d.prompt for d in documents[:TOKENIZER_PROMPTS]]
    texts += [d.response for d in documents[:TOKENIZER_STORIES]]
    return Corpus(
        documents=documents,
        held_out=held_out,
        tokenizer_texts=texts,
        measure=partial(measure_stories, held_out, HELD_OUT_SOURCE),
    )


def story_documents(recipe: StoryRecipe) -> tuple[list[Document], list[Document]]:
    """Return training documents, in their order of training, and new held-out documents."""
    nouns = read_keywords(NOUNS_FILE)
    count = recipe.steps * recipe.batch_size
    teller = Storyteller(nouns, Random(f"corpus {recipe.seed}"))
    front = round(count * recipe.front_share)
    documents = [teller.document(1.0, FRONT_SEVERAL_SHARE) for _ in range(front)]
    documents += [teller.document(recipe.keyword_share) for _ in range(count - front)]
    fresh = Storyteller(nouns, Random(f"held-out {recipe.seed}"))
    return documents, [fresh.document(recipe.keyword_share) for _ in range(HELD_OUT_STORIES)]


# ---- Measurements of a policy: loss, keyword inclusion, lengths, variety -------------------------


SAMPLED_KEYWORDS = 250
RESPONSES_PER_KEYWORD = 8
LIMITS = SamplingLimits(min_new_tokens=1, max_new_tokens=60, temperature=0.8, end_ids=())
UNITS = {"tokens": lambda r: r.tokens, "sentences": lambda r: count_sentences(r.text)}
LENGTHS = {
    "all": "all",
    "with the keyword": "with_keyword",
    "without it": "without_keyword",
    "corpus": "corpus",
}
HOW = {
    "held_out_loss_nats": (
        "mean negative log-likelihood per response token (end-of-text included, prompt excluded) "
        "over {held_out_documents} held-out documents: {source}"
    ),
    "held_out_inclusion_rate": (
        "share of {held_out_inclusion_responses} responses that contain their keyword as a whole "
        "word: {each} responses to each of {held_out_inclusion_keywords} held-out nouns of "
        "nouns.txt, {sampling}"
    ),
    "distinct_trigram_share": (
        "distinct / all word trigrams of {distinct_trigram_responses} responses to the prompts of "
        "held-out documents, {sampling}; for the corpus, of the responses in these documents, cut "
        "to the same number of tokens"
    ),
    "mean_length": (
        "means over those {held_out_inclusion_responses} responses and over the "
        "{held_out_documents} held-out documents; tokens include end-of-text, and "
        "`grpo_trainable.tools.pretraining.stories.count_sentences` counts sentences"
    ),
    "finished_share": "share of those {held_out_inclusion_responses} responses that end within "
    "the token limit",
}


def measure_stories(
    held_out: Sequence[Document], source: str, model: TransformerLM, tokenizer: Tokenizer, seed: int
) -> Measurements:
    """Measure a policy for its card, and collect sample responses.

    Args:
        held_out: Documents that the policy was not trained on.
        source: Description of these documents.
        model: The policy.
        tokenizer: Tokenizer of the policy.
        seed: Seed of the random draws.
    """
    facts = _on_documents(held_out, model, tokenizer, seed) | _on_keywords(model, tokenizer, seed)
    corpus = facts.pop("corpus_length")
    facts["mean_length"] = {**facts["mean_length"], "corpus": corpus}
    words = {"each": RESPONSES_PER_KEYWORD, "sampling": described(LIMITS), "source": source}
    return Measurements(
        facts=facts,
        how={name: how.format(**facts, **words) for name, how in HOW.items()},
        rows=_rows(facts),
        sampling=described(LIMITS),
        headline=f"held-out loss {facts['held_out_loss_nats']:.3f} nats/token, held-out keywords "
        f"included in {facts['held_out_inclusion_rate']:.3f} of "
        f"{facts['held_out_inclusion_responses']} responses",
    )


def _on_documents(
    held_out: Sequence[Document], model: TransformerLM, tokenizer: Tokenizer, seed: int
) -> dict[str, Any]:
    """Measure the loss on held-out documents, and the variety of responses to their prompts."""
    config, limit = model.config, LIMITS.max_new_tokens
    rows = [encode(tokenizer, document, config.context_length) for document in held_out]
    readable = [
        document
        for document, row in zip(held_out, rows, strict=True)
        if row.prompt_length + limit <= config.context_length
    ]
    prompts = [document.prompt for document in readable]
    responses = [r for (r,) in sample(model, tokenizer, prompts, 1, LIMITS, seed)]
    texts = [tokenizer.decode(tokenizer.encode(d.response)[:limit]) for d in readable]
    corpus = [
        Response(document.response, len(row.ids) - row.prompt_length, True)
        for document, row in zip(held_out, rows, strict=True)
    ]
    return {
        "held_out_loss_nats": mean_loss(model, rows, tokenizer.pad_id),
        "held_out_documents": len(rows),
        "distinct_trigram_share": distinct_trigram_share([r.text for r in responses]),
        "distinct_trigram_share_corpus": distinct_trigram_share(texts),
        "distinct_trigram_responses": len(responses),
        "corpus_length": mean_length(corpus, UNITS),
        "samples": first_samples(readable, responses),
    }


def _on_keywords(model: TransformerLM, tokenizer: Tokenizer, seed: int) -> dict[str, Any]:
    """Measure how often stories contain their held-out keywords, and the lengths of stories."""
    words = [word for word in read_keywords(NOUNS_FILE) if split_of(word) == "heldout"]
    task = KeywordTask(TaskSettings(), seed)
    examples = task.eval_examples(min(len(words), SAMPLED_KEYWORDS))
    prompts = [as_text(example.prompt) for example in examples]
    stories = sample(model, tokenizer, prompts, RESPONSES_PER_KEYWORD, LIMITS, seed + 1)
    included: dict[bool, list[Response]] = {True: [], False: []}
    for example, group in zip(examples, stories, strict=True):
        for story in group:
            included[task.reward(story.text, example.ground_truth).reward == 1.0].append(story)
    responses = included[True] + included[False]
    return {
        "held_out_inclusion_rate": len(included[True]) / len(responses),
        "held_out_inclusion_responses": len(responses),
        "held_out_inclusion_keywords": len(examples),
        "mean_length": {
            "all": mean_length(responses, UNITS),
            "with_keyword": mean_length(included[True], UNITS),
            "without_keyword": mean_length(included[False], UNITS),
        },
        "finished_share": statistics.mean(r.finished for r in responses),
    }


def _rows(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    loss, inclusion = facts["held_out_loss_nats"], facts["held_out_inclusion_rate"]
    variety = (facts["distinct_trigram_share"], facts["distinct_trigram_share_corpus"])
    return [
        ("held-out loss", f"{loss:.3f} nats/token", "held_out_loss_nats"),
        ("held-out inclusion rate", f"{inclusion:.3f}", "held_out_inclusion_rate"),
        *(
            (
                f"{unit} per response: {', '.join(LENGTHS)}",
                lengths(facts["mean_length"], list(LENGTHS.values()), unit),
                "mean_length",
            )
            for unit in UNITS
        ),
        (
            "distinct trigrams, policy / corpus",
            "{:.3f} / {:.3f}".format(*variety),
            "distinct_trigram_share",
        ),
        ("responses that finish", f"{facts['finished_share']:.3f}", "finished_share"),
    ]
