"""A user's engine, loss and advantage are checked in a separate process."""

from __future__ import annotations

import os
import re

import pytest

from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.user_code import check_user_code
from grpo_trainable.plugins import PluginError

ENGINE = """\
import os
from pathlib import Path
Path(__file__).with_name("pid").write_text(str(os.getpid()))
class Mine: ...
"""


@pytest.fixture
def checked(tmp_path):
    """Return a function that checks an engine with the given source, and returns its setting."""

    def check(source: str, name: str = "Mine") -> str:
        (tmp_path / "mine.py").write_text(source)
        reference = f"{tmp_path}/mine.py:{name}"
        check_user_code(GRPOConfig.from_dict({"engine": reference}))
        return reference

    return check


@pytest.mark.slow
def test_an_engine_is_imported_in_a_process_of_its_own(checked, tmp_path):
    checked(ENGINE)
    assert int((tmp_path / "pid").read_text()) != os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        (
            "raise RuntimeError('no\\nserver')",
            "Mine",
            "cannot be imported: RuntimeError: no server",
        ),
        (ENGINE, "Mind", "no attribute 'Mind'; did you mean Mine? it has Mine"),
        ("import os\nos._exit(3)", "Mine", "ended the process with status 3"),
    ],
)
def test_a_mistake_in_it_is_one_line_that_names_it(checked, tmp_path, source, name, reason):
    with pytest.raises(PluginError, match=re.escape(reason)) as caught:
        checked(source, name)
    assert str(caught.value).startswith(f"engine={tmp_path}/mine.py:{name}: ")
    assert "\n" not in str(caught.value)


def test_what_ships_is_not_tried(monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a process was started"))
    check_user_code(GRPOConfig())
