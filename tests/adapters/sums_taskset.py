"""A taskset for verifiers with three sums (0 + 9, 1 + 9, 2 + 9), each with a single reply."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def half(self, trace: vf.Trace) -> float:
        return len(trace.last_reply) / 2


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        for a in range(3):
            data = SumData(prompt=f"{a} + 9 = ?", system_prompt="Add.", answer=str(a + 9))
            yield SumTask(data, self.config.task)
