"""How much faster a CPU computes a bfloat16 model of transformers here than by torch's own kernels.

Two copies of a model with random weights, of the shape of SmolLM2-135M with fewer layers and
tokens, take turns: one as transformers builds it, one as `load_hf_policy` has it compute. Timed are
64 rows that decode 16 tokens behind 80, and the forward and backward pass of a microbatch of 16
rows of 112 tokens. Whether this CPU has instructions for bfloat16 is written beside the hardware.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure

if TYPE_CHECKING:
    from grpo_trainable.models.hf import HFPolicy

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
ROWS, PROMPT, DECODED = 64, 80, 16
MICROBATCH, LENGTH = 16, 112
WORKS = ("decoding", "training")


def main() -> None:
    args = measure.arguments(__doc__, "cpu_bfloat16.json")
    if args.inside:
        print(json.dumps(inside(args)))
        return
    from grpo_trainable.models.wide_products import multiplies_bfloat16

    result = measure.provenance(args)
    result["hardware"]["multiplies_bfloat16"] = multiplies_bfloat16()
    rows = []
    for work in WORKS:
        for threads in measure.THREADS:
            rows.append(measure.in_fresh_process(args, work, threads))
            print(shown(rows[-1]), flush=True)
    measure.write(args.out, {**result, "shape": SHAPE, "results": rows})


def inside(args: argparse.Namespace) -> dict[str, Any]:
    from grpo_trainable.actors.process import keep_freed_memory

    keep_freed_memory()
    make = {"decoding": decoding, "training": training}[args.inside]
    works = {name: make(policy) for name, policy in policies(args.seed).items()}
    measured = measure.in_turns(works, repeats=args.repeats)
    return {"work": args.inside, "threads": args.threads, **measured}


def policies(seed: int) -> dict[str, HFPolicy]:
    """The same weights twice, as torch computes them and as this product does."""
    import torch
    import transformers

    from grpo_trainable.models.hf import HFPolicy, load_hf_policy
    from grpo_trainable.models.hf_directory import read_shape

    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).bfloat16()
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        theirs = HFPolicy(model, read_shape(Path(place)))
        ours = load_hf_policy(Path(place), dtype="bfloat16", head_fp32=True)
    return {"torch": theirs, "here": ours}


def decoding(policy: HFPolicy) -> Callable[[], None]:
    import torch

    from grpo_trainable.engines.hf_engine import HFDecoder
    from grpo_trainable.engines.local import PromptBatch

    head = policy.head_weight.detach().float()
    batch = PromptBatch(
        prompts=[torch.arange(PROMPT)], fan_out=torch.zeros(ROWS).long(), max_new_tokens=DECODED
    )

    @torch.no_grad()
    def work() -> None:
        decoder = HFDecoder(policy, lambda hidden: hidden.float() @ head.t(), batch, pad_id=0)
        decoder.enter(range(ROWS))
        for token in range(DECODED):
            decoder.next(torch.full((ROWS,), token))

    return work


def training(policy: HFPolicy) -> Callable[[], None]:
    import torch

    ids = torch.arange(MICROBATCH * LENGTH).view(MICROBATCH, LENGTH)

    def work() -> None:
        policy.hidden_states(ids).float().square().mean().backward()
        policy.zero_grad()

    return work


def shown(row: dict[str, Any]) -> str:
    speed_up, medians = row["speed_up"], row["seconds_medians"]
    return (
        f"{row['work']}, {row['threads']} threads: {medians['torch']:.3f} s by torch, "
        f"{medians['here']:.3f} s here, {speed_up['median']:.2f} x "
        f"({speed_up['min']:.2f}-{speed_up['max']:.2f})"
    )


if __name__ == "__main__":
    measure.run_benchmark(main)
