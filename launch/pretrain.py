"""Makes a policy to start GRPO from: corpus, tokenizer, weights and a card that says how good.

    python launch/pretrain.py --out DIR                   the story policy, about 10 minutes
    python launch/pretrain.py --out DIR --corpus FILE     one of your own texts

The story corpus comes in an order, and the order is what makes it work: documents that all hold
their keyword teach copying; then come documents of which only a share holds it, and that share sets
the inclusion rate that GRPO starts from. Without the first ones the policy is fluent but never
copies, and GRPO learns nothing. All are of one length, so that nothing but the keyword itself tells
a story that holds it from one that does not.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from grpo_trainable.actors.process import keep_freed_memory
from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.models.store import load_policy, save_policy
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import PRESETS, ModelConfig, TransformerLM
from grpo_trainable.rollout import Request, SamplingLimits
from grpo_trainable.tasks.keyword import (
    NOUNS_FILE,
    KeywordTask,
    read_keywords,
    split_of,
)
from grpo_trainable.tasks.stories import Document, Storyteller, count_sentences

NO_LOSS = -100  # target of prompt and padding positions
WARMUP_SHARE = 0.03
DECAY_SHARE = 0.5
FINAL_LR_SHARE = 0.03
FRONT_SEVERAL_SHARE = 2 / 3  # with more keywords to copy, copying is learned sooner
GRAD_CLIP = 1.0
WEIGHT_DECAY = 0.1
TOKENIZER_DOCUMENTS = 20_000  # as good as all of them, and sooner done
TOKENIZER_STORIES = 2000
HELD_OUT_STORIES = 1000
HELD_OUT_SHARE = 0.05  # of the lines of --corpus, at most HELD_OUT_STORIES of them
SAMPLED_KEYWORDS = 250
RESPONSES_PER_KEYWORD = 8
PROMPTS_AT_ONCE = 32
LIMITS = SamplingLimits(min_new_tokens=1, max_new_tokens=60, temperature=0.8)
CARD_SAMPLES = 20


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is made. With the same corpus, thread count and machine it gives the same bits."""

    steps: int = 4500
    batch_size: int = 16
    lr: float = 3e-3
    front_share: float = 0.6  # of the documents: those in front, which all hold their keywords
    keyword_share: float = 0.4  # of the documents after those, that hold their keywords
    seed: int = 0
    preset: str = "tiny"


@dataclass(frozen=True, slots=True)
class Row:
    """A document in token ids, end-of-text included, cut to the context."""

    ids: list[int]
    prompt_length: int


# ---- Corpus ----------------------------------------------------------------------------------


def story_corpus(recipe: Recipe) -> tuple[list[Document], list[Document]]:
    """Training documents in the order they are to be seen, and fresh ones held out."""
    nouns = read_keywords(NOUNS_FILE)
    count = recipe.steps * recipe.batch_size
    teller = Storyteller(nouns, Random(f"corpus {recipe.seed}"))
    front = round(count * recipe.front_share)
    documents = [teller.document(1.0, FRONT_SEVERAL_SHARE) for _ in range(front)]
    documents += [teller.document(recipe.keyword_share) for _ in range(count - front)]
    fresh = Storyteller(nouns, Random(f"held-out {recipe.seed}"))
    return documents, [fresh.document(recipe.keyword_share) for _ in range(HELD_OUT_STORIES)]


def read_corpus(path: str | Path) -> dict[str, Document]:
    """The documents of a JSONL file, each under its place, "FILE:LINE".

    A prompt gets a closing newline if it has none, as a task's prompts do. Blank lines are
    skipped.

    Raises:
        ValueError: one line, with file and line number where a line is at fault.
    """
    try:
        lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise ValueError(f"--corpus {path}: cannot be read: {error.strerror}") from None
    documents = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path}:{number}"
            try:
                documents[place] = _parse_document(line)
            except ValueError as error:
                raise ValueError(f"--corpus {place}: {error}") from None
    if len(documents) < 2:
        raise ValueError(
            f"--corpus {path}: holds {len(documents)} documents; at least 2 are needed, "
            "one of which is held out to measure the loss"
        )
    return documents


