"""A fake Hugging Face hub for tests. Its models consist of small local files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_trainable.models.hf import files, json_files


class FakeHub:
    """Replaces the hub until `monkeypatch` is undone."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fetched: list[str] = []
        self._directory = directory
        self._models: dict[str, Path] = {}
        monkeypatch.setattr(files, "local_directory", self._fetch)
        monkeypatch.setattr(json_files, "downloaded", self._downloaded)

    def add(self, name: str, **tokenizer: str) -> None:
        """Add a model. `tokenizer` holds the entries of its tokenizer_config.json."""
        directory = self._models[name] = self._directory / name.replace("/", "--")
        directory.mkdir(parents=True)
        (directory / "config.json").write_text('{"model_type": "llama"}')
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))

    def _fetch(self, name: str, *, weights: bool = True) -> Path:
        if name not in self._models:
            raise files.NotOnTheHub(f"{name}: no such directory, and it cannot be downloaded")
        self.fetched.append(name)
        return self._models[name]

    def _downloaded(self, name: str) -> Path | None:
        return self._models[name] if name in self.fetched else None
