"""Map a prompt index to a request for an engine."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

from grpo_trainable.config import GRPOConfig, schedule, shown
from grpo_trainable.models.hf.chat import chat_template
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.plugins import load
from grpo_trainable.protocol.rollout import Request, SamplingLimits
from grpo_trainable.tasks import (
    TASKS,
    Example,
    JSONValue,
    Prompt,
    ScoreRequest,
    Task,
    as_messages,
    as_text,
    eval_size,
    train_size,
)
from grpo_trainable.tasks.custom import CustomTask
from grpo_trainable.tasks.messages import last_text
from grpo_trainable.tasks.mix import MixTask, mixture_of
from grpo_trainable.tasks.stop_rules import interruption, stop_strings


def build_task(config: GRPOConfig) -> Task | MixTask:
    """Build the task of a trial. If the trial has several tasks, combine them into one.

    Raises:
        ValueError: If a file of the task is missing, empty or malformed, or if a user's class
            cannot be instantiated. The message is one line.
    """
    mixture = mixture_of(config)
    if mixture is not None:
        return MixTask({label: _build_one(part) for label, part in config.parts.items()}, mixture)
    return _build_one(config)


def _build_one(config: GRPOConfig) -> Task:
    task = config.task
    if task.is_custom:
        rewards = not config.env.plays
        return CustomTask(task.name, dict(task.own), config.seed, rewards=rewards)
    return load("task.name", TASKS[task.name])(task, config.seed)


class Prompts:
    """Requests and true answers for the examples of each stream, derived from the config alone.

    The stream `train` is endless. The stream `eval` consists of the held-out examples of the last
    evaluation. Every other evaluation uses the first `eval.prompts` examples of this stream.
    """

    def __init__(self, config: GRPOConfig, task: Task | MixTask, tokenizer: Tokenizer) -> None:
        """Check that the task and the tokenizer support the settings for prompts.

        Raises:
            ValueError: If the configured chat template, stop strings or interruption cannot be
                used. Also raised if the last evaluation would repeat a prompt, or if the task does
                not state its number of prompts although difficulty pools are enabled. The message
                is one line.
        """
        self.train_size = train_size(task)  # None if the task does not state its size
        if config.pools.enabled and self.train_size is None:
            raise ValueError(
                "pools.enabled=true: the task does not state its number of training prompts "
                "(train_size); set pools.enabled=false"
            )
        pooled = self.train_size if config.pools.enabled else None
        # Training draws only from the first `train_count` examples of the stream `train`.
        self.train_count = schedule.most_prompts(config) if pooled is None else pooled
        self._task = task
        self._tokenizer = tokenizer
        model = config.model
        self._chat = chat_template(model.chat_template, model.path, tokenizer, model.template_args)
        self._system, self._role = model.system, config.env.role
        if self._chat is not None and config.env.plays:
            self._chat.check_replies(self._role, self._system)
        self._group_size = {"train": config.rollout.group_size, "eval": config.eval.samples}
        rollout = config.rollout
        self._limits = {
            stream: SamplingLimits(
                min_new_tokens=rollout.min_new_tokens,
                max_new_tokens=rollout.max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                end_ids=tokenizer.end_ids_with(rollout.stop),
                stop_strings=stop_strings(config, tokenizer, task),
                interruption=interrupted,
            )
            for stream, temperature, top_p, interrupted in (
                ("train", rollout.temperature, 1.0, interruption(config, tokenizer)),
                ("eval", config.eval.temperature, config.eval.top_p, None),
            )
        }
        if config.eval.final_prompts is not None:
            _refuse_repeats(task, config.eval.final_prompts)
        self._eval_examples = task.eval_examples(schedule.held_out_prompts(config, final=True))

    def request(self, stream: str, prompt_index: int, example_index: int | None = None) -> Request:
        """Build the request for a prompt.

        Args:
            stream: `train` or `eval`.
            prompt_index: Index of the prompt in the stream.
            example_index: Index of the prompt's example, by default the prompt's index.

        Raises:
            ValueError: If the prompt cannot be encoded. The message is one line.
        """
        example = prompt_index if example_index is None else example_index
        return Request(
            stream=stream,
            prompt_index=prompt_index,
            example_index=example_index,
            prompt_ids=tuple(self._encode(self._example(stream, example).prompt)),
            group_size=self._group_size[stream],
            limits=self._limits[stream],
        )

    def text(self, stream: str, example: int) -> str:
        """Return the prompt as text, rendered by the chat template if there is one."""
        prompt = self._example(stream, example).prompt
        if self._chat is None:
            return as_text(prompt)
        return self._chat.render(as_messages(prompt, self._system))

    def said(self, stream: str, example: int) -> str:
        """Return a prompt's text, or the text of its last message, without the chat template."""
        return last_text(self._example(stream, example).prompt)

    def reply(self, text: str, action: Sequence[int]) -> tuple[int, ...]:
        """Encode an environment's answer to an action.

        Only `text` is encoded. The sampled ids stay as they are. In a conversation, a newline at
        the end of `text` is dropped, as it is at the end of a prompt.

        Args:
            text: The text that the policy reads next.
            action: Token ids that the policy sampled last.
        """
        if self._chat is None:
            return tuple(self._tokenizer.encode(text))
        text = text.removesuffix("\n")
        ids = self._chat.encode_reply(text, action, role=self._role, system=self._system)
        return tuple(ids)

    def ground_truth(self, stream: str, example: int) -> JSONValue:
        """Return the true answer of an example."""
        return self._example(stream, example).ground_truth

    def told(self, stream: str, example: int) -> tuple[str, str | None, JSONValue]:
        """Return the text of a prompt, its label (see `label`) and its true answer."""
        label, truth = self.label(stream, example), self.ground_truth(stream, example)
        return self.text(stream, example), label, truth

    def label(self, stream: str, example: int) -> str | None:
        """Return the label of an example's task, or None if the trial has a single task."""
        return self._task.label(stream, example) if isinstance(self._task, MixTask) else None

    def score_request(self, stream: str, example: int, ids: Sequence[int]) -> ScoreRequest:
        """Build the request to score a response to an example. `ids` are the response's tokens."""
        own = self._example(stream, example)
        return ScoreRequest(
            response=self._tokenizer.decode(ids),
            ground_truth=own.ground_truth,
            label=self.label(stream, example),
            example=example,
            prompt=own.prompt,
            columns=own.columns,
            token_ids=ids,
        )

    def check_lengths(
        self, stream: str, count: int, context_length: int, until: float = math.inf
    ) -> int:
        """Check that prompts and the longest allowed responses fit into a policy's context.

        Args:
            stream: `train` or `eval`.
            count: Number of prompts to check, starting with the first.
            context_length: Context of the policy, in tokens.
            until: Time (`time.monotonic`) after which no further prompt is checked. The first
                prompt is always checked.

        Returns:
            The number of prompts that were checked.

        Raises:
            ValueError: If a prompt does not fit. The message is one line that shows the prompt's
                text, or the text of its last message, without the chat template.
        """
        kind = {"train": "training", "eval": "held-out"}[stream]
        longest = self._limits[stream].max_new_tokens
        for index in range(count):
            if index and time.monotonic() > until:
                return index
            length = len(self.request(stream, index).prompt_ids)
            if length + longest <= context_length:
                continue
            prompt = f"the {kind} prompt {shown(self.said(stream, index))} takes {length}"
            context = f"the model's context is {context_length} tokens"
            if length >= context_length:
                raise ValueError(f"{context} and {prompt}, which leaves no room for a response")
            raise ValueError(
                f"rollout.max_new_tokens={longest}: {context} and {prompt}; valid: at most "
                f"{context_length - length}"
            )
        return count

    def _encode(self, prompt: Prompt) -> list[int]:
        if self._chat is not None:
            return self._chat.encode(as_messages(prompt, self._system))
        if not isinstance(prompt, str):
            raise ValueError(
                "model.chat_template=off: a prompt of the task is a list of messages, which needs "
                "a chat template; set model.chat_template to on or to a jinja file"
            )
        return self._tokenizer.encode_prompt(prompt)

    def _example(self, stream: str, example: int) -> Example:
        if stream == "eval":
            return self._eval_examples[example]
        return self._task.train_example(example)


def _refuse_repeats(task: Task | MixTask, prompts: int) -> None:
    """Reject a last evaluation with more prompts than are held out.

    Raises:
        ValueError: The number of held-out examples that a task states is too small.
    """
    if isinstance(task, MixTask):
        asked = Counter(task.label("eval", index) for index in range(prompts))
        wanted = [(own, asked[label], f" of {label}") for label, own in task.parts.items()]
    else:
        wanted = [(task, prompts, "")]
    for own, count, of in wanted:
        held_out = eval_size(own)
        if held_out is not None and count > held_out:
            raise ValueError(
                f"eval.final_prompts={prompts}: needs {count:,} held-out prompts{of}, but there "
                f"are only {held_out:,}; lower eval.final_prompts, and raise eval.samples for a "
                "more precise evaluation"
            )