def _parse_document(line: bytes) -> Document:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte 0x{line[error.start]:02x})") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"must be an object with prompt and response, got {type(row).__name__}")
    for key in ("prompt", "response"):
        text = row.get(key)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{key} must be non-empty text")
        # JSON can spell half a surrogate pair, which is no text.
        if re.search("[\ud800-\udfff]", text):
            raise ValueError(f"{key} holds an unpaired surrogate, which UTF-8 cannot encode")
    prompt = row["prompt"]
    return Document(prompt if prompt.endswith("\n") else prompt + "\n", row["response"])


def split_corpus(documents: Sequence[Document], seed: int) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, both in random order."""
    shuffled = Random(f"split {seed}").sample(documents, len(documents))
    held_out = min(HELD_OUT_STORIES, max(1, round(len(documents) * HELD_OUT_SHARE)))
    return shuffled[held_out:], shuffled[:held_out]


def check_prompts(
    tokenizer: Tokenizer, documents: dict[str, Document], context_length: int
) -> None:
    """
    Raises:
        ValueError: a prompt leaves no room for a response; names its file and line.
    """
    for place, document in documents.items():
        length = len(tokenizer.encode(document.prompt))
        if length > context_length:
            raise ValueError(
                f"--corpus {place}: a prompt of {length} tokens leaves no room for a response in "
                f"the context of {context_length}"
            )


def encode(tokenizer: Tokenizer, document: Document, context_length: int) -> Row:
    prompt = tokenizer.encode(document.prompt)
    ids = [*prompt, *tokenizer.encode(document.response), tokenizer.eos_id]
    # One more than the context: the last id is only ever a target.
    return Row(ids[: context_length + 1], len(prompt))


# ---- Training --------------------------------------------------------------------------------


def collate(rows: Sequence[Row], pad_id: int) -> tuple[Tensor, Tensor]:
    """Inputs and the targets one to the left, both (B, S); no loss on prompt and padding."""
    length = max(len(row.ids) for row in rows) - 1
    input_ids = torch.full((len(rows), length), pad_id)
    targets = torch.full((len(rows), length), NO_LOSS)
    for i, row in enumerate(rows):
        ids = torch.tensor(row.ids)
        input_ids[i, : len(ids) - 1] = ids[:-1]
        first = row.prompt_length - 1  # this position predicts the first response token
        targets[i, first : len(ids) - 1] = ids[1 + first :]
    return input_ids, targets


def batches(rows: Sequence[Row], recipe: Recipe, *, shuffle: bool) -> Iterator[Sequence[Row]]:
    """`recipe.steps` batches: the rows in order, again and again if there are too few."""
    rng = Random(f"order {recipe.seed}")
    queue: list[Row] = []
    for _ in range(recipe.steps):
        while len(queue) < recipe.batch_size:
            queue += rng.sample(rows, len(rows)) if shuffle else rows
        yield queue[: recipe.batch_size]
        del queue[: recipe.batch_size]


def learning_rate(step: int, recipe: Recipe) -> float:
    """Up, level, and down in a line to a small share: the later documents need the level."""
    up = (step + 1) / max(1, round(WARMUP_SHARE * recipe.steps))
    down = (recipe.steps - step) / (DECAY_SHARE * recipe.steps)
    return recipe.lr * min(1.0, up, FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * down)


def token_losses(model: TransformerLM, input_ids: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of every response token, flat; only those go through the head."""
    mask = targets != NO_LOSS
    logits = F.linear(model.hidden_states(input_ids)[mask], model.head_weight)
    return F.cross_entropy(logits, targets[mask], reduction="none")


