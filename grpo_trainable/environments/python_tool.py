"""A question with a Python interpreter at hand: code in `<python>` tags is run and answered with
what it prints, any other action is the answer."""

from __future__ import annotations

import re

from grpo_trainable.environments.environment import JSONValue, Turn, fields_of
from grpo_trainable.environments.sandbox import run_python, run_uncontained

CODE = re.compile(r"<python>(.*?)</python>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class PythonTool:
    """`spec`: {"question": the prompt, "answer": what is right}.

    Stop actions at `</python>` and `</answer>` (`rollout.stop`).
    """

    run = staticmethod(run_python)

    def reset(self, spec: JSONValue) -> str:
        question, answer = fields_of(spec, "question", "answer")
        self._answer = str(answer).strip()
        return str(question)

    def step(self, action: str) -> Turn:
        """1 for the right answer, in tags or by itself; the last code of an action is run."""
        codes = CODE.findall(action)
        if codes:
            return Turn(f"<output>{self.run(codes[-1])}</output>\n", info={"calls": 1})
        answers = ANSWER.findall(action)
        given = answers[-1] if answers else action
        return Turn(reward=float(given.strip() == self._answer), done=True, info={"calls": 0})

    def close(self) -> None:
        """Holds nothing."""


class UnsafePythonTool(PythonTool):
    """The same, for `env.allow_unsafe=true`: the code can do all that the trainer may do."""

    run = staticmethod(run_uncontained)
