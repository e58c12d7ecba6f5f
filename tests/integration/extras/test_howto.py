"""Execute the pages of docs/howto/, and check every command line in README and docs.

A page may have these blocks:

    ```python title="my_reward.py"    a file, written to a directory for this page alone
    ```python                         executed in that directory, in the order of the page
    ```bash                           commands: those of tune.py and grpo-tune run with --dry-run,
                                      those of evaluate.py and align.py are parsed
    ```text                           output, which is not checked

A block below `<!-- not run: REASON -->` is not run.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

from grpo_trainable.environments.sandbox import SandboxError, check_containment
from grpo_trainable.generator import env_processes
from launch import align, evaluate, tune

ROOT = Path(__file__).resolve().parents[3]
HOWTO = sorted((ROOT / "docs" / "howto").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

LANGUAGES = {"python", "bash", "text", "json", "yaml"}
START = re.compile(r'```(?P<language>\w*)(?: title="(?P<title>[^"/\\]+)")?')
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None  # name of the file that the block writes
    code: str
    line: int  # number of its first line in the page
    run: bool = True


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order. Raise ValueError for an unknown fence."""
    found: list[Block] = []
    start: re.Match[str] | None = None
    begin, above = 0, ""
    lines = page.splitlines()
    for number, line in enumerate(lines, start=1):
        if start is None and line.lstrip().startswith("```"):
            start, begin = START.fullmatch(line), number + 1
            if start is None or start["language"] not in LANGUAGES:
                raise ValueError(f"line {number}: unknown form of a block: {line}")
        elif start is not None and line == "```":
            code = "\n".join(lines[begin - 1 : number - 1]) + "\n"
            run = NOT_RUN.fullmatch(above) is None
            found.append(Block(start["language"], start["title"], code, begin, run))
            start = None
        elif start is None:
            above = line
    if start is not None:
        raise ValueError(f"line {begin - 1}: a block without an end")
    return found


def commands(block: Block) -> list[list[str]]:
    """Return the command lines of a bash block as words, without their comments."""
    joined = block.code.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def try_command(words: list[str], try_tune: Callable[[list[str]], None]) -> None:
    """Check that our own commands exist and are valid. Other commands are not checked."""
    program, *arguments = words
    if program == "python" and arguments and arguments[0].endswith(".py"):
        assert (ROOT / arguments[0]).is_file(), f"no such command: {arguments[0]}"
        program, *arguments = arguments
    if program == "make":
        assert f"\n{arguments[0]}:" in (ROOT / "Makefile").read_text(), f"no target {arguments[0]}"
    for command in (align, evaluate):
        name = command.__name__.rpartition(".")[2]
        if program in (f"launch/{name}.py", f"grpo-{name}"):
            command.parse_arguments(arguments)
    # A resume needs an existing experiment, so it is not tried.
    if program in ("launch/tune.py", "grpo-tune") and "--resume" not in arguments:
        try_tune(arguments)


def planned(arguments: list[str]) -> None:
    """Check the settings of a command line. The files that it names may be missing."""
    args = tune.parse_arguments(arguments)
    if not args.list and args.settings is None:
        tune.plan_of(args)


def write_model(directory: Path) -> None:
    """Write a small model of the same family as the model that the pages name.

    The directory has the name of the pages' model on the hub, and is used instead of the hub.
    """
    pytest.importorskip("transformers")
    from hf_models import write_hf_model

    write_hf_model(directory, "qwen2", tied=True, max_position_embeddings=512)
    settings = directory / "tokenizer_config.json"
    content = {**json.loads(settings.read_text()), "chat_template": CHAT}
    settings.write_text(json.dumps(content))


