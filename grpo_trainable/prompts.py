"""Which prompt an index stands for, as a request that an engine understands."""

from __future__ import annotations

from grpo_trainable.config import GRPOConfig, shown
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.rollout import Request, SamplingLimits
from grpo_trainable.tasks import TASKS, JSONValue, Task
from grpo_trainable.tasks.custom import CustomTask


def build_task(config: GRPOConfig) -> Task:
    """The task of a trial.

    Raises:
        ValueError: a file of the task is missing, empty or malformed, or a user's class cannot be
            made, in one line.
    """
    task = config.task
    if task.is_custom:
        return CustomTask(task.name, dict(task.own), config.seed)
    return TASKS[task.name](task, config.seed)


class Prompts:
    """Requests and ground truths by (stream, prompt_index): a pure function of the config.

    Stream `train` is endless; stream `eval` holds the same `eval.prompts` held-out ones always.
    """

    def __init__(self, config: GRPOConfig, task: Task, tokenizer: Tokenizer) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._group_size = {"train": config.rollout.group_size, "eval": config.eval.samples}
        rollout = config.rollout
        self._limits = {
            stream: SamplingLimits(
                min_new_tokens=rollout.min_new_tokens,
                max_new_tokens=rollout.max_new_tokens,
                temperature=temperature,
            )
            for stream, temperature in (
                ("train", rollout.temperature),
                ("eval", config.eval.temperature),
            )
        }
        self._eval_examples = task.eval_examples(config.eval.prompts)

    def request(self, stream: str, prompt_index: int) -> Request:
        return Request(
            stream=stream,
            prompt_index=prompt_index,
            prompt_ids=tuple(self._tokenizer.encode(self.text(stream, prompt_index))),
            group_size=self._group_size[stream],
            limits=self._limits[stream],
        )

    def text(self, stream: str, prompt_index: int) -> str:
        return self._example(stream, prompt_index).prompt

    def ground_truth(self, stream: str, prompt_index: int) -> JSONValue:
        return self._example(stream, prompt_index).ground_truth

    def check_lengths(self, stream: str, count: int, context_length: int) -> None:
        """Compares the first `count` prompts of a stream and their longest responses with the
        context of a policy.

        Raises:
            ValueError: one does not fit, in a line that shows the prompt.
        """
        longest = self._limits[stream].max_new_tokens
        for index in range(count):
            length = len(self.request(stream, index).prompt_ids)
            if length + longest <= context_length:
                continue
            prompt = f"the prompt {shown(self.text(stream, index))} takes {length}"
            context = f"the model's context is {context_length} tokens"
            if length >= context_length:
                raise ValueError(f"{context} and {prompt}, which leaves none for a response")
            raise ValueError(
                f"rollout.max_new_tokens={longest}: {context} and {prompt}; valid: at most "
                f"{context_length - length}"
            )

    def _example(self, stream: str, prompt_index: int):
        if stream == "eval":
            return self._eval_examples[prompt_index]
        return self._task.train_example(prompt_index)
