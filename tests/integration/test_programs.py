"""Programs of all kinds, scored by unit tests in the sandbox."""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import trial_config, wait_for
from test_sandbox import contained_processes

from grpo_trainable.config import GRPOConfig
from grpo_trainable.environments import sandbox
from grpo_trainable.environments.sandbox import SandboxError, check_containment
from grpo_trainable.environments.unit_tests import run_tests
from grpo_trainable.generator.scorer import check_reward, make_scorer, reward_apart
from grpo_trainable.protocol.round_records import SCHEMAS
from grpo_trainable.tasks import CodeReward, Score, ScoreRequest
from grpo_trainable.tasks.code import parse_problem
from grpo_trainable.tasks.prompts import build_task

ADD = {
    "text": "Write a function add(a, b).",
    "test_list": [
        *("assert add(1, 2) == 3", "assert add(0, 0) == 0"),
        *("assert add(-1, 1) == 0", "assert add(2, 2) == 4"),
    ],
}
RIGHT = "def add(a, b):\n    return a + b\n"


def before_return(statement: str) -> str:
    """Return the right program with `statement` before the `return` of its function."""
    return RIGHT.replace("return", f"{statement}; return")


# Name -> program, 1 if it is valid Python, number of tests of `ADD` that it passes.
PROGRAMS: dict[str, tuple[str, int, int]] = {
    "right": (RIGHT, 1, 4),
    "lambda": ("add = lambda a, b: a + b", 1, 4),
    "imports": ("import operator, math\nadd = operator.add", 1, 4),
    "future": (f"from __future__ import annotations\n{RIGHT}", 1, 4),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass Sum:\n    a: int\n    b: int\n"
        "def add(a, b):\n    s = Sum(a, b)\n    return s.a + s.b",
        *(1, 4),
    ),
    "class": ("class Sum:\n    def __call__(self, a, b): return a + b\nadd = Sum()", 1, 4),
    "main": (f"{RIGHT}if __name__ == '__main__':\n    1 / 0", 1, 4),
    "prints 10 MB": (f"print('x' * 10_000_000)\n{RIGHT}", 1, 4),
    "prints 10 MB in each test": (before_return("print(10**7 * str(a))"), 1, 4),
    "writes 10 MB": (f"import os\nos.write(1, bytes(10_000_000))\n{RIGHT}", 1, 4),
    "reads input": (f"try:\n    input()\nexcept EOFError:\n    pass\n{RIGHT}", 1, 4),
    "scratch": (f"open('a', 'w').write('kept')\nassert open('a').read()\n{RIGHT}", 1, 4),
    "sleeps a moment": (f"import time\ntime.sleep(0.01)\n{RIGHT}", 1, 4),
    # Wrong.
    "minus": ("def add(a, b): return a - b", 1, 1),
    "times": ("def add(a, b): return a * b", 1, 2),
    "zero": ("def add(a, b): return 0", 1, 2),
    "None": ("def add(a, b): pass", 1, 0),
    "raises": ("def add(a, b): raise ValueError", 1, 0),
    "raises for 2": ("def add(a, b):\n    assert a < 2\n    return a + b", 1, 3),
    "another name": ("def plus(a, b): return a + b", 1, 0),
    "interrupts": ("def add(a, b): raise KeyboardInterrupt", 1, 0),
    "recursion": ("def add(a, b): return add(a, b)", 1, 0),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b)",
        *(1, 0),
    ),
    "empty": ("", 1, 0),
    # Not valid Python.
    "colon": ("def add(a, b)\n    return a + b", 0, 0),
    "bracket": ("def add(a, b):\n    return (a + b", 0, 0),
    "prose": ("The sum of a and b.", 0, 0),
    "null byte": (f"{RIGHT}\0", 0, 0),
    "surrogate": (f"{RIGHT}'\ud800'", 0, 0),
    "nested": ("(" * 10_000 + ")" * 10_000, 0, 0),
    # These end early.
    "exit": ("import os\nos._exit(0)", 1, 0),
    "sys.exit": ("import sys\nsys.exit()", 1, 0),
    "sys.exit in test 1": (before_return("import sys; a == 0 and sys.exit()"), 1, 3),
    "exit in test 1": (before_return("import os; a == 0 and os._exit(0)"), 1, 1),
    "kills": ("import os\nos.kill(os.getpid(), 9)", 1, 0),
    # These do not end.
    "loop": ("while True: pass", 1, 0),
    "loop in test 1": ("def add(a, b):\n    while a == 0: pass\n    return a + b", 1, 1),
    "power": ("def add(a, b): return 9 ** 9 ** 9", 1, 0),
    "sleep": ("import time\ntime.sleep(1000)", 1, 0),
    "endless output": ("while True: print('x' * 1000)", 1, 0),
    # Bombs.
    "memory": ("x = bytearray(1 << 40)", 1, 0),
    "list": ("x = []\nwhile True: x += bytes(1 << 20)", 1, 0),
    "memory in test 2": ("def add(a, b):\n    a < 0 and bytes(1 << 40)\n    return a + b", 1, 3),
    "fork": ("import os\nwhile True: os.fork()", 1, 0),
    "forks in a loop": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        *(1, 0),
    ),
    "threads": ("import threading\nwhile True: threading.Thread(target=print).start()", 1, 0),
    "subprocess": ("import subprocess\nsubprocess.run(['sleep', '1000'])", 1, 0),
    # Files and network.
    "reads a file": (f"open('/etc/passwd').read()\n{RIGHT}", 1, 0),
    "writes a file": (f"open('/tmp/a', 'w').write('a')\n{RIGHT}", 1, 0),
    "large file": (f"open('a', 'wb').write(bytes(1 << 22))\n{RIGHT}", 1, 0),
    "network": (
        f"import socket\nsocket.create_connection(('127.0.0.1', 22))\n{RIGHT}",
        *(1, 0),
    ),
    "forges results": (
        "import os\nfor file in range(64):\n    try:\n        os.write(file, b'passed 0\\n')\n"
        "    except OSError:\n        pass",
        *(1, 0),
    ),
    "reads its own script": ("import os\nos.lseek(0, 0, 0)\nassert os.read(0, 10)", 1, 0),
}


