"""Where sampled tokens complete a stop string.

A token can complete a string only if the string ends inside it: the token contains the string, or
begins with an end of it. Few tokens do, and they are known beforehand, so only rows that have just
sampled one are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from grpo_trainable.models.tokenizer import Tokenizer


class StopStrings:
    """The strings after which a response ends, in terms of one tokenizer.

    A response is a sequence of bytes, and so is a string: it may begin in the middle of a token and
    end in the middle of another.
    """

    def __init__(
        self,
        strings: Sequence[str],
        token_bytes: Sequence[bytes],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """`token_bytes`: what each token of the tokenizer stands for; a policy of `vocab_size` may
        have more tokens, which stand for nothing."""
        self._strings = [string.encode() for string in strings]
        self._token_bytes = [*token_bytes, *[b""] * (vocab_size - len(token_bytes))]
        self._longest = max(map(len, self._strings))
        ends = tuple(s[-size:] for s in self._strings for size in range(1, len(s) + 1))
        self.may_complete = torch.tensor(  # (V,) bool
            [
                token.startswith(ends) or any(string in token for string in self._strings)
                for token in self._token_bytes
            ],
            device=device,
        )

    def completed(self, ids: Sequence[int]) -> bool:
        """Whether the last of the tokens completes a string."""
        last, before = self._token_bytes[ids[-1]], b""
        for index in reversed(ids[:-1]):
            if len(before) >= self._longest - 1:
                break
            before = self._token_bytes[index] + before
        text = before + last
        # One that lies before the last token was completed earlier.
        return any(
            text.find(string, max(0, len(before) - len(string) + 1)) >= 0
            for string in self._strings
        )

    def first_completed(self, ids: Tensor, start: int = 0) -> int | None:
        """Which of the tokens (R,), from number `start` on, is the first to complete a string."""
        likely = self.may_complete[ids[start:]].nonzero()[:, 0] + start
        listed = ids.tolist()
        return next((t for t in likely.tolist() if self.completed(listed[: t + 1])), None)


@lru_cache(maxsize=4)
def stops_of(
    strings: tuple[str, ...], tokenizer: Tokenizer, vocab_size: int, device: torch.device
) -> StopStrings | None:
    """The stop strings of a request's limits; None where it has none.

    Raises:
        ValueError: what a token of the tokenizer stands for depends on others.
    """
    return StopStrings(strings, tokenizer.token_bytes, vocab_size, device) if strings else None
