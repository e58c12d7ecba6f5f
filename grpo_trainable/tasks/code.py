"""The task `code`: programming problems. Unit tests score the programs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from grpo_trainable.config import TaskSettings
from grpo_trainable.environments.sandbox import INSTALL, SandboxError, check_containment
from grpo_trainable.environments.unit_tests import count_tests, run_tests
from grpo_trainable.tasks.messages import is_text
from grpo_trainable.tasks.order import Rows, SplitTask
from grpo_trainable.tasks.prompt_files import note_on_shared, sources_in_files, split_files
from grpo_trainable.tasks.task import Example, JSONValue, Score

HUMANEVAL, MBPP = "HumanEval", "MBPP"
# The strings that end a completion: for HumanEval, the stop sequences of Codex (arXiv 2107.03374);
# for MBPP, the end mark of its prompt (arXiv 2108.07732).
STOPS = {HUMANEVAL: ("\nclass", "\ndef", "\n#", "\nif", "\nprint"), MBPP: ("[DONE]",)}
# EvalPlus uses these words in its prompts for chat models.
INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:"
)
BLOCK = re.compile(r"^[ \t]*```[^`\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


def parse_problem(row: Mapping[str, Any], *, in_block: bool, own_reward: bool = False) -> Example:
    """Return the prompt and the tests of a row in the layout of HumanEval or MBPP.

    The true answer has the `layout`, the `tests` and the `head`. The program consists of the head
    and the code in the response.

    Args:
        row: The row.
        in_block: True if the prompt asks for a code block, False if the response continues the
            prompt.
        own_reward: True if a user's reward function, which may read the row, scores responses.

    Raises:
        ValueError: If a field is missing or invalid.
    """
    if "test_list" in row:
        prompt, truth = _mbpp(row, in_block)
    elif "test" in row:
        prompt, truth = _humaneval(row, in_block)
    else:
        raise ValueError(
            "must have the fields `prompt`, `entry_point` and `test` (HumanEval), or `text` and "
            "`test_list` (MBPP)"
        )
    count_tests(truth["tests"])
    return Example(prompt, truth, row if own_reward else {})


def _humaneval(row: Mapping[str, Any], in_block: bool) -> tuple[str, dict[str, str]]:
    prompt, entry_point, test = (_text(row, name) for name in ("prompt", "entry_point", "test"))
    name = re.escape(entry_point)
    definition = re.search(rf"^(?:(?:async )?def|class) {name}\b", prompt, re.MULTILINE)
    if definition is None:
        raise ValueError(f"entry_point={entry_point}: `prompt` does not define this function")
    if not re.search(r"^def check\(", test, re.MULTILINE):
        raise ValueError("`test` must define the function check(candidate)")
    tests = f"{test.strip()}\n\ncheck({entry_point})\n"
    truth = {"layout": HUMANEVAL, "head": prompt, "tests": tests}
    if not in_block:
        return prompt, truth
    # The code block defines the entry point, so the head is only the part of the prompt before the
    # definition.
    truth["head"] = prompt[: definition.start()]
    return f"{INSTRUCTION}\n```python\n{prompt.strip()}\n```\n", truth


def _mbpp(row: Mapping[str, Any], in_block: bool) -> tuple[str, dict[str, str]]:
    text = _text(row, "text" if "text" in row else "prompt").strip()
    tests = _texts(row, "test_list")
    if not tests:
        raise ValueError("the field `test_list` must not be empty")
    set_up = row.get("test_setup_code") or ""
    if not isinstance(set_up, str):
        raise ValueError("the field `test_setup_code` must be text")
    source = "\n".join([*_texts(row, "test_imports"), set_up, *tests])
    truth = {"layout": MBPP, "head": "", "tests": f"{source.strip()}\n"}
    asserted = "\n".join(tests)
    if in_block:
        asked = f"{INSTRUCTION}\n{text}\nYour code should pass these tests:\n\n{asserted}\n"
        return asked, truth
    # The prompt from the paper on MBPP, without examples of solved problems.
    return (
        f"You are an expert Python programmer, and here is your task: {text} Your code should pass "
        f"these tests:\n\n{asserted}\n[BEGIN]\n"
    ), truth


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not is_text(value):
        raise ValueError(f"the field `{name}` must be non-empty text")
    return value


def _texts(row: Mapping[str, Any], name: str) -> list[str]:
    value = row.get(name) or []
    if not isinstance(value, list) or not all(map(is_text, value)):
        raise ValueError(f"the field `{name}` must be a list of texts")
    return value


def last_block(response: str) -> str | None:
    """Return the content of the last complete Markdown code block, or None if there is none.

    A block in a list is indented. The content loses this indentation.
    """
    blocks = BLOCK.findall(response)
    return textwrap.dedent(blocks[-1]) if blocks else None


def completion(response: str, stops: Sequence[str]) -> str:
    """Return a response up to the first of the strings that end it."""
    return response[: min((i for stop in stops if (i := response.find(stop)) >= 0), default=None)]


def unverified_score(response: str) -> Score:
    """Score a response whose tests gave no result in time. The response counts as wrong."""
    return Score(reward=0.0, format_reward=0.0, answer_reward=0.0, verified=False)


class CodeReward:
    """Scores responses as the task `code` does, without loading any problems."""

    def __init__(self, settings: TaskSettings) -> None:
        self._in_block = settings.code_in == "block"
        self._partial_credit = settings.partial_credit
        # On a busy machine, a program may run for three times its CPU time without missing the
        # deadline.
        self._cpu_s = int(settings.reward_deadline_s // 3)

    def warm_up(self) -> None:
        """Check that this machine can run the sandbox.

        Raises:
            ValueError: If the sandbox cannot run. The message is one line.
        """
        try:
            check_containment()
        except SandboxError as error:
            raise ValueError(
                f"task.name=code: cannot sandbox the code that the policy writes: {error}; "
                f"{INSTALL}"
            ) from None

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        """Score the program in a response by its unit tests.

        The reward is 1 if the program passes all tests. Otherwise, it is 0 or, with
        `task.partial_credit`, the share of passed tests. The format reward is 1 if there is a
        program that is valid Python.

        Raises:
            SandboxError: If this machine cannot run the sandbox.
        """
        assert isinstance(ground_truth, Mapping), ground_truth
        truth = {name: str(value) for name, value in ground_truth.items()}
        if self._in_block:
            code = last_block(response)
        else:
            code = completion(response, STOPS[truth["layout"]])
        if code is None:
            return Score(reward=0.0, format_reward=0.0, answer_reward=0.0)
        result = run_tests(truth["head"] + code, truth["tests"], cpu_s=self._cpu_s)
        passed_all = float(result.passed == result.count)
        reward = result.share if self._partial_credit else passed_all
        return Score(reward=reward, format_reward=float(result.compiled), answer_reward=reward)


class CodeTask(SplitTask[Rows]):
    """Programming problems from data files in the layouts of HumanEval and MBPP.

    All problems in `eval_file` are held out. Without `eval_file`, a hash of each prompt decides
    which problems in `train_file` are held out.

    Raises:
        ValueError: If a file is missing, empty or malformed. The message is one line.
    """

    def __init__(self, settings: TaskSettings, seed: int) -> None:
        assert settings.train_file is not None
        self._seed = seed
        self._reward = CodeReward(settings)
        self._files = settings.train_file, settings.eval_file
        in_block = settings.code_in == "block"
        self._train, self._heldout = split_files(
            *self._files,
            partial(parse_problem, in_block=in_block, own_reward=settings.reward is not None),
            strict=settings.strict,
        )
        self.stop = () if in_block else self._shared_stops()
        self.sources = sources_in_files(*self._files, "")

    def _shared_stops(self) -> tuple[str, ...]:
        """Return the strings that end a completion in every layout of the files.

        A string that ends completions in only one layout may occur within a right response to a
        problem in another layout.
        """
        rows = [*self._train.rows, *self._heldout.rows]
        first, *others = {STOPS[row.ground_truth["layout"]] for row in rows}  # pyright: ignore
        return () if others else first

    def notes(self) -> list[str]:
        """Return one line if some problems are both trained on and held out."""
        note = note_on_shared(self._train, self._heldout, *self._files)
        return [] if note is None else [note]

    def reward(self, response: str, ground_truth: JSONValue) -> Score:
        """Score a response as `CodeReward.reward` does."""
        return self._reward.reward(response, ground_truth)