@pytest.fixture(scope="module", autouse=True)
def contained() -> None:
    try:
        check_containment()
    except SandboxError as error:
        pytest.skip(f"code cannot be contained here: {error}")


def config(train_file: str = "/p", **task: Any) -> GRPOConfig:
    given = {"name": "code", "train_file": train_file, "reward_deadline_s": 6, **task}
    return GRPOConfig.from_dict({"task": given})


TRUTH = parse_problem(ADD, in_block=False).ground_truth


def test_every_kind_of_program_has_its_score_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "LOOK_S", 0.5)
    binary, graded = CodeReward(config().task), CodeReward(config(partial_credit=True).task)
    monkeypatch.setattr(graded, "_cpu_s", 1)
    programs = {name: program for name, (program, *_) in PROGRAMS.items()}
    with ThreadPoolExecutor(2) as pool:
        scores = pool.map(lambda program: graded.reward(program, TRUTH), programs.values())
        found = dict(zip(programs, scores, strict=True))
    expected = {
        name: Score(passed / 4, float(compiled), passed / 4)
        for name, (_, compiled, passed) in PROGRAMS.items()
    }
    assert found == expected
    for name, reward in (("right", 1.0), ("times", 0.0)):
        assert binary.reward(programs[name], TRUTH).reward == reward
    wait_for(lambda: not contained_processes(), 60.0)


def test_a_test_that_fails_once_in_a_loop_fails() -> None:
    tests = "for i in range(3):\n    assert f(i) < 2\nif f(9) == 0:\n    assert f(1) == 1\n"
    result = run_tests("def f(i): return i", tests)
    assert (result.passed, result.count) == (0, 2)
    assert run_tests("def f(i): return i % 2", tests).passed == 1
    assert run_tests("def f(i): return i % 9", tests).passed == 1


