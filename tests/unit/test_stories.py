from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest

from grpo_trainable.tasks import stories
from grpo_trainable.tasks.keyword import (
    NOUNS_FILE,
    keyword_prompt,
    read_keywords,
    word_inclusion_reward_fn,
)
from grpo_trainable.tasks.stories import BOYS, GIRLS, KIND_OF, KINDS, THING, Storyteller, article

NOUNS = read_keywords(NOUNS_FILE)


def teller(seed: int = 0) -> Storyteller:
    return Storyteller(NOUNS, Random(seed))


def keywords_of(prompt: str) -> list[str]:
    return prompt.rstrip("\n").split(": ")[1].split(", ")


def test_the_same_seed_tells_the_same_stories():
    first, second, other = teller(), teller(), teller(1)
    documents = [first.story_document(0.5) for _ in range(50)]
    assert documents == [second.story_document(0.5) for _ in range(50)]
    assert documents != [other.story_document(0.5) for _ in range(50)]


def test_a_short_document_holds_every_keyword_as_a_whole_word():
    storyteller = teller()
    for _ in range(1000):
        document = storyteller.short_document()
        assert word_inclusion_reward_fn(document.response, keywords_of(document.prompt)), document


def test_any_noun_alone_fits_into_a_short_document_and_a_story():
    storyteller = teller()
    for noun in NOUNS:
        for text in (storyteller.short([noun]), storyteller.story([noun], include=True)):
            assert word_inclusion_reward_fn(text, [noun]), (noun, text)


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
    documents = [storyteller.story_document(0.3) for _ in range(2000)]
    held = [word_inclusion_reward_fn(d.response, keywords_of(d.prompt)) for d in documents]
    assert sum(held) / len(held) == pytest.approx(0.3, abs=0.04)


def test_some_prompts_ask_for_two_or_three_keywords():
    storyteller = teller()
    counts = Counter(len(storyteller.keywords()) for _ in range(4000))
    assert set(counts) == {1, 2, 3}
    assert 0.05 <= (counts[2] + counts[3]) / 4000 <= 0.10


def test_prompts_are_those_of_the_keyword_task():
    document = teller().story_document(0.5)
    assert document.prompt == keyword_prompt(keywords_of(document.prompt))


def test_documents_have_no_markup_left_and_are_sentences():
    storyteller = teller()
    for _ in range(1500):
        for document in (storyteller.short_document(), storyteller.story_document(0.5)):
            text = document.response
            assert re.fullmatch(r"[A-Za-z'\",.!? ]+", text), text
            assert "  " not in text
            assert text[0].isupper() or text[0] == '"', text
            assert text.endswith((".", "!", '"')), text
            assert not re.search(r"[.!?] [a-z]", text.replace('!" ', "")), text


def test_articles_agree_with_the_next_word():
    storyteller = teller()
    for _ in range(1500):
        text = storyteller.story_document(0.5).response
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
    """In a story with no friend in it, he and she never meet."""
    storyteller = teller()
    checked = 0
    for _ in range(1500):
        text = storyteller.story_document(0.5).response
        if sum(name in text.split() for name in (*GIRLS, *BOYS)) == 1 and '"' not in text:
            words = set(re.findall(r"\w+", text.lower()))
            if len([n for n in (*GIRLS, *BOYS) if n.lower() in words]) == 1:
                assert not (words & {"he", "him", "his"} and words & {"she", "her"}), text
                checked += 1
    assert checked > 100


def test_no_noun_is_written_into_a_template():
    """Otherwise some keywords would be in stories that were told without them."""
    templates = [
        stories.WHEN,
        stories.INTROS,
        stories.PLOTS,
        stories.CLOSINGS,
        stories.LEFTOVERS,
        stories.SHORTS,
        stories.SHORT_ENDS,
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
    text = stories.INTROS + stories.PLOTS + stories.SHORTS + stories.LEFTOVERS
    characters = {"hero", "friend", "child", "trait", "when", "who"}
    characters |= {"he", "him", "his", "fhe", "fhis"}
    for field in re.findall(r"\{([^}]*)\}", text):
        name = field.split()[-1].lower().rstrip("0123456789")
        assert name in characters or name in stories.ROLES, field


def test_nouns_of_ones_own_become_keywords_and_our_nouns_the_scenery():
    own = ["gizmo", "widget", "doodad", "gadget", "sprocket", "thingy"]
    storyteller = Storyteller(own, Random(0))
    documents = [storyteller.story_document(1.0) for _ in range(50)]
    for document in documents:
        keywords = keywords_of(document.prompt)
        assert set(keywords) <= set(own)
        assert word_inclusion_reward_fn(document.response, keywords)
    for _ in range(200):
        assert storyteller.story_document(0.0).response
    text = " ".join(d.response for d in documents)
    assert any(animal in text.split() for animal in KINDS["animal"])
    assert stories.kind_of("gizmo") == THING


def test_too_few_nouns_are_refused():
    with pytest.raises(ValueError, match="5 nouns: at least 6"):
        Storyteller(["one", "two", "three", "four", "five"], Random(0))
