"""Does each way to learn from preferences give stories that the reader prefers?

Executes the page docs/howto/rlhf.md once for each seed: SFT, pairs, a reward model, DPO, PPO, GRPO,
and GRPO without a KL penalty. If the command is interrupted, the same command repeats the
interrupted stage and continues, unless the commit has changed.
"""

from __future__ import annotations

import json
import shutil
import sys

from measure import ROOT, parser_of, provenance, read, run_benchmark, same_run, write

sys.path.append(str(ROOT / "docs"))

from walk import walk


def main() -> None:
    args = parser_of(__doc__, "rlhf.json", counts={"seeds": (3, "number of seeds")}).parse_args()
    origin = provenance(args)
    kept = read(args.out)
    walks = kept["walks"] if same_run(kept, origin) else []
    for seed in range(args.seed, args.seed + args.seeds):
        if any(own["walk_seed"] == seed for own in walks):
            continue
        place = ROOT / "build" / "rlhf" / f"{origin['commit'][:8]}-{seed}"
        seconds = walk(place, seed)
        found = json.loads((place / "walk.json").read_text())
        walks.append({"walk_seed": seed, "seconds": sum(seconds), "stages_s": seconds, **found})
        write(args.out, {**origin, "walks": walks}, quiet=True)
        if seed == args.seed:
            shutil.copyfile(place / "walk.svg", ROOT / "docs" / "results" / "rlhf.svg")
        print((place / "walk.md").read_text(), f"seed {seed}: {sum(seconds):.0f} s", flush=True)


if __name__ == "__main__":
    run_benchmark(main)