def run_page(page: str, name: str, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Execute the blocks of a page in `directory`. All its python blocks share one namespace."""
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    module = types.ModuleType("howto_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = set(sys.modules)

    def checked(arguments: list[str]) -> None:
        storage = ["--storage", str(directory / "storage")]
        assert tune.main([*arguments, *storage, "--dry-run"]) == 0

    try:
        for block in blocks(page):
            if block.title is not None:
                (directory / block.title).write_text(block.code, encoding="utf-8")
            elif block.language == "python" and block.run:
                # With these empty lines, a traceback has the line numbers of the page.
                code = compile("\n" * (block.line - 1) + block.code, name, "exec")
                exec(code, module.__dict__)
            elif block.language == "bash" and block.run:
                for words in commands(block):
                    try_command(words, checked)
    finally:
        for added in set(sys.modules) - before:
            origin = getattr(sys.modules[added], "__file__", None)
            if origin is not None and Path(origin).is_relative_to(directory):
                del sys.modules[added]


def let_checks_pass_without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the check pass without bubblewrap: the episode of a dry run executes no code."""
    try:
        check_containment()
    except SandboxError:
        monkeypatch.setattr(env_processes, "check_containment", lambda: None)


def skip_without_bubblewrap() -> None:
    """Skip a page whose code runs programs if they cannot be contained here."""
    try:
        check_containment()
    except SandboxError as error:
        pytest.skip(f"code cannot be contained here: {error}")


@pytest.fixture
def ray_of_its_own():
    """End Ray before and after a page, because the page may start Ray as a user's program does."""
    ray.shutdown()
    yield
    ray.shutdown()


@pytest.mark.usefixtures("ray_of_its_own")
@pytest.mark.parametrize("path", HOWTO, ids=lambda path: path.stem)
def test_how_to_page_does_what_it_says(path, monkeypatch, tmp_path, capsys):
    page = path.read_text(encoding="utf-8")
    if MODEL in page:
        write_model(tmp_path / MODEL)
    if "env.name=python" in page:
        let_checks_pass_without_bubblewrap(monkeypatch)
    if "run_tests" in page:
        skip_without_bubblewrap()
    if "grpo_trainable.rllib" in page:
        pytest.importorskip("gymnasium", reason="needs the extra rllib")
    if "OptunaSearch" in page:
        pytest.importorskip("optuna", reason="needs the extra test-extras")
    run_page(page, str(path), monkeypatch, tmp_path)
    assert "report.py: warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if path not in HOWTO],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_command_lines_of_every_other_page_are_valid(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.language == "bash" and block.run:
            for words in commands(block):
                try_command(words, planned)


# ---- The harness itself ----------------------------------------------------------------------

GOOD = """\
Text.

```python title="mine.py"
def double(x):
    return 2 * x
```

```python
from mine import double
result = double(2)
```

<!-- not run: the machine of a test has no such thing -->
```python
import nothing_of_this_name
```

```python
assert result == 4
```

```bash
# one comment
python launch/tune.py --space async_vs_sync \\
    --set optim.lr=1e-4   # and another
tensorboard --logdir somewhere
make tune
```
"""


def test_a_page_writes_its_files_and_runs_its_blocks_in_order(monkeypatch, tmp_path):
    run_page(GOOD, "good.md", monkeypatch, tmp_path)
    assert (tmp_path / "mine.py").is_file()
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    ("right", "wrong", "error", "words"),
    [
        ("result == 4", "result == 5", AssertionError, None),
        ("from mine", "from theirs", ModuleNotFoundError, "theirs"),
        ("optim.lr", "optim.lrr", AssertionError, "assert 2 == 0"),
        ("launch/tune.py", "launch/tunes.py", AssertionError, "launch/tunes.py"),
        ("make tune", "make tuna", AssertionError, "tuna"),
        ("<!-- not run: the machine of a test has no such thing -->", "", ImportError, "nothing"),
        ("not run: the machine of a test has no such thing", "not run:", ImportError, "nothing"),
        ('```python title="mine.py"', "```python mine.py", ValueError, "line 3"),
        ("```python\nassert", "```pythn\nassert", ValueError, "pythn"),
    ],
)
def test_a_page_that_is_wrong_fails(right, wrong, error, words, monkeypatch, tmp_path):
    assert right in GOOD
    with pytest.raises(error, match=words and re.escape(words)):
        run_page(GOOD.replace(right, wrong, 1), "wrong.md", monkeypatch, tmp_path)


def test_a_failure_names_the_line_of_the_page(monkeypatch, tmp_path):
    page = GOOD.replace("result == 4", "result == 5")
    with pytest.raises(AssertionError) as caught:
        run_page(page, "wrong.md", monkeypatch, tmp_path)
    assert caught.traceback[-1].lineno == page.splitlines().index("assert result == 5")
