"""The environment `guess`: a secret digit, with the hints "larger" and "smaller"."""

from __future__ import annotations

from grpo_trainable.environments.environment import JSONValue, Turn, fields_of

PROMPT = "Guess 0-9\n"
LARGER, SMALLER = "larger\n", "smaller\n"
GUESSES = 3  # three guesses can find at most seven of the ten digits


class Guess:
    """Environment with a digit to guess.

    An episode's specification is {"secret": DIGIT}. An action is a single digit. Any other action
    loses.
    """

    def reset(self, spec: JSONValue) -> str:
        """Begin an episode and return the prompt."""
        (secret,) = fields_of(spec, "secret")
        self._secret, self._guesses = str(secret), 0
        return PROMPT

    def step(self, action: str) -> Turn:
        """Give reward 1 for the secret digit. A correct, illegal or last guess ends the episode."""
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
        """Do nothing: there are no resources to release."""
