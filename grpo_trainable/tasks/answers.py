r"""Find the answer in a response: between tags after the reasoning, or in \boxed{}."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from grpo_trainable.config import TaskSettings
from grpo_trainable.tasks.task import Score
from grpo_trainable.tasks.templates import asks_for_tags, template_text
from grpo_trainable.tasks.votes import Spell, canonical

ANSWER_OPENS = "</think> <answer>"
ANSWER_CLOSES = "</answer>"

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\s])")


def tagged_answer(response: str) -> str | None:
    """Return the text from the last `</think> <answer>` to `</answer>`.

    Return None if either string is missing.
    """
    _, opened, rest = response.rpartition(ANSWER_OPENS)
    answer, closed, _ = rest.partition(ANSWER_CLOSES)
    return answer.strip() if opened and closed else None


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last box, or None if there is no box or the last one is open.

    A box is `\boxed{…}`, `\fbox{…}` or `\boxed 5`.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    rest = text[boxes[-1].end() :].lstrip()
    if not rest.startswith("{"):
        word = re.match(r"[^\s${}]+", rest)
        return word[0] if word else None
    depth = 0
    for end, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:end].strip()
    return None


@dataclass(frozen=True)
class AnswerForm:
    """Required form of the answer. A response without an answer in this form earns nothing."""

    find: Callable[[str], str | None]  # returns the answer in a response, or None
    stop: tuple[str, ...]  # strings that end a response

    def judged(
        self,
        response: str,
        judge: Callable[[str], float],
        *,
        truth: str | None,
        spell: Spell = lambda formula: None,
    ) -> Score:
        """Score a response with the reward that `judge` gives its answer.

        In a majority vote, every spelling of a right answer counts as a vote for `truth`. Any
        other answer counts as a vote for its own canonical text.

        Args:
            response: The text of the response.
            judge: Returns the reward for an answer. A right answer gets 1.
            truth: The true answer, or None if it is unknown.
            spell: Returns a canonical spelling of a formula, or None.
        """
        answer = self.find(response)
        if answer is None:
            return Score(reward=0.0, format_reward=0.0, answer_reward=0.0)
        right = judge(answer)
        of_truth = truth if right == 1.0 else None
        voted = canonical(of_truth) if of_truth is not None else canonical(answer, spell)
        return Score(reward=right, format_reward=1.0, answer_reward=right, answer=voted)

    def unverified(self, response: str) -> Score:
        """Score a response whose answer could not be judged. The answer counts as wrong."""
        answer = self.find(response)
        return Score(
            reward=0.0,
            format_reward=float(answer is not None),
            answer_reward=0.0,
            verified=False,
            answer=None if answer is None else canonical(answer),
        )


TAGS = AnswerForm(tagged_answer, stop=(ANSWER_CLOSES,))
BOXED = AnswerForm(boxed_answer, stop=())


def form_note(settings: TaskSettings) -> str | None:
    """Return a note if the prompt template does not request answers in the expected form.

    Raises:
        ValueError: If the template file cannot be read.
    """
    text = template_text(settings.template)
    if answer_form(settings) is TAGS:
        asks, wanted = asks_for_tags(text), f"{ANSWER_OPENS}…{ANSWER_CLOSES}"
    else:
        asks, wanted = "boxed" in text, r"\boxed{}"
    if asks:
        return None
    return (
        f"note: task.template={settings.template} does not ask for an answer in {wanted}, so a "
        "model earns nothing unless it puts its answer there without being asked "
        "(docs/howto/math.md)"
    )


def answer_form(settings: TaskSettings) -> AnswerForm:
    """Return the form of answers that `task.answer_in` sets. `auto` derives it from the template.

    Raises:
        ValueError: If the template file cannot be read.
    """
    if settings.answer_in == "auto":
        return TAGS if asks_for_tags(template_text(settings.template)) else BOXED
    return TAGS if settings.answer_in == "tags" else BOXED
