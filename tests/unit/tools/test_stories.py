from __future__ import annotations

import functools
import re
from collections import Counter
from random import Random

import pytest

from grpo_trainable.config import GRPOConfig
from grpo_trainable.models.directory import SHIPPED_POLICY
from grpo_trainable.models.store import load_policy
from grpo_trainable.tasks.keyword import (
    NOUNS_FILE,
    keyword_prompt,
    read_keywords,
    word_inclusion_reward_fn,
)
from grpo_trainable.tools.pretraining import stories
from grpo_trainable.tools.pretraining.stories import (
    BOYS,
    GIRLS,
    KIND_OF,
    KINDS,
    SEVERAL_SHARE,
    THING,
    Document,
    Storyteller,
    article,
    count_sentences,
)

pytestmark = pytest.mark.slow  # these tests generate corpora

NOUNS = read_keywords(NOUNS_FILE)


def teller(seed: int = 0) -> Storyteller:
    return Storyteller(NOUNS, Random(seed))


@functools.cache
def told(share: float, several_share: float, count: int) -> list[Document]:
    """Return `count` documents of one storyteller, shared by several tests."""
    storyteller = teller()
    return [storyteller.document(share, several_share) for _ in range(count)]


def keywords_of(prompt: str) -> list[str]:
    return prompt.rstrip("\n").split(": ")[1].split(", ")


def test_the_same_seed_tells_the_same_stories():
    first, second, other = teller(), teller(), teller(1)
    documents = [first.document(0.5) for _ in range(50)]
    assert documents == [second.document(0.5) for _ in range(50)]
    assert documents != [other.document(0.5) for _ in range(50)]


def test_any_noun_alone_fits_into_a_story():
    storyteller = teller()
    for noun in NOUNS:
        assert word_inclusion_reward_fn(storyteller.story([noun], include=True), [noun]), noun


def test_a_story_asked_to_holds_all_of_its_keywords_and_else_none():
    storyteller = teller()
    for count in (1, 2, 3):
        for _ in range(150):
            keywords = storyteller._rng.sample(NOUNS, count)
            told = storyteller.story(keywords, include=True)
            assert all(word_inclusion_reward_fn(told, [k]) for k in keywords), (keywords, told)
            told = storyteller.story(keywords, include=False)
            assert not any(word_inclusion_reward_fn(told, [k]) for k in keywords), (keywords, told)


def test_keyword_share_is_the_share_of_stories_that_hold_their_keywords():
    storyteller = teller()
    documents = [storyteller.document(0.3) for _ in range(2000)]
    held = [word_inclusion_reward_fn(d.response, keywords_of(d.prompt)) for d in documents]
    assert sum(held) / len(held) == pytest.approx(0.3, abs=0.04)


def test_some_prompts_ask_for_two_or_three_keywords():
    storyteller = teller()
    counts = Counter(len(storyteller.keywords()) for _ in range(4000))
    assert set(counts) == {1, 2, 3}
    assert 0.05 <= (counts[2] + counts[3]) / 4000 <= 0.10
    assert {len(storyteller.keywords(several_share=1.0)) for _ in range(100)} == {2, 3}


def test_prompts_are_those_of_the_keyword_task():
    document = teller().document(0.5)
    assert document.prompt == keyword_prompt(keywords_of(document.prompt))


def test_documents_have_no_markup_left_and_are_sentences():
    for document in told(0.5, SEVERAL_SHARE, 1500):
        text = document.response
        assert re.fullmatch(r"[A-Za-z'\",.!? ]+", text), text
        assert "  " not in text
        assert text[0].isupper() or text[0] == '"', text
        assert not re.search(r"[.!?] [a-z]", text.replace('!" ', "")), text


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", 0),
        ("no end", 0),
        ("One day, Ann saw a cat.", 1),
        ("It was a cat! It ran off. ", 2),
        ('"Wow, a cat!" she said, and she ran.', 1),
        ('"It is mine!" said Ann. "No, mine!" said Ben.', 2),
        ('"Do not worry," said Ann. "I will help you."', 2),
        ('Then Ben came. "You found my cat!" he said.', 2),
        ('Ann had an idea. "We can take turns!" She smiled', 2),
        ("It was cut in the", 0),
    ],
)
def test_sentences_are_counted_by_their_ends(text: str, sentences: int):
    assert count_sentences(text) == sentences


def test_a_story_has_three_to_five_sentences_and_fits_the_default_limit():
    """Check stories with and without their keywords, in tokens of the shipped tokenizer.

    The count includes end-of-text.
    """
    _, tokenizer = load_policy(SHIPPED_POLICY)
    limit = GRPOConfig.from_dict({}).rollout.max_new_tokens
    for document in told(0.5, 0.5, 1500):
        assert 3 <= count_sentences(document.response) <= 5, document
        assert len(tokenizer.encode(document.response)) + 1 <= limit, document


