"""Print the reference for all keys: `python -m grpo_trainable.config > docs/config.md`."""

from grpo_trainable.config.describe import page

if __name__ == "__main__":
    print(page(), end="")
