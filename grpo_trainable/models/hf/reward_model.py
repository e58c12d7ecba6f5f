"""Reward models: classifiers from `transformers` with a single output (extra `hf`).

B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from grpo_trainable.models.hf.chat import Messages, with_fixed_date
from grpo_trainable.models.hf.directory import refuse_missing_library, weight_shapes
from grpo_trainable.models.hf.json_files import context_length, text_config
from grpo_trainable.plugins import one_line

# Maximum number of tokens in one forward pass, padding included. A longer row is run alone.
BATCH_TOKENS = 1 << 14


class RewardModel:
    """A sequence classifier with one label, and its tokenizer. The label's logit is the reward.

    The model computes in float32, so that padding changes a reward only by rounding.
    """

    def __init__(self, directory: Path) -> None:
        """Read the small files, and check that the weights include a head with one output.

        `load` reads the weights.

        `refuse_other_than_reward_model` must have accepted the directory.

        Raises:
            ValueError: The directory holds no reward model, or a library is missing. The message is
                one line that begins with the directory.
        """
        self._directory = directory
        self._config = self._read(transformers.AutoConfig)
        self._tokenizer: Any = self._read(transformers.AutoTokenizer)
        _refuse_other_outputs(directory, self._config)
        self._context = context_length(text_config(directory))
        self._pad_id: int | None = self._config.get_text_config().pad_token_id
        template = self._tokenizer.chat_template
        self.has_chat_template = template is not None
        if template is not None:
            refuse_missing_library(str(directory), "jinja2")
            self._template = with_fixed_date(self._tokenizer.get_chat_template())
        self._model: Any = None

    def _read(self, kind: Any) -> Any:
        try:
            return kind.from_pretrained(
                self._directory, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # transformers has no common error class
            raise _unreadable(self._directory, error) from error

    def load(self) -> None:
        """Read the weights, and move them to the GPU if this process sees one.

        Raises:
            ValueError: The weights cannot be read, or some are missing. The message is one line.
        """
        transformers.utils.logging.disable_progress_bar()
        try:
            model, told = transformers.AutoModelForSequenceClassification.from_pretrained(
                self._directory,
                config=self._config,
                dtype=torch.float32,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # transformers and safetensors have no common error class
            raise _unreadable(self._directory, error) from error
        # `transformers` would fill missing weights with random numbers and continue.
        lacking = sorted(told["missing_keys"])
        if lacking:
            raise ValueError(
                f"{self._directory}: the weights lack {lacking[0]} ({len(lacking)} missing)"
            )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.eval().requires_grad_(False).to(device)

    def scores(self, prompt: str | Messages, responses: Sequence[str]) -> list[float]:
        """Return the reward of each response to a prompt. Call `load` first.

        Args:
            prompt: Text, or messages for the chat template.
            responses: Texts of the responses.

        Raises:
            ValueError: A row is longer than the context of the model.
        """
        rows = [self._encode(prompt, response) for response in responses]
        longest = max(map(len, rows))
        if self._context is not None and longest > self._context:
            raise ValueError(
                f"a prompt and its response have {longest} tokens, but the reward model has a "
                f"context of {self._context}"
            )
        scores = [0.0] * len(rows)
        for batch in self._batches(rows):
            for i, score in zip(batch, self._forward([rows[i] for i in batch]), strict=True):
                scores[i] = score
        return scores

    def _encode(self, prompt: str | Messages, response: str) -> list[int]:
        """Return the ids of a conversation, or of a text followed by the end-of-text token."""
        if not isinstance(prompt, str):
            return self._tokenizer.apply_chat_template(
                [*prompt, {"role": "assistant", "content": response}],
                chat_template=self._template,
                return_dict=True,
            )["input_ids"]
        ids = self._tokenizer(prompt + response)["input_ids"]
        end = self._tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def _batches(self, rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield the row indices of each batch.

        The rows of a batch have similar lengths, and at most `BATCH_TOKENS` tokens together.
        Without a padding token, `transformers` cannot find the end of a row in a batch, so each row
        is yielded alone.
        """
        batch: list[int] = []
        for i in sorted(range(len(rows)), key=lambda i: len(rows[i])):
            full = (len(batch) + 1) * len(rows[i]) > BATCH_TOKENS
            if batch and (full or self._pad_id is None):
                yield batch
                batch = []
            batch.append(i)
        yield batch

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        device = self._model.device
        ids = [torch.tensor(row, device=device) for row in rows]
        padding = 0 if self._pad_id is None else self._pad_id  # 0: a single row has no padding
        logits = self._model(
            input_ids=pad_sequence(ids, batch_first=True, padding_value=padding),  # (B, S)
            attention_mask=pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        ).logits
        return logits[:, 0].tolist()


def _refuse_other_outputs(directory: Path, config: Any) -> None:
    """Check that the stored weights include a head with one output."""
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForSequenceClassification.from_config(config)
    except Exception as error:  # transformers has no common error class
        raise _unreadable(directory, error) from error
    body = f"{model.base_model_prefix}."
    head = {k: tuple(v.shape) for k, v in model.named_parameters() if not k.startswith(body)}
    stored = weight_shapes(directory)
    lacking = sorted(head.keys() - stored.keys())
    if lacking:
        raise ValueError(
            f"{directory}: the weights lack {lacking[0]}, the head of a classifier; train a reward "
            "model first, or name the directory of one"
        )
    if config.num_labels != 1:
        raise ValueError(
            f"{directory}: the classifier has {config.num_labels} labels, but a reward model has "
            "one (num_labels=1)"
        )
    other = sorted(name for name, shape in head.items() if stored[name] != shape)
    if other:
        raise ValueError(
            f"{directory}: {other[0]} has the shape {stored[other[0]]}, but config.json requires "
            f"{head[other[0]]}"
        )


def _unreadable(directory: Path, error: Exception) -> ValueError:
    return ValueError(f"{directory}: transformers cannot read it ({one_line(error)})")
