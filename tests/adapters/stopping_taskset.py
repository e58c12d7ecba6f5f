"""A taskset for verifiers whose task defines when an episode stops."""

import verifiers.v1 as vf

__all__ = ["StoppingTaskset"]


class StoppingTask(vf.Task[vf.TaskData]):
    @vf.stop
    async def over(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 0


class StoppingTaskset(vf.Taskset[StoppingTask, vf.TasksetConfig]):
    def load(self) -> list[StoppingTask]:
        return [StoppingTask(vf.TaskData(prompt="1 + 1 = ?"), self.config.task)]
