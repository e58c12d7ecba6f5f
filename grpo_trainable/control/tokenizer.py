"""Tokens for the actions of a control policy, so that episodes look like text.

This module does not import torch, so that a command can read a policy's shape and tokenizer before
it starts anything else.
"""

from __future__ import annotations

import tokenizers
from tokenizers import models

from grpo_trainable.control.spaces import Spaces, spaces_of
from grpo_trainable.models.shape import PolicyShape
from grpo_trainable.models.tokenizer import END_OF_TEXT, PAD, Tokenizer

MOST_STEPS = 1 << 20  # a control policy sees one step at a time, so its context has no limit
PROMPT = "begin"  # the only token of every prompt
NUMBERS = "act"  # the token of every continuous action


def control_tokenizer(spaces: Spaces) -> Tokenizer:
    """Build a tokenizer with a word for each discrete action. Action i is token i.

    All continuous actions share one word. Every prompt is a single token.
    """
    choices = range(spaces.first, spaces.first + spaces.choices) if spaces.choices else ()
    words = [*map(str, choices)] or [NUMBERS]
    vocabulary = {word: index for index, word in enumerate([*words, PROMPT])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=PROMPT))
    backend.add_special_tokens([END_OF_TEXT, PAD])
    return Tokenizer.of_ours(backend)


def describe_control_policy(env: str) -> tuple[PolicyShape, Tokenizer]:
    """Return the shape and the tokenizer of the policy that acts in an environment.

    Raises:
        ValueError: If the environment cannot be created, or if its spaces are not supported.
    """
    tokenizer = control_tokenizer(spaces_of(env))
    return PolicyShape(context_length=MOST_STEPS, vocab_size=tokenizer.vocab_size), tokenizer
