"""A user's search space is found by its file, or the error is one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_trainable.config import ConfigError
from search_spaces import SPACES, Column, SearchSpace
from search_spaces.find import absolute, find_preset, find_space, source_file

MINE = """\
from search_spaces import Column, SearchSpace
from search_spaces.columns import SPEED
from search_spaces.spaces import LAG

MINE = SearchSpace(
    name="mine",
    question="which learning rate?",
    arms={"slow": {"optim.lr": 1e-4}, "fast": {"optim.lr": 3e-4}},
    columns=(Column(name="norm", title="gradient norm", metric="optim/grad_norm"), SPEED),
)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(MINE)
    yield tmp_path / "mine.py"
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("name", SPACES)
def test_our_spaces_are_found_by_name_and_have_no_file(name):
    assert find_space(name) is SPACES[name]
    assert source_file(name) is None
    assert absolute(name) == name


@pytest.mark.parametrize("text", ["mine.py", "./mine.py:MINE", "mine:MINE"])
def test_a_space_is_found_in_a_file_or_module(mine, text):
    space = find_space(text)
    assert space.name == "mine"
    assert [trial.optim.lr for trial in space.trials({}, [0])] == [1e-4, 3e-4]
    found = source_file(text)
    assert found is not None
    assert Path(found).resolve() == mine


def test_the_absolute_name_works_from_every_directory(mine, monkeypatch):
    names = [absolute("mine.py"), absolute("./mine.py:MINE")]
    assert names == [str(mine), f"{mine}:MINE"]
    monkeypatch.chdir("/")
    assert {find_space(name).name for name in names} == {"mine"}


@pytest.mark.parametrize(
    ("change", "text", "words"),
    [
        ((MINE, "x = 1"), "mine.py", "defines no SearchSpace"),
        (("MINE = ", "OTHER = MINE = "), "mine.py", None),
        (
            ("MINE = S", "OTHER = SearchSpace(name='b', question='b', arms={'b': {}})\nMINE = S"),
            "mine.py",
            "several search spaces; choose mine.py:OTHER or mine.py:MINE",
        ),
        (("", ""), "mine.py:YOURS", "no attribute 'YOURS'; it has LAG, MINE"),
        (
            ("", ""),
            "mine.py:SPEED",
            "must be a search_spaces.search_space.SearchSpace, got a Column",
        ),
        (("", ""), "yours.py", "FileNotFoundError"),
        (("", ""), "min", "did you mean lag?"),
        (("question=", "questn="), "mine.py", "questn"),
        (('name="mine"', 'name="../mine"'), "mine.py", "letters, digits"),
        (('"slow":', '"a/b":'), "mine.py", "letters, digits"),
        (('{"optim.lr": 1e-4}', '"optim.lr=1e-4"'), "mine.py", "must map labels to their settings"),
        (('arms={"slow": ', 'arms=["slow"], extra={"slow": '), "mine.py", "extra"),
        (('"norm"', '"reward"'), "mine.py", "the column reward is built in; choose another name"),
        (("optim/grad_norm", "optim/grad_nrm"), "mine.py", "did you mean optim/grad_norm?"),
        (("optim/grad_norm", "speed"), "mine.py", "metric=speed: must be a metric"),
        (('"optim/grad_norm"', '"optim/grad_norm", over="first"'), "mine.py", "over=first"),
        (('"optim/grad_norm"', '"optim/grad_norm", form="{}"'), "mine.py", "must be like"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(mine, change, text, words):
    mine.write_text(MINE.replace(*change) if change[0] else MINE)
    if words is None:  # two names of one space
        assert find_space(text).name == "mine"
        return
    words = "unknown; valid: async_vs_sync" if text == "min" else words
    with pytest.raises(ConfigError) as caught:
        find_space(text)
    assert str(caught.value).startswith(f"--space {text}: ")
    assert text in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_preset_and_a_space_are_told_apart():
    with pytest.raises(ConfigError, match=r"^--space grpo: that is a preset; use --preset grpo$"):
        find_space("grpo")
    with pytest.raises(
        ConfigError, match=r"^--preset lag: that is a search space; use --space lag$"
    ):
        find_preset("lag")


def test_a_question_is_plain_data_and_comes_back_equal():
    from search_spaces.search_space import Question

    for space in SPACES.values():
        stored = json.loads(json.dumps(space.asked.to_dict()))
        assert Question.from_dict(stored) == space.asked


def test_a_column_cannot_take_the_place_of_one_that_every_report_has():
    column = Column(name="reward", title="mine", metric="reward/train_mean")
    with pytest.raises(ValueError, match="the column reward is built in; choose another name"):
        SearchSpace(name="a", question="a", arms={"a": {}}, columns=(column,))


def test_a_space_without_arms_is_refused():
    with pytest.raises(ValueError, match="has no arm"):
        SearchSpace(name="a", question="a", arms={})
