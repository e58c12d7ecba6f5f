"""The environment `python`: a question, and a Python interpreter for the policy's code.

If an action contains code in `<python>` tags, the code runs and its output becomes the observation.
Any other action is the answer.
"""

from __future__ import annotations

import re

from grpo_trainable.environments.environment import JSONValue, Turn, fields_of
from grpo_trainable.environments.sandbox import run_python, run_uncontained

CODE = re.compile(r"<python>(.*?)</python>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class PythonTool:
    """Environment that runs code in a sandbox.

    An episode's specification is {"question": PROMPT, "answer": TEXT}. Set `rollout.stop` to
    `</python>` and `</answer>`, so that these strings end an action.
    """

    run = staticmethod(run_python)

    def reset(self, spec: JSONValue) -> str:
        """Begin an episode and return the question."""
        question, answer = fields_of(spec, "question", "answer")
        self._answer = str(answer).strip()
        return str(question)

    def step(self, action: str) -> Turn:
        """Run the last code block of an action.

        An action without code is an answer. The right answer earns reward 1. The answer is the text
        in `<answer>` tags or, without such tags, the whole action.
        """
        codes = CODE.findall(action)
        if codes:
            return Turn(f"<output>{self.run(codes[-1])}</output>\n", info={"calls": 1})
        answers = ANSWER.findall(action)
        given = answers[-1] if answers else action
        return Turn(reward=float(given.strip() == self._answer), done=True, info={"calls": 0})

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


class UnsafePythonTool(PythonTool):
    """`PythonTool` without a sandbox, for `env.allow_unsafe=true`.

    The code can do everything that the trainer can do.
    """

    run = staticmethod(run_uncontained)
