"""What a report needs to know of a search space, stored with the experiment that asked it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from search_spaces.columns import Column

MAX_FACTOR = 1e38  # times a metric it is still a number


@dataclass(frozen=True, kw_only=True)
class Question:
    text: str  # one line
    arms: Sequence[str]  # sorted as in tables
    columns: Sequence[Column]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        columns = [asdict(column) for column in self.columns]
        return {"text": self.text, "arms": list(self.arms), "columns": columns}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Question:
        """The question that `to_dict` wrote, of an experiment that may come from anybody.

        Raises:
            ValueError: it is not one, in one line.
        """
        try:
            columns = tuple(Column(**column) for column in data["columns"])
            arms = tuple(data["arms"])
            texts = (data["text"], *arms)
            texts += tuple(text for c in columns for text in (c.name, c.title))
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("a text is something else")
            if not all(isinstance(column.factor, int | float) for column in columns):
                raise TypeError("a factor is no number")
            if not all(abs(column.factor) < MAX_FACTOR for column in columns):
                raise TypeError(f"a factor is not below {MAX_FACTOR:g}")
            return cls(text=data["text"], arms=arms, columns=columns)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a question ({type(error).__name__}: {error})") from None
