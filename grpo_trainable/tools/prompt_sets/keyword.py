"""Ask a model to write prompts for the task `keyword`, and check the model's answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from grpo_trainable.tasks.keyword import word_inclusion_reward_fn
from grpo_trainable.tasks.order import permutation
from grpo_trainable.tasks.prompt_files import HELD_OUT_PROMPTS, hash_fraction

LONGEST_PROMPT = 400  # characters
SHORTEST_PROMPT = 15
MOST_ATTEMPTS = 1000  # maximum number of attempts per prompt
# Beginning of a list. A model that was not trained on conversations can continue the list.
EXAMPLES = """\
Each line asks a child to write a short story that includes the given words.
fox: Write a short story about a fox who learns to swim, and use the word fox.
lamp, rain: Tell a story in which a lamp is left out in the rain.
garden: Write a story about something strange that grows in a garden.
"""
_LABEL = re.compile(r"^(?:[-*•]|\d+[.)]|(?:prompt|writing prompt|instruction)\s*:)\s*", re.I)


@dataclass(frozen=True, kw_only=True)
class Item:
    """A prompt to write."""

    index: int
    keywords: tuple[str, ...]
    # True if the keywords are held-out words. Hashes of the words decide this, so it is the same in
    # every set and run.
    heldout: bool

    @property
    def instruction(self) -> str:
        """Request to a model that follows instructions."""
        words = ", ".join(self.keywords)
        noun = "word" if len(self.keywords) == 1 else "words"
        return (
            "Write one instruction, in one line of at most 40 words, that asks for a short story. "
            f"The instruction itself must contain the {noun}: {words}. "
            "Answer with the instruction alone."
        )

    @property
    def beginning(self) -> str:
        """Beginning of a text, for a model that can only continue text."""
        return f"{EXAMPLES}{', '.join(self.keywords)}:"


def is_held_out_word(word: str) -> bool:
    """Return True if a keyword, in any letter case, is among the held-out fifth of keywords."""
    return hash_fraction(word.lower()) < HELD_OUT_PROMPTS


def items(words: Sequence[str], wanted: int, per_prompt: int, seed: int) -> Iterator[Item]:
    """Make passes over the words, and yield the first `wanted` prompts.

    Each pass goes through the words in a different order. The words of a prompt are all training
    words or all held-out words.

    Raises:
        ValueError: If neither the training words nor the held-out words are enough for one prompt.
    """
    sides = [
        (heldout, [word for word in words if is_held_out_word(word) == heldout])
        for heldout in (False, True)
    ]
    if all(len(side) < per_prompt for _, side in sides):
        raise ValueError(
            f"--keywords-per-prompt {per_prompt}: of the {len(words)} words, neither the training "
            "words nor the held-out words are enough for one prompt; lower the option or add words"
        )
    made = 0
    for epoch in count():
        for keywords, heldout in _of_a_pass(sides, per_prompt, seed, epoch):
            if made == wanted:
                return
            yield Item(index=made, keywords=keywords, heldout=heldout)
            made += 1


def _of_a_pass(
    sides: Sequence[tuple[bool, Sequence[str]]], per_prompt: int, seed: int, epoch: int
) -> Iterator[tuple[tuple[str, ...], bool]]:
    chosen: list[tuple[tuple[str, ...], bool]] = []
    for heldout, words in sides:
        order = permutation(f"make_data {seed} {heldout}", epoch, len(words))
        starts = range(0, len(words) - per_prompt + 1, per_prompt)
        chosen += [
            (tuple(words[i] for i in order[start : start + per_prompt]), heldout)
            for start in starts
        ]
    for place in permutation(f"make_data {seed}", epoch, len(chosen)):
        yield chosen[place]


def prompt_in(text: str, keywords: Sequence[str]) -> str | None:
    """Extract a prompt from a model's text: the first line that is not blank.

    Returns:
        The prompt, or None if it is too long, too short, or lacks a keyword.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    line = _LABEL.sub("", lines[0]).strip().strip("\"'“”`*").strip()
    if not SHORTEST_PROMPT <= len(line) <= LONGEST_PROMPT or "\ufffd" in line:
        return None
    return line if word_inclusion_reward_fn(line, keywords) == 1.0 else None


def plain_prompt(prompt: str) -> str:
    """Remove case and punctuation from a prompt, to find repeated prompts."""
    return " ".join(re.findall(r"\w+", prompt.casefold()))
