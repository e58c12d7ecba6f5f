"""The task `keyword`: a story is right if it contains every keyword of its prompt."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from grpo_trainable.config import TaskSettings
from grpo_trainable.tasks.messages import is_text, mistake_in_prompt
from grpo_trainable.tasks.order import Rows, SplitTask, permutation
from grpo_trainable.tasks.prompt_files import (
    hash_fraction,
    note_on_shared,
    read_examples,
    sources_in_files,
    split_files,
    true_answer,
)
from grpo_trainable.tasks.row_files import numbered_lines
from grpo_trainable.tasks.task import Example, JSONValue, Score

NOUNS_FILE = Path(__file__).parents[1] / "assets" / "nouns.txt"
HELD_OUT_WORDS = 0.25  # held-out share of the words in a keyword file


def keyword_prompt(keywords: Sequence[str]) -> str:
    """Return the prompt for some keywords. The story begins after the prompt's final newline.

    The shipped policy was pretrained on prompts with exactly these characters.
    """
    noun = "word" if len(keywords) == 1 else "words"
    return f"Write a story that includes the {noun}: {', '.join(keywords)}\n"


def split_of(word: str) -> str:
    """Return the split of a keyword, `train` or `heldout`.

    The split depends only on the word, regardless of letter case, so a word has the same split in
    every file and run.
    """
    return "heldout" if hash_fraction(word.lower()) < HELD_OUT_WORDS else "train"


# ---- Matching --------------------------------------------------------------------------------


def keyword_inclusion_reward_fn(response: str, keywords: str | Sequence[str]) -> float:
    """Return 1.0 if the response contains every keyword, ignoring case, else 0.0.

    A keyword counts inside a longer word too: "when" contains "hen". A plain string is one keyword.
    """
    text = response.casefold()
    return float(all(keyword.casefold() in text for keyword in _as_keywords(keywords)))


def word_inclusion_reward_fn(response: str, keywords: str | Sequence[str]) -> float:
    """Return 1.0 if the response contains every keyword as a whole word, ignoring case, else 0.0.

    Letters and digits continue a word, so neither "apples" nor "pineapple" counts as "apple".
    A hyphen separates words ("apple-pie" counts). An apostrophe inside a word continues the word
    ("can't" does not contain "can"), except in a possessive ("apple's" counts). A keyword of
    several words may be broken across lines.
    """
    text = _plain(response)
    return float(all(_word_pattern(keyword).search(text) for keyword in _as_keywords(keywords)))


# `task.match` -> the function that matches keywords.
_INCLUSION = {"word": word_inclusion_reward_fn, "substring": keyword_inclusion_reward_fn}

_TYPEWRITER = str.maketrans(
    {"\N{RIGHT SINGLE QUOTATION MARK}": "'", "\N{HYPHEN}": "-", "\N{NON-BREAKING HYPHEN}": "-"}
)
_LETTER = r"[^\W_]"  # letter or digit; underscores are excluded: they mark emphasis, as in _apple_


def _as_keywords(keywords: str | Sequence[str]) -> Sequence[str]:
    return [keywords] if isinstance(keywords, str) else keywords


def _plain(text: str) -> str:
    """Normalise letter case, the encoding of accents, and typographic marks."""
    return unicodedata.normalize("NFC", text).casefold().translate(_TYPEWRITER)


@lru_cache(maxsize=4096)
def _word_pattern(keyword: str) -> re.Pattern[str]:
    words = r"\s+".join(re.escape(word) for word in _plain(keyword).split())
    not_after = rf"(?<!{_LETTER})(?<!{_LETTER}')"
    not_before = rf"(?!{_LETTER})(?!'(?!s(?!{_LETTER})){_LETTER})"
    return re.compile(not_after + words + not_before)


# ---- Files -----------------------------------------------------------------------------------


def read_keywords(path: str | Path) -> list[str]:
    """Read keywords from a UTF-8 file that has one keyword per line.

    The order is kept. Duplicates are dropped, ignoring case. Blank lines and lines that start with
    # are skipped.

    Raises:
        ValueError: If the file cannot be read, is not UTF-8 (the message gives the line number) or
            contains no keyword.
    """
    keywords: dict[str, str] = {}
    for number, line in numbered_lines("keywords_file", path):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"task.keywords_file={path}: line {number} is not UTF-8 "
                f"(byte 0x{line[error.start]:02x})"
            ) from None
        keyword = " ".join(text.split())
        if keyword and not keyword.startswith("#"):
            keywords.setdefault(keyword.lower(), keyword)
    if not keywords:
        raise ValueError(f"task.keywords_file={path}: has no keyword; write one keyword per line")
    return list(keywords.values())


def parse_example(row: Mapping[str, Any], *, own_reward: bool = False) -> Example:
    """Parse a row with `prompt` and either `keywords` (a list) or `answer` (text).

    A text prompt gets a final newline if it has none, because the response follows directly.

    Args:
        row: The row.
        own_reward: True if a user's reward function scores responses. The true answer may then be
            any JSON value, or missing (see `true_answer`).

    Raises:
        ValueError: If a field is missing or malformed.
    """
    prompt: Any = row.get("prompt")
    keywords, answer = row.get("keywords"), row.get("answer")
    mistake = mistake_in_prompt(prompt)
    if mistake is not None:
        raise ValueError(f"prompt {mistake}")
    if isinstance(prompt, str) and not prompt.endswith("\n"):
        prompt += "\n"
    if own_reward:
        return Example(prompt, true_answer(row), row)
    if keywords is not None:
        if not (isinstance(keywords, list) and keywords and all(map(is_text, keywords))):
            raise ValueError("keywords must be a non-empty list of non-empty strings")
        return Example(prompt, keywords)
    if not is_text(answer):
        raise ValueError(
            "give `answer` as non-empty text, or `keywords` as a list of strings; a reward "
            "function (task.reward) needs neither"
        )
    return Example(prompt, answer)


# ---- The task --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Words:
    """An endless stream of prompts made from words. A pass uses each word at most once.

    If a prompt is made from several words, each pass makes new combinations.
    """

    words: Sequence[str]
    per_prompt: int

    @property
    def size(self) -> int:
        """Number of examples in one pass."""
        return len(self.words) // self.per_prompt

    def example(self, key: str, prompt_index: int) -> Example:
        epoch, place = divmod(prompt_index, self.size)
        order = permutation(key, epoch, len(self.words))
        chosen = order[place * self.per_prompt : (place + 1) * self.per_prompt]
        keywords = [self.words[i] for i in chosen]
        return Example(keyword_prompt(keywords), keywords, {"keywords": keywords})


class KeywordTask(SplitTask[Rows | _Words]):
    """Prompts from a word file (`keywords_file`, by default the shipped nouns) or from data files.

    `split_of` splits words into training and held-out words. `train_file` replaces all prompts made
    from words, and a hash of each prompt decides whether the prompt is held out. `eval_file`
    replaces the held-out prompts, and all prompts in it are held out. With `strict`, a malformed
    row raises an error. Otherwise the row is skipped.

    Raises:
        ValueError: If a file is missing, empty or malformed. The message is one line.
    """

    stop: tuple[str, ...] = ()  # no stop strings: only the policy ends a story

    def __init__(self, settings: TaskSettings, seed: int) -> None:
        self._inclusion = _INCLUSION[settings.match]
        self._seed = seed
        train_file, eval_file, strict = settings.train_file, settings.eval_file, settings.strict
        parse = partial(parse_example, own_reward=settings.reward is not None)
        if train_file is not None:
            self._train, self._heldout = split_files(train_file, eval_file, parse, strict=strict)
        else:
            self._train = _words_of("train", settings)
            self._heldout = (
                _words_of("heldout", settings)
                if eval_file is None
                else Rows(read_examples("eval_file", eval_file, parse, strict=strict))
            )
        words = "the shipped nouns" if settings.keywords_file is None else "task.keywords_file"
        self.sources = sources_in_files(train_file, eval_file, f"from {words}")
        self._files = train_file, eval_file

    def notes(self) -> list[str]:
        """Return one line if some prompts of the files are both trained on and held out."""
        train_file, eval_file = self._files
        if train_file is None or eval_file is None:
            return []
        assert isinstance(self._train, Rows)
        assert isinstance(self._heldout, Rows)
        note = note_on_shared(self._train, self._heldout, train_file, eval_file)
        return [] if note is None else [note]

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        """Reward 1 if the response contains every keyword of `ground_truth`, else 0.

        `ground_truth` is a list of strings or a single string. Any response is well-formed, so the
        format reward is always 1.
        """
        assert isinstance(ground_truth, str | list), ground_truth
        answer = self._inclusion(response, ground_truth)  # pyright: ignore[reportArgumentType]
        return Score(reward=answer, format_reward=1.0, answer_reward=answer)


def _words_of(split: str, settings: TaskSettings) -> _Words:
    path, per_prompt = settings.keywords_file or NOUNS_FILE, settings.keywords_per_prompt
    words = read_keywords(path)
    chosen = [word for word in words if split_of(word) == split]
    if len(chosen) < per_prompt:
        use = {"train": "training", "heldout": "evaluation"}[split]
        raise ValueError(
            f"task.keywords_file={path}: too few words; a hash of each word assigns {len(chosen)} "
            f"of {len(words)} to {use}, but each prompt needs "
            f"task.keywords_per_prompt={per_prompt}; add words"
        )
    return _Words(chosen, per_prompt)
