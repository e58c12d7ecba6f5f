"""The story corpus: generated documents in an order, and the order is what makes it work.

Documents that all hold their keyword teach copying; then come documents of which only a share holds
it, and that share sets the inclusion rate that GRPO starts from. Without the first ones the policy
is fluent but never copies, and GRPO learns nothing. All are of one length, so that nothing but the
keyword itself tells a story that holds it from one that does not.
"""

from __future__ import annotations

from functools import partial
from random import Random

from grpo_trainable.tasks.keyword import NOUNS_FILE, read_keywords
from grpo_trainable.tools.pretraining.corpus import Corpus, Document
from grpo_trainable.tools.pretraining.recipe import StoryRecipe
from grpo_trainable.tools.pretraining.stories import Storyteller
from grpo_trainable.tools.pretraining.story_measures import measure_stories

FRONT_SEVERAL_SHARE = 2 / 3  # prompts with several keywords: copying is learned sooner with more
HELD_OUT_STORIES = 1000
TOKENIZER_PROMPTS = 20_000  # they train as good a tokenizer as all, and sooner
TOKENIZER_STORIES = 2000
HELD_OUT_SOURCE = (
    "fresh documents of the same grammar under another seed, with the keyword share of the later "
    "part of the corpus"
)


def story_corpus(recipe: StoryRecipe) -> Corpus:
    documents, held_out = story_documents(recipe)
    # Prompts name every noun equally often: many of them and few stories make more nouns one
    # token, and a noun that is one token is easier to copy.
    texts = [d.prompt for d in documents[:TOKENIZER_PROMPTS]]
    texts += [d.response for d in documents[:TOKENIZER_STORIES]]
    return Corpus(
        documents=documents,
        held_out=held_out,
        tokenizer_texts=texts,
        measure=partial(measure_stories, held_out, HELD_OUT_SOURCE),
    )


def story_documents(recipe: StoryRecipe) -> tuple[list[Document], list[Document]]:
    """Training documents in the order they are to be seen, and fresh ones held out."""
    nouns = read_keywords(NOUNS_FILE)
    count = recipe.steps * recipe.batch_size
    teller = Storyteller(nouns, Random(f"corpus {recipe.seed}"))
    front = round(count * recipe.front_share)
    documents = [teller.document(1.0, FRONT_SEVERAL_SHARE) for _ in range(front)]
    documents += [teller.document(recipe.keyword_share) for _ in range(count - front)]
    fresh = Storyteller(nouns, Random(f"held-out {recipe.seed}"))
    return documents, [fresh.document(recipe.keyword_share) for _ in range(HELD_OUT_STORIES)]