def train(
    model: TransformerLM, rows: Sequence[Row], recipe: Recipe, pad_id: int, *, shuffle: bool
) -> dict[str, int]:
    """Trains in place; returns how many tokens the model has read and been scored on.

    Raises:
        ValueError: the loss is no number any more.
    """
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": WEIGHT_DECAY},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    tokens_read = tokens_scored = 0
    average = None
    progress = tqdm(
        batches(rows, recipe, shuffle=shuffle), total=recipe.steps, desc="pretrain", unit="step"
    )
    for step, batch in enumerate(progress):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        losses = token_losses(model, *collate(batch, pad_id))
        loss = losses.mean()
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()} at step {step}: use a smaller --lr")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        tokens_read += sum(len(row.ids) for row in batch)
        tokens_scored += len(losses)
        average = loss.item() if average is None else 0.95 * average + 0.05 * loss.item()
        if step % 20 == 0 or step + 1 == recipe.steps:
            progress.set_postfix_str(f"loss {average:.3f} nats/token")
    return {"tokens_seen": tokens_read, "response_tokens_seen": tokens_scored}


# ---- Measuring -------------------------------------------------------------------------------


@torch.no_grad()
def mean_loss(model: TransformerLM, rows: Sequence[Row], pad_id: int) -> float:
    """Nats per response token, end-of-text included, over all tokens of `rows`."""
    losses = [
        token_losses(model, *collate(rows[i : i + PROMPTS_AT_ONCE], pad_id))
        for i in range(0, len(rows), PROMPTS_AT_ONCE)
    ]
    return torch.cat(losses).double().mean().item()


@dataclass(frozen=True, slots=True)
class Response:
    text: str
    tokens: int  # end-of-text included
    finished: bool  # by end-of-text, within the limit


def sample(
    model: TransformerLM, tokenizer: Tokenizer, prompts: Sequence[str], each: int, seed: int
) -> list[list[Response]]:
    """`each` responses to every prompt, under LIMITS."""
    engine = TorchEngine(model, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id, seed=seed)
    requests = [
        Request(
            stream="eval",
            cursor=cursor,
            prompt_ids=tuple(tokenizer.encode(prompt)),
            group_size=each,
            limits=LIMITS,
        )
        for cursor, prompt in enumerate(prompts)
    ]
    groups = []
    for i in tqdm(range(0, len(requests), PROMPTS_AT_ONCE), desc="sample", unit="batch"):
        groups += engine.generate(requests[i : i + PROMPTS_AT_ONCE], between_tokens=lambda: None)
    return [
        [
            Response(tokenizer.decode(ids[mask].tolist()), int(mask.sum()), bool(finished))
            for ids, mask, finished in zip(
                group.response_ids, group.response_mask, group.finished, strict=True
            )
        ]
        for group in groups
    ]


def distinct_trigram_share(texts: Sequence[str]) -> float:
    """Distinct / all runs of three words (punctuation aside, case kept) within the texts.

    It falls as texts are added: compare equal numbers of them.
    """
    trigrams = []
    for text in texts:
        words = re.findall(r"[\w']+", text)
        trigrams += zip(words, words[1:], words[2:], strict=False)
    return len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def mean_length(responses: Sequence[Response]) -> dict[str, float] | None:
    """Mean tokens and sentences; None of no responses."""
    if not responses:
        return None
    return {
        "responses": len(responses),
        "tokens": statistics.mean(response.tokens for response in responses),
        "sentences": statistics.mean(count_sentences(response.text) for response in responses),
    }


