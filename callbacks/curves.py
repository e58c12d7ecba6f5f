"""What callbacks remember of every trial's rounds."""

from __future__ import annotations

from array import array
from typing import Any


class Curves:
    """Rows of numbers a trial, ascending in their first column, the iteration.

    Kept as flat arrays: Tune takes a snapshot of every callback's state each second.
    """

    def __init__(self, *columns: str) -> None:
        self.columns = ("iteration", *columns)
        self._values: dict[str, array[float]] = {}

    def add(self, trial_id: str, iteration: int, *values: float) -> None:
        assert len(values) == len(self.columns) - 1
        self._values.setdefault(trial_id, array("d")).extend((iteration, *values))

    def cut(self, trial_id: str, last: int) -> range:
        """Forgets the rows after iteration `last`, from which the trial goes on.

        Returns the iterations up to it that come after the last row: Tune's snapshot of this state
        may be older than the checkpoint.
        """
        width = len(self.columns)
        values = self._values.get(trial_id, array("d"))
        while len(values) and values[-width] > last:
            del values[-width:]
        return range(int(values[-width]) + 1 if len(values) else 1, last + 1)

    def last(self, trial_id: str) -> tuple[float, ...] | None:
        values = self._values.get(trial_id)
        return tuple(values[-len(self.columns) :]) if values else None

    def rows(self, trial_id: str) -> list[tuple[float, ...]]:
        values, width = self._values.get(trial_id, array("d")), len(self.columns)
        return [tuple(values[i : i + width]) for i in range(0, len(values), width)]

    def get_state(self) -> dict[str, Any]:
        return {"columns": self.columns, "values": dict(self._values)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._values = dict(state["values"])
