"""Choose the example of each prompt. Examples of prompts that were given up come first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class RequeuedPrompts:
    """Chooses the example of each new prompt. Examples of prompts that were given up come first.

    Without requeued prompts, the example of a prompt has the prompt's index. A requeued example
    gets the next new prompt index, so its random draws differ from those of the first attempt. All
    later examples are delayed by one prompt, so no example is passed over.

    Example: prompts 0 to 3 have the examples 0 to 3. Prompt 1 is given up. Then prompt 4 has
    example 1, and prompt 5 has example 4.
    """

    def __init__(self, next_example: int = 0) -> None:
        """Create a record without requeued examples.

        Args:
            next_example: The first example that no prompt has had yet.
        """
        self._next_example = next_example
        self._waiting: list[int] = []  # requeued examples that have no new prompt index yet
        # Prompt index -> its example, until a round has reported the prompt.
        self._examples: dict[int, int] = {}
        self._second: set[int] = set()  # indices of the prompts that are sampled a second time

    @property
    def waiting(self) -> int:
        """Number of requeued examples that have no new prompt index yet."""
        return len(self._waiting)

    def pick(self, prompt_indices: Sequence[int]) -> list[int]:
        """Return the example of each prompt. A repeated call returns the same examples."""
        for index in prompt_indices:
            if index not in self._examples:
                self._examples[index] = self._pick(index)
        return [self._examples[index] for index in prompt_indices]

    def _pick(self, prompt_index: int) -> int:
        if self._waiting:
            self._second.add(prompt_index)
            return self._waiting.pop(0)
        self._next_example += 1
        return self._next_example - 1

    def are_new(self, prompt_indices: Iterable[int]) -> bool:
        """Return True if none of the prompts has an example that was given up before."""
        return self._second.isdisjoint(prompt_indices)

    def requeue(self, prompt_indices: Iterable[int]) -> None:
        """Give the examples of these prompts to the next new prompts."""
        self._waiting += [self._examples.pop(index) for index in prompt_indices]

    def settle(self, prompt_indices: Iterable[int]) -> list[int]:
        """Forget the prompts that a round reports, and return their examples."""
        indices = list(prompt_indices)
        self._second.difference_update(indices)
        return [self._examples.pop(index) for index in indices]

    # ---- Checkpoints -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return {
            "next_example": self._next_example,
            "waiting": list(self._waiting),
            "examples": [list(item) for item in sorted(self._examples.items())],
            "second": sorted(self._second),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._next_example = state["next_example"]
        self._waiting = list(state["waiting"])
        self._examples = dict(state["examples"])
        self._second = set(state["second"])
