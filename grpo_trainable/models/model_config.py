"""The shape of a policy of this package, and the names of its weights.

Only the standard library is imported, so that the launcher can check a policy before it starts
anything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a policy.

    `context_length` is the maximum number of tokens of a prompt plus its response.
    """

    vocab_size: int
    context_length: int
    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int
    rope_theta: float = 10_000.0
    tied_head: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_length", "d_model", "num_layers", "num_heads", "d_ff"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: must be an integer >= 1")
        if type(self.rope_theta) not in (int, float) or not self.rope_theta > 0:
            raise ValueError(f"rope_theta={self.rope_theta!r}: must be a number > 0")
        if type(self.tied_head) is not bool:
            raise ValueError(f"tied_head={self.tied_head!r}: must be true or false")
        if self.d_model % (2 * self.num_heads):
            raise ValueError(
                f"d_model={self.d_model}: must be a multiple of {2 * self.num_heads}, which is "
                "2 x num_heads"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads

    @property
    def matmul_parameters(self) -> int:
        """Number of weights, excluding the head's, in the matrices that process every token."""
        return self.num_layers * (4 * self.d_model**2 + 3 * self.d_model * self.d_ff)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return dataclasses.asdict(self)


PRESETS = {
    # The shape of the shipped policy that writes stories, about 1 M parameters.
    "tiny": ModelConfig(
        vocab_size=2048, context_length=128, d_model=128, num_layers=4, num_heads=4, d_ff=344
    ),
    # The shape of the shipped policy that solves word problems.
    "arithmetic": ModelConfig(
        vocab_size=1024, context_length=160, d_model=128, num_layers=4, num_heads=4, d_ff=344
    ),
    # The shape of the shipped policy that plays games.
    "games": ModelConfig(
        vocab_size=272, context_length=64, d_model=64, num_layers=2, num_heads=4, d_ff=176
    ),
    # The shape for benchmarks.
    "small": ModelConfig(
        vocab_size=4096, context_length=256, d_model=256, num_layers=4, num_heads=8, d_ff=688
    ),
    # The model that the course CSE 599-O uses.
    "course": ModelConfig(
        vocab_size=50257,
        context_length=256,
        d_model=512,
        num_layers=4,
        num_heads=16,
        d_ff=1344,
        tied_head=False,
    ),
}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return, by name, the shapes of a `TransformerLM`'s parameters. A tied head appears once."""
    d, d_ff, vocab = config.d_model, config.d_ff, config.vocab_size
    block = {
        "attention_norm.weight": (d,),
        "attention.qkv.weight": (3 * d, d),
        "attention.out.weight": (d, d),
        "mlp_norm.weight": (d,),
        "mlp.gate_up.weight": (2 * d_ff, d),
        "mlp.down.weight": (d, d_ff),
    }
    blocks = {
        f"blocks.{layer}.{name}": shape
        for layer in range(config.num_layers)
        for name, shape in block.items()
    }
    head = {} if config.tied_head else {"head.weight": (vocab, d)}
    return {"embedding.weight": (vocab, d), **blocks, "final_norm.weight": (d,), **head}


def match_shapes(
    expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]], source: str
) -> None:
    """Compare a model's parameters with tensors, by name and shape.

    Raises:
        ValueError: Names or shapes differ. The message is one line that begins with `source`.
    """
    if expected.keys() != found.keys():
        odd = sorted(expected.keys() ^ found.keys())
        raise ValueError(
            f"{source}: parameters do not match the model; the first difference is {odd[0]!r}"
        )
    for name, shape in expected.items():
        if tuple(shape) != tuple(found[name]):
            raise ValueError(
                f"{source}: {name} has shape {tuple(found[name])}, but the model "
                f"needs {tuple(shape)}"
            )
