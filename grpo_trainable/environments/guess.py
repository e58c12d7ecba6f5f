"""A number to guess within a few turns: each wrong guess is told whether the number is larger."""

from __future__ import annotations

from grpo_trainable.environments.environment import JSONValue, Turn, fields_of

PROMPT = "Guess 0-9\n"
LARGER, SMALLER = "larger\n", "smaller\n"
GUESSES = 3  # three guesses find seven of ten numbers


class Guess:
    """`spec`: {"secret": a digit}. A guess is a digit on a line; anything else loses."""

    def reset(self, spec: JSONValue) -> str:
        (secret,) = fields_of(spec, "secret")
        self._secret, self._guesses = str(secret), 0
        return PROMPT

    def step(self, action: str) -> Turn:
        """1 for the number; the episode is over then, or after the last guess."""
        guess = action.strip()
        self._guesses += 1
        if guess == self._secret:
            return Turn(reward=1.0, done=True, info={"guesses": 1, "illegal": 0})
        illegal = len(guess) != 1 or guess not in "0123456789"
        info = {"guesses": 1, "illegal": int(illegal)}
        if illegal or self._guesses == GUESSES:
            return Turn(done=True, info=info)
        return Turn(LARGER if self._secret > guess else SMALLER, info=info)

    def close(self) -> None:
        """Holds nothing."""