def test_the_last_sentence_closes_the_story():
    """Check that a closing sentence comes last and nowhere else."""
    lines = map(re.escape, stories._CLOSINGS)
    closing = re.compile(
        "|".join(re.sub(r"\\[{[].*?\\[}\]]", "[A-Za-z ]+", line) for line in lines)
    )
    for document in told(0.5, 0.5, 1500):
        text = document.response
        (found,) = closing.finditer(text)
        assert found.end() == len(text), text


def test_length_says_nothing_about_the_keyword():
    """Check that stories with and without their keyword have the same length distribution.

    Lengths are in tokens and in sentences. The largest distance between the two distribution
    functions (Kolmogorov-Smirnov) is within the range that chance gives in 99.9 % of samples.
    """
    _, tokenizer = load_policy(SHIPPED_POLICY)
    storyteller, count = teller(), 2000
    kinds = [[storyteller.document(share).response for _ in range(count)] for share in (0.0, 1.0)]
    for length in (lambda text: len(tokenizer.encode(text)), count_sentences):
        without, with_keyword = (Counter(map(length, texts)) for texts in kinds)
        distance = max(
            abs(sum(without[n] - with_keyword[n] for n in range(limit + 1))) / count
            for limit in {*without, *with_keyword}
        )
        assert distance <= 1.95 * (2 / count) ** 0.5


def test_articles_agree_with_the_next_word():
    for document in told(0.5, SEVERAL_SHARE, 1500):
        text = document.response
        for found, word in re.findall(r"\b([Aa]n?) (\w+)", text):
            assert found.lower() == article(word), text


@pytest.mark.parametrize(
    ("phrase", "expected"),
    [
        ("apple", "an"),
        ("old pear", "an"),
        ("pear", "a"),
        ("unicorn", "a"),
        ("umbrella", "an"),
        ("hourglass", "an"),
        ("horse", "a"),
    ],
)
def test_article(phrase: str, expected: str):
    assert article(phrase) == expected


def test_a_hero_keeps_one_pronoun():
    """Check that "he" and "she" never both occur in a story without a friend."""
    checked = 0
    for document in told(0.5, SEVERAL_SHARE, 1500):
        text = document.response
        if sum(name in text.split() for name in (*GIRLS, *BOYS)) == 1 and '"' not in text:
            words = set(re.findall(r"\w+", text.lower()))
            if len([n for n in (*GIRLS, *BOYS) if n.lower() in words]) == 1:
                assert not (words & {"he", "him", "his"} and words & {"she", "her"}), text
                checked += 1
    assert checked > 100


def test_no_noun_is_written_into_a_template():
    """A noun in a template would also appear in stories whose keyword is another noun."""
    templates = [
        stories.WHEN,
        stories.INTROS,
        stories.PLOTS,
        stories.CLOSINGS,
        stories.LEFTOVERS,
        *stories.TRAITS,
        *(text for texts in stories.USES.values() for text in texts),
        *(text for texts in stories.ADJECTIVES.values() for text in texts),
        *GIRLS,
        *BOYS,
    ]
    written = re.sub(r"\{[^}]*\}", " ", "\n".join(templates)).lower()
    assert set(re.findall(r"\w+", written)) & set(NOUNS) == set()


def test_every_kind_lists_nouns_of_the_file_once():
    listed = [noun for words in KINDS.values() for noun in words]
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(NOUNS)
    assert len(set(NOUNS) - set(listed)) > 200, "things"
    assert set(KINDS["place"]) >= stories.IN_PLACES | stories.ON_PLACES
    assert set(KIND_OF) >= stories.UNIQUE


def test_every_template_names_only_roles_that_exist():
    text = stories.INTROS + stories.PLOTS + stories.LEFTOVERS + stories.CLOSINGS
    characters = {"hero", "friend", "child", "trait", "when", "who"}
    characters |= {"he", "him", "his", "fhe", "fhis"}
    for field in re.findall(r"\{([^}]*)\}", text):
        name = field.split()[-1].lower().rstrip("0123456789")
        assert name in characters or name in stories.ROLES, field


def test_nouns_of_ones_own_become_keywords_and_our_nouns_the_scenery():
    own = ["gizmo", "widget", "doodad", "gadget", "sprocket", "thingy"]
    storyteller = Storyteller(own, Random(0))
    documents = [storyteller.document(1.0) for _ in range(50)]
    for document in documents:
        keywords = keywords_of(document.prompt)
        assert set(keywords) <= set(own)
        assert word_inclusion_reward_fn(document.response, keywords)
    for _ in range(200):
        assert storyteller.document(0.0).response
    text = " ".join(d.response for d in documents)
    assert any(animal in text.split() for animal in KINDS["animal"])
    assert stories.kind_of("gizmo") == THING


def test_too_few_nouns_are_refused():
    with pytest.raises(ValueError, match="5 nouns: at least 6"):
        Storyteller(["one", "two", "three", "four", "five"], Random(0))


def test_nouns_too_long_for_any_story_are_refused():
    storyteller = Storyteller([letter * 150 for letter in "abcdef"], Random(0))
    with pytest.raises(ValueError, match=r"no story of at most 160 characters about: a+$"):
        storyteller.story(["a" * 150], include=True)
