"""The story grammar: prompts and stories for pretraining, from a seed.

Every story has three to five sentences, and the last one is a closing sentence. A given share of
the stories contain the keywords of the prompt. The other stories are about other nouns, but are
drawn in the same way, so length and form do not reveal whether a keyword is present.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from random import Random

from grpo_trainable.tasks.keyword import (
    NOUNS_FILE,
    keyword_prompt,
    read_keywords,
    word_inclusion_reward_fn,
)
from grpo_trainable.tools.pretraining.corpus import Document

MAX_KEYWORDS = 3
SEVERAL_SHARE = 0.08  # share of prompts with two or three keywords
MIN_SENTENCES = 3
MAX_SENTENCES = 5
MAX_CHARACTERS = 160  # at most 60 tokens with the shipped tokenizer
INTRO_SHARE = 0.3
OMISSION_SHARE = 0.4  # share of stories that skip the second stage of their plot
MAX_OUTLINES = 50  # attempts to fit a keyword into a plot before it gets a separate sentence
MAX_STORIES = 1000  # attempts to find a story of the right length
LEFTOVER_ROLE = 10  # added roles are `any10`, `any11`, …; templates use smaller numbers

STORY_FILES = NOUNS_FILE.parent / "stories"
_WORDS = json.loads((STORY_FILES / "words.json").read_text(encoding="utf-8"))

# Kind -> nouns. The kind determines a noun's possible roles. A noun without a kind is a `thing`.
KINDS: dict[str, list[str]] = _WORDS["kinds"]
KIND_OF = {word: kind for kind, words in KINDS.items() for word in words}
THING = "thing"

# Role in a template -> the kinds of nouns that fit it.
ROLES = {
    "animal": ("animal",),
    "person": ("person",),
    "food": ("food",),
    "wear": ("wear",),
    "place": ("place",),
    "sight": ("sight",),
    "vehicle": ("vehicle",),
    "thing": (THING,),
    "gift": (THING, "wear", "food"),
    "view": ("sight", "vehicle"),
    "any": (*KINDS, THING),
}

GIRLS, BOYS, TRAITS = _WORDS["girls"], _WORDS["boys"], _WORDS["traits"]
ADJECTIVES: dict[str, list[str]] = _WORDS["adjectives"]  # kind -> suitable adjectives
USES: dict[str, list[str]] = _WORDS["uses"]  # kind -> what a character does with such a noun
IN_PLACES, ON_PLACES = frozenset(_WORDS["in_places"]), frozenset(_WORDS["on_places"])
UNIQUE = frozenset(_WORDS["unique"])  # nouns that take "the" and no adjective, like the moon
SOUNDS_LIKE_A_CONSONANT = tuple(_WORDS["sounds_like_a_consonant"])


def _template(name: str) -> str:
    """Read a file of templates.

    - `{role}` is a noun, the same throughout a document. `{role2}` is another noun.
    - `{a role}` puts an article before the noun, and `{a+ role}` often an adjective as well.
    - `{in place}` puts the fitting preposition before the noun.
    - `{use gift}` describes an action with the noun.
    - `{hero}`, `{friend}` and the pronouns `{he}`, `{fhe}` … refer to the characters.
    - `[x/y]` is replaced by x or y, chosen at random.

    If a field begins with a capital letter, so does the text that replaces it. Lines are
    alternatives. An empty line starts the next sentence, and `====` separates plots. The files
    contain none of the nouns in nouns.txt, because every noun comes from a role.
    """
    return (STORY_FILES / f"{name}.txt").read_text(encoding="utf-8")


WHEN, INTROS, PLOTS, CLOSINGS, LEFTOVERS = map(
    _template, ("when", "intros", "plots", "closings", "leftovers")
)


def _lines(text: str) -> list[str]:
    return [line for line in text.strip().splitlines() if line]


def _stages(text: str) -> list[list[str]]:
    return [_lines(stage) for stage in text.strip().split("\n\n")]


_WHEN, _INTROS, _CLOSINGS, _LEFTOVERS = map(_lines, (WHEN, INTROS, CLOSINGS, LEFTOVERS))
_PLOTS = [_stages(plot) for plot in PLOTS.split("====")]
_SENTENCE_END = re.compile(r"[.!?]\"?(?=\s+[\"A-Z]|\s*$)")
_CHOICE = re.compile(r"\[([^\]]+)\]")
_FIELD = re.compile(r"\{(?:(a|a\+|in|use) )?(\w+)\}", re.IGNORECASE)
_ROLE = re.compile(r"\{(?:(?:a|a\+|in) )?((?:" + "|".join(ROLES) + r")\d*)\}", re.IGNORECASE)


class Storyteller:
    """Writes documents with keywords from `nouns`. All random draws come from `rng`."""

    def __init__(self, nouns: Sequence[str], rng: Random) -> None:
        if len(nouns) < 2 * MAX_KEYWORDS:  # stories without the keywords need other nouns
            raise ValueError(f"{len(nouns)} nouns: at least {2 * MAX_KEYWORDS} are needed")
        self._nouns = list(nouns)
        self._rng = rng
        # Shipped nouns also serve as scenery, because `nouns` may lack nouns of some kinds.
        scenery = dict.fromkeys([*nouns, *read_keywords(NOUNS_FILE)])
        self._by_kind = {
            kind: [noun for noun in scenery if kind_of(noun) == kind] for kind in (*KINDS, THING)
        }

    def keywords(self, several_share: float = SEVERAL_SHARE) -> list[str]:
        """Draw two or three keywords with probability `several_share`, and otherwise one."""
        count = 1
        if self._rng.random() < several_share:
            count = self._rng.randint(2, MAX_KEYWORDS)
        return self._rng.sample(self._nouns, count)

    def document(self, keyword_share: float, several_share: float = SEVERAL_SHARE) -> Document:
        """Write a document whose story contains all keywords of its prompt, or none of them.

        Args:
            keyword_share: Probability that the story contains the keywords.
            several_share: Probability of two or three keywords.
        """
        keywords = self.keywords(several_share)
        include = self._rng.random() < keyword_share
        return Document(keyword_prompt(keywords), self.story(keywords, include=include))

    def story(self, keywords: Sequence[str], *, include: bool) -> str:
        """Write a story about the keywords, or about the same number of other nouns.

        Both kinds of stories are drawn in the same way, so they differ only in their nouns, not in
        their length.

        Raises:
            ValueError: If no story is short enough because the nouns are too long.
        """
        if include:
            return self._tell(keywords, avoid=())
        others = self._rng.sample([n for n in self._nouns if n not in keywords], len(keywords))
        return self._tell(others, avoid=keywords)

    def _tell(self, subjects: Sequence[str], avoid: Sequence[str]) -> str:
        for _ in range(MAX_STORIES):
            template, cast = self._outline(subjects)
            text = _Scene(self._rng, self._by_kind, cast, avoid).tell(template)
            if (
                MIN_SENTENCES <= count_sentences(text) <= MAX_SENTENCES
                and len(text) <= MAX_CHARACTERS
                and not any(word_inclusion_reward_fn(text, word) for word in avoid)
            ):
                return text
        raise ValueError(
            f"found no story of at most {MAX_CHARACTERS} characters about: {', '.join(subjects)}"
        )

    def _outline(self, subjects: Sequence[str]) -> tuple[str, dict[str, str]]:
        """Draw a template, and assign the subjects to its roles.

        Draw up to MAX_OUTLINES templates, until one has the first subject as its first noun. If
        none does, keep the last template.
        """
        sentences, cast = [], {}
        for _ in range(MAX_OUTLINES):
            sentences = [_choose(sentence, self._rng) for sentence in self._plot()]
            roles = list(dict.fromkeys(_ROLE.findall(" ".join(sentences))))
            cast = _cast(roles, subjects)
            if roles and cast.get(roles[0]) == subjects[0]:
                break
        for number, subject in enumerate(s for s in subjects if s not in cast.values()):
            role = f"any{LEFTOVER_ROLE + number}"
            sentences.append(self._rng.choice(_LEFTOVERS).replace("any", role))
            cast[role] = subject
        sentences.append(_choose(self._rng.choice(_CLOSINGS), self._rng))
        return " ".join(sentences), cast

    def _plot(self) -> list[str]:
        """Draw the sentences before the closing sentence: an optional introduction, then a plot."""
        stages = list(self._rng.choice(_PLOTS))
        if self._rng.random() < OMISSION_SHARE:
            del stages[1]
        plot = [self._rng.choice(stage) for stage in stages]
        if self._rng.random() < INTRO_SHARE:
            # After an introduction, a pronoun refers to the hero.
            plot = [s.replace("{who}", "{he}").replace("{Who}", "{He}") for s in plot]
            plot.insert(0, self._rng.choice(_INTROS))
        return [re.sub("{who}", "{hero}", s, flags=re.IGNORECASE) for s in plot]


class _Scene:
    """A story in progress: its characters and the noun of each role."""

    def __init__(
        self,
        rng: Random,
        nouns: dict[str, list[str]],
        cast: dict[str, str],
        avoid: Sequence[str],
    ) -> None:
        self._rng = rng
        self._nouns = nouns  # kind -> nouns for roles without a subject
        self._cast = dict(cast)  # role -> noun
        self._avoid = {*avoid, *cast.values()}
        girl, friend_girl = rng.random() < 0.5, rng.random() < 0.5
        hero = rng.choice(GIRLS if girl else BOYS)
        friend = rng.choice([n for n in (GIRLS if friend_girl else BOYS) if n != hero])
        he, him, his = ("she", "her", "her") if girl else ("he", "him", "his")
        fhe, fhis = ("she", "her") if friend_girl else ("he", "his")
        self._words = {"hero": hero, "friend": friend, "child": "girl" if girl else "boy"}
        self._words |= {"he": he, "him": him, "his": his, "fhe": fhe, "fhis": fhis}

    def tell(self, template: str) -> str:
        """Fill in a template."""
        return _FIELD.sub(self._fill, template)

    def _fill(self, field: re.Match[str]) -> str:
        how, name = field.groups()
        text = self._phrase(how.lower() if how else None, name.lower())
        return text[0].upper() + text[1:] if field[0][1].isupper() else text

    def _phrase(self, how: str | None, name: str) -> str:
        if name == "trait":
            return self._rng.choice(TRAITS)
        if name in self._words:
            return self._words[name]
        noun = self._noun(name)
        kind = kind_of(noun)
        if how == "use":
            return self.tell(self._rng.choice(USES[kind]))
        if how == "in":
            preposition = "in" if noun in IN_PLACES else "on" if noun in ON_PLACES else "at"
            return f"{preposition} the {noun}"
        if how is None:
            return noun
        if noun in UNIQUE:
            return f"the {noun}"
        if how == "a+" and self._rng.random() < 0.7:
            noun = f"{self._rng.choice(ADJECTIVES[kind])} {noun}"
        return f"{article(noun)} {noun}"

    def _noun(self, role: str) -> str:
        """Return the noun of a role. A new role gets a noun that is not yet in this document."""
        if role not in self._cast:
            choices = [n for kind in _kinds(role) for n in self._nouns[kind]]
            noun = self._rng.choice(choices)
            while noun in self._avoid:
                noun = self._rng.choice(choices)
            self._cast[role] = noun
            self._avoid.add(noun)
        return self._cast[role]


def count_sentences(text: str) -> int:
    """Count the ends of sentences. A quotation before "said" does not end a sentence."""
    return len(_SENTENCE_END.findall(text))


def kind_of(noun: str) -> str:
    """Return the kind of a noun."""
    return KIND_OF.get(noun, THING)


def article(phrase: str) -> str:
    """Return the article for `phrase`: "a" or "an", depending on its first sound."""
    vowel = phrase[0] in "aeiou" or phrase.startswith("hourglass")
    return "an" if vowel and not phrase.startswith(SOUNDS_LIKE_A_CONSONANT) else "a"


def _cast(roles: Sequence[str], subjects: Sequence[str]) -> dict[str, str]:
    """Assign each subject to the first free role that it fits, if any. Return role -> noun."""
    cast: dict[str, str] = {}
    for subject in subjects:
        suits = (r for r in roles if r not in cast and kind_of(subject) in _kinds(r))
        if (role := next(suits, None)) is not None:
            cast[role] = subject
    return cast


def _kinds(role: str) -> tuple[str, ...]:
    return ROLES[role.rstrip("0123456789")]


def _choose(template: str, rng: Random) -> str:
    """Fill in a time for each `{when}`, and choose one option of each `[a/b]`."""
    template = re.sub(r"\{when\}", lambda _: rng.choice(_WHEN), template)
    return _CHOICE.sub(lambda match: rng.choice(match[1].split("/")), template)