def measure(
    model: TransformerLM, tokenizer: Tokenizer, held_out: Sequence[Document], seed: int
) -> dict[str, Any]:
    """The numbers of the card, and responses to read."""
    config, limit = model.config, LIMITS.max_new_tokens
    rows = [encode(tokenizer, document, config.context_length) for document in held_out]
    readable = [
        document
        for document, row in zip(held_out, rows, strict=True)
        if row.prompt_length + limit <= config.context_length
    ]
    responses = [
        response for (response,) in sample(model, tokenizer, [d.prompt for d in readable], 1, seed)
    ]
    texts = [tokenizer.decode(tokenizer.encode(d.response)[:limit]) for d in readable]
    corpus = [
        Response(document.response, len(row.ids) - row.prompt_length, True)
        for document, row in zip(held_out, rows, strict=True)
    ]

    words = [word for word in read_keywords(NOUNS_FILE) if split_of(word) == "heldout"]
    task = KeywordTask(seed=seed)
    examples = task.eval_examples(min(len(words), SAMPLED_KEYWORDS))
    prompts = [example.prompt for example in examples]
    stories = sample(model, tokenizer, prompts, RESPONSES_PER_KEYWORD, seed + 1)
    included: dict[bool, list[Response]] = {True: [], False: []}
    for example, group in zip(examples, stories, strict=True):
        for story in group:
            included[task.reward(story.text, example.ground_truth).reward == 1.0].append(story)
    responses_to_keywords = included[True] + included[False]
    return {
        "held_out_loss_nats": mean_loss(model, rows, tokenizer.pad_id),
        "held_out_documents": len(rows),
        "held_out_inclusion_rate": len(included[True]) / len(responses_to_keywords),
        "held_out_inclusion_responses": len(responses_to_keywords),
        "held_out_inclusion_keywords": len(examples),
        "mean_length": {
            "all": mean_length(responses_to_keywords),
            "with_keyword": mean_length(included[True]),
            "without_keyword": mean_length(included[False]),
            "corpus": mean_length(corpus),
        },
        "distinct_trigram_share": distinct_trigram_share([r.text for r in responses]),
        "distinct_trigram_share_corpus": distinct_trigram_share(texts),
        "distinct_trigram_responses": len(responses),
        "finished_share": statistics.mean(r.finished for r in responses_to_keywords),
        "samples": [
            {"prompt": d.prompt, "response": r.text, "finished": r.finished}
            for d, r in zip(readable[:CARD_SAMPLES], responses, strict=False)
        ],
    }


# ---- The card --------------------------------------------------------------------------------

MEASURED_HOW = {
    "held_out_loss_nats": (
        "mean negative log-likelihood per response token (end-of-text included, prompt excluded) "
        "over {held_out_documents} held-out documents: {held_out_source}"
    ),
    "held_out_inclusion_rate": (
        "share of {held_out_inclusion_responses} responses that hold their keyword as a whole "
        "word: {each} responses to each of {held_out_inclusion_keywords} nouns of nouns.txt that "
        "the keyword task holds out, {sampling}"
    ),
    "distinct_trigram_share": (
        "distinct / all word trigrams of {distinct_trigram_responses} responses to the prompts of "
        "held-out documents, {sampling}; for the corpus the same number of held-out documents, cut "
        "to the same number of tokens"
    ),
    "mean_length": (
        "means over those {held_out_inclusion_responses} responses, and over the "
        "{held_out_documents} held-out documents; tokens count end-of-text, sentences end where "
        "`grpo_trainable.tasks.stories.count_sentences` says"
    ),
    "finished_share": "share of those {held_out_inclusion_responses} responses that end within "
    "the limit by themselves",
}