def test_random_numbers_and_the_order_of_sets_are_the_same_in_every_run() -> None:
    program = "import random\nparts = [random.random(), *{*'abcdefgh'}]"
    tests = "\n".join(f"assert hash(str(parts)) >> {bit} & 1" for bit in range(64))
    assert run_tests(program, tests) == run_tests(program, tests)


def test_an_error_outside_the_asserts_fails_a_test() -> None:
    raises = "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\n"
    right = "def f(i):\n    if i < 0: raise ValueError\n    return i"
    for tests in (f"assert f(1) == 1\n{raises}", f"{raises}assert f(1) == 1\n"):
        assert run_tests(right, tests).share == 1
        assert run_tests("def f(i): return i", tests).share == 0
    assert run_tests("def f(i): return 1 / i", "assert f(1) == 1\nf(0)").passed == 0


def test_a_block_uses_the_imports_and_the_functions_of_the_prompt() -> None:
    row = {
        "prompt": "import math\ndef half(x):\n    return x / 2\ndef area(d):\n    '''Area.'''\n",
        "entry_point": "area",
        "test": "def check(candidate):\n    assert candidate(4) > half(24)\n",
    }
    truth = parse_problem(row, in_block=True).ground_truth
    reward = CodeReward(config(code_in="block").task)
    said = "Here:\n```python\ndef area(d):\n    return math.pi * half(d) ** 2\n```\n"
    assert reward.reward(said, truth) == Score(1.0, 1.0, 1.0)
    assert reward.reward("```python\nother = 1\n```", truth) == Score(0.0, 1.0, 0.0)
    continued = parse_problem(row, in_block=False).ground_truth
    said = "    return math.pi * half(d) ** 2\n\nprint("
    assert CodeReward(config().task).reward(said, continued) == Score(1.0, 1.0, 1.0)


def test_reward_processes_score_programs_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    file = tmp_path / "problems.jsonl"
    file.write_text("\n".join(json.dumps({**ADD, "text": f"Add {i}."}) for i in range(20)))
    trial = config(str(file), reward_deadline_s=60)
    names = ("right", "fork", "memory", "exit", "colon")
    requests = [ScoreRequest(PROGRAMS[name][0], TRUTH) for name in names]
    with closing(make_scorer(trial, build_task(trial))) as scorer:
        right, wrong, invalid = Score(1.0, 1.0, 1.0), Score(0.0, 1.0, 0.0), Score(0.0, 0.0, 0.0)
        assert scorer.score(requests) == [right, wrong, wrong, wrong, invalid]
        with ThreadPoolExecutor(1) as pool:
            asleep = pool.submit(scorer.score, [ScoreRequest(PROGRAMS["sleep"][0], TRUTH)])
            wait_for(contained_processes, 60.0)
            scorer.close()
            asleep.result()
    wait_for(lambda: not contained_processes(), 60.0)
    assert not list(temporary.iterdir())


def test_a_machine_without_bubblewrap_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory() as empty:
        monkeypatch.setenv("PATH", empty)
        with pytest.raises(ValueError, match=r"^task\.name=code: cannot sandbox the code") as no:
            check_reward(*reward_apart(config()))
    assert "bubblewrap is not installed; install bubblewrap 0.8 or later" in str(no.value)
    assert "\n" not in str(no.value)


def test_a_trial_scores_the_programs_of_its_responses(begun: Any, tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    problem = {
        "prompt": "def add(a, b):\n",
        "entry_point": "add",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    }
    file.write_text(json.dumps(problem))
    data = trial_config(placement="colocated", rounds=1, eval={"every": 1, "prompts": 1})
    data["task"] = {"name": "code", "train_file": str(file), "eval_file": str(file)}
    trial = begun(data)
    row = trial.train()
    assert (row["count/reward_errors"], row["count/unverified"]) == (0, 0)
    assert row["reward/train_mean"] == row["reward/answer_mean"] == 0
    table = pa.Table.from_pydict(row.details.rollouts, SCHEMAS["rollouts"]).to_pylist()
    assert json.loads(table[0]["ground_truth"])["layout"] == "HumanEval"
