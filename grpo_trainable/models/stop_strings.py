"""Search for the sampled token that completes a stop string.

A token can complete a string only if the string ends inside the token. Such a token contains the
string, or begins with one of the string's suffixes. Few tokens do, and these tokens are known
beforehand. So only rows that have just sampled such a token are searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from grpo_trainable.models.tokenizer import Tokenizer


class StopStrings:
    """The strings after which a response ends, for one tokenizer.

    Responses and strings are sequences of bytes. A string may begin in the middle of one token and
    end in the middle of another.
    """

    def __init__(
        self,
        strings: Sequence[str],
        token_bytes: Sequence[bytes],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Prepare the search for `strings`.

        Args:
            strings: The stop strings.
            token_bytes: The bytes of each token of the tokenizer.
            vocab_size: Number of tokens in the policy's vocabulary. Tokens that the tokenizer lacks
                have no bytes.
            device: Device of `may_complete`.
        """
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
        """Return True if the last of the tokens completes a string."""
        last, before = self._token_bytes[ids[-1]], b""
        for index in reversed(ids[:-1]):
            if len(before) >= self._longest - 1:
                break
            before = self._token_bytes[index] + before
        text = before + last
        # Ignore strings that end before the last token. An earlier token completed them.
        return any(
            text.find(string, max(0, len(before) - len(string) + 1)) >= 0
            for string in self._strings
        )

    def first_completed(self, ids: Tensor, start: int = 0) -> int | None:
        """Return the index of the first token, from `start` on, that completes a string, or None.

        `ids` is (R,).
        """
        likely = self.may_complete[ids[start:]].nonzero()[:, 0] + start
        listed = ids.tolist()
        return next((t for t in likely.tolist() if self.completed(listed[: t + 1])), None)


@lru_cache(maxsize=4)
def stops_of(
    strings: tuple[str, ...], tokenizer: Tokenizer, vocab_size: int, device: torch.device
) -> StopStrings | None:
    """Return the search for these stop strings, or None if there are no strings.

    Raises:
        ValueError: The bytes of a token depend on other tokens.
    """
    return StopStrings(strings, tokenizer.token_bytes, vocab_size, device) if strings else None