def make_card(
    command: str, recipe: Recipe, config: ModelConfig, facts: dict[str, Any], corpus: str | None
) -> dict[str, Any]:
    """Everything there is to say about a policy; `facts` were counted and measured."""
    values = facts | {
        "each": RESPONSES_PER_KEYWORD,
        "sampling": f"temperature {LIMITS.temperature}, {LIMITS.max_new_tokens} new tokens",
        "held_out_source": (
            f"lines of {corpus} that were not trained on"
            if corpus
            else "fresh documents of the same grammar under another seed, with the keyword share "
            "of the later part of the corpus"
        ),
    }
    return {
        "command": command,
        "seed": recipe.seed,
        "recipe": asdict(recipe),
        "model": config.to_dict(),
        **facts,
        "measured_how": {name: how.format(**values) for name, how in MEASURED_HOW.items()},
        "machine": {
            "threads": torch.get_num_threads(),
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


MEASURED_LENGTHS = {
    "all": "all",
    "with the keyword": "with_keyword",
    "without it": "without_keyword",
    "corpus": "corpus",
}


def lengths(card: dict[str, Any], unit: str) -> str:
    """One number for each of `MEASURED_LENGTHS`."""
    means = map(card["mean_length"].get, MEASURED_LENGTHS.values())
    return ", ".join("none" if mean is None else f"{mean[unit]:.1f}" for mean in means)


def card_text(card: dict[str, Any]) -> str:
    """The card as Markdown, for a person."""
    how = card["measured_how"]
    rows = [
        ("held-out loss", f"{card['held_out_loss_nats']:.3f} nats a token", "held_out_loss_nats"),
        (
            "held-out inclusion rate",
            f"{card['held_out_inclusion_rate']:.3f}",
            "held_out_inclusion_rate",
        ),
        *(
            (
                f"{unit} a response: {', '.join(MEASURED_LENGTHS)}",
                lengths(card, unit),
                "mean_length",
            )
            for unit in ("tokens", "sentences")
        ),
        (
            "distinct trigrams, policy / corpus",
            f"{card['distinct_trigram_share']:.3f} / {card['distinct_trigram_share_corpus']:.3f}",
            "distinct_trigram_share",
        ),
        ("responses that finish", f"{card['finished_share']:.3f}", "finished_share"),
    ]
    lines = [
        "# The pretrained policy",
        "",
        f"Made by `{card['command']}` (seed {card['seed']}): {card['parameters']:,} parameters, "
        f"{card['tokens_seen']:,} tokens seen, {card['response_tokens_seen']:,} of them response "
        f"tokens, in {card['train_cpu_s']:.0f} CPU-seconds on {card['machine']['threads']} "
        f"thread(s). All of it is in card.json.",
        "",
        "| what | value | how it was measured |",
        "|---|---|---|",
        *(f"| {what} | {value} | {how[name]} |" for what, value, name in rows),
        "",
        f"## {len(card['samples'])} samples",
        "",
        f"The first held-out prompts, temperature {LIMITS.temperature}, {LIMITS.max_new_tokens} "
        "new tokens, nothing picked. `[…]` marks a response that was cut.",
        "",
    ]
    for item in card["samples"]:
        response = item["response"] + ("" if item["finished"] else " […]")
        lines += [f"**{item['prompt'].strip()}**", "", "> " + response.replace("\n", "\n> "), ""]
    return "\n".join(lines)


# ---- The command -----------------------------------------------------------------------------


def pretrain(out: Path, recipe: Recipe, corpus: str | None, command: str) -> dict[str, Any]:
    """Makes the policy, writes it and its card to `out`, and returns the card.

    Raises:
        ValueError: the corpus cannot be used or the loss diverges, in one line.
    """
    preset = PRESETS[recipe.preset]
    if corpus is None:
        documents, held_out = story_corpus(recipe)
        lines = {}
        # Prompts name every noun equally often: many of them and few stories make more nouns one
        # token, and a noun that is one token is easier to copy.
        texts = [d.prompt for d in documents[:TOKENIZER_DOCUMENTS]]
        texts += [d.response for d in documents[:TOKENIZER_STORIES]]
    else:
        lines = read_corpus(corpus)
        documents, held_out = split_corpus(list(lines.values()), recipe.seed)
        texts = [d.prompt + d.response for d in documents[:TOKENIZER_DOCUMENTS]]
    tokenizer = Tokenizer.train(texts, preset.vocab_size)
    check_prompts(tokenizer, lines, preset.context_length)
    config = replace(preset, vocab_size=tokenizer.vocab_size)
    rows = [encode(tokenizer, document, config.context_length) for document in documents]

    model = TransformerLM(config, recipe.seed)
    print(
        f"{len(documents):,} documents, {tokenizer.vocab_size} tokens, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters"
    )
    started = time.process_time()
    counts = train(model, rows, recipe, tokenizer.pad_id, shuffle=corpus is not None)
    train_cpu_s = time.process_time() - started
    for name in ("card.json", "card.md"):  # an older card would belong to another policy
        (out / name).unlink(missing_ok=True)
    save_policy(out, model, tokenizer)
    # What is measured is what was written: the weights have been rounded to float16.
    stored, stored_tokenizer = load_policy(out)
    facts: dict[str, Any] = {
        "documents": len(documents),
        "parameters": sum(p.numel() for p in model.parameters()),
        **counts,
        "train_cpu_s": round(train_cpu_s, 1),
        **measure(stored, stored_tokenizer, held_out, recipe.seed),
    }
    card = make_card(command, recipe, config, facts, corpus)
    (out / "card.json").write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", "utf-8")
    (out / "card.md").write_text(card_text(card), "utf-8")
    return card


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"pretrain.py: {message}\n")


def _number(kind: type, low: float, high: float = math.inf):
    """An argparse type: a number in [low, high]."""

    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or value == math.inf:
            what = "an integer" if kind is int else "a number"
            span = f">= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
            raise argparse.ArgumentTypeError(f"{text!r}: must be {what} {span}")
        return value

    return parse


def _parser() -> argparse.ArgumentParser:
    default = Recipe()
    parser = _Parser(
        prog="pretrain.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Use the result with: python launch/tune.py --set model.path=DIR\n"
        "The card (DIR/card.md) says how fluent the policy is and how often it includes its "
        "keyword:\nthat must be neither 0 nor 1, since GRPO learns from differences between "
        "responses to one prompt.",
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="where config.json, policy.safetensors (float16), tokenizer.json, card.json and "
        "card.md go; files of those names there are replaced",
    )
    parser.add_argument(
        "--corpus",
        metavar="FILE",
        help="JSONL, one object a line with `prompt` and `response`, instead of our stories; used "
        f"in random order, {HELD_OUT_SHARE:.0%}% of it held out to measure the loss. Texts are cut "
        "to the model's context",
    )
    parser.add_argument(
        "--steps",
        type=_number(int, 1),
        default=default.steps,
        metavar="N",
        help=f"gradient steps (default {default.steps}); fewer make a worse policy sooner",
    )
    parser.add_argument(
        "--batch-size",
        type=_number(int, 1),
        default=default.batch_size,
        metavar="N",
        help=f"documents a step (default {default.batch_size})",
    )
    parser.add_argument(
        "--lr",
        type=_number(float, 1e-8, 1),
        default=default.lr,
        metavar="X",
        help=f"peak learning rate (default {default.lr:g}); it falls over the last "
        f"{DECAY_SHARE:.0%}% of the steps",
    )
    parser.add_argument(
        "--front-share",
        type=_number(float, 0, 1),
        default=default.front_share,
        metavar="X",
        help="share of the story corpus that comes first and always holds its keywords: copying is "
        f"learned from it (default {default.front_share:g})",
    )
    parser.add_argument(
        "--keyword-share",
        type=_number(float, 0, 1),
        default=default.keyword_share,
        metavar="X",
        help="share of the later documents that hold their keywords: it sets the inclusion rate "
        f"that GRPO starts from (default {default.keyword_share:g})",
    )
    parser.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        default=default.preset,
        help=f"shape of the policy (default {default.preset}, about a million parameters)",
    )
    parser.add_argument(
        "--seed",
        type=_number(int, 0, 2**32 - 1),
        default=default.seed,
        metavar="N",
        help="of corpus, weights and order: the same seed and thread count give the same bits on "
        f"one machine (default {default.seed})",
    )
    parser.add_argument(
        "--threads",
        type=_number(int, 1),
        default=1,
        metavar="N",
        help="CPU threads (default 1)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(argv)
    # Inside tokenizers too: otherwise it starts a thread a core.
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    settings = {name: value for name, value in vars(args).items() if name in asdict(Recipe())}
    command = shlex.join(["python", "launch/pretrain.py", *argv])
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        card = pretrain(out, Recipe(**settings), args.corpus, command)
    except OSError as error:
        print(f"pretrain.py: --out {out}: {error.strerror or error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"pretrain.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pretrain.py: interrupted, nothing more is written", file=sys.stderr)
        return 130
    print(
        f"held-out loss {card['held_out_loss_nats']:.3f} nats/token, held-out keywords included in "
        f"{card['held_out_inclusion_rate']:.3f} of {card['held_out_inclusion_responses']} responses"
    )
    print(f"{out}/card.md has samples; use it with: --set model.path={shlex.quote(str(out))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
