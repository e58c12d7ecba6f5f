"""Prompts as the conversations that a model was trained on, by its own chat template.

The template is rendered by transformers (extra `hf`). The tokens are those of our tokenizer, the
same that decodes the responses.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_trainable.models.directory import SHIPPED_POLICY
from grpo_trainable.models.hf.directory import INSTALL, is_hugging_face, local_directory, one_line
from grpo_trainable.models.tokenizer import END_OF_TEXT, PAD, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, str]]

# The date that a template is told when it asks for today's: a run's prompts must not depend on the
# day. It is the one that Llama's templates have where they cannot ask.
DATE = "26 Jul 2024"
ASKS_FOR_DATE = "strftime_now"
FIXED_DATE = f"{{%- macro {ASKS_FOR_DATE}(format) -%}}{DATE}{{%- endmacro -%}}"
PRIVATE_USE = range(0xE000, 0xF900)  # characters without a meaning


class ChatTemplate:
    """Turns conversations into the ids that a response follows.

    What a message spells is text: a special token in it becomes ordinary characters, and only those
    that the template writes become tokens.
    """

    def __init__(
        self, renderer: PreTrainedTokenizerBase, template: str, tokenizer: Tokenizer
    ) -> None:
        """`renderer`: knows what the template may ask for, such as the spelling of end-of-text."""
        self._renderer = renderer
        self._template = FIXED_DATE + template if ASKS_FOR_DATE in template else template
        self._tokenizer = tokenizer
        longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = "|".join(map(re.escape, longest_first)) or r"(?!)"

    def render(self, messages: Messages) -> str:
        """The text of a conversation, up to where the response begins.

        Raises:
            ValueError: the template refuses it, in one line.
        """
        try:
            rendered = self._renderer.apply_chat_template(
                list(messages),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template may fail in any way
            why = one_line(error)
            raise ValueError(f"model.chat_template: cannot render a prompt: {why}") from error
        assert isinstance(rendered, str)
        return rendered

    def encode(self, messages: Messages) -> list[int]:
        """The ids of `render(messages)`.

        Raises:
            ValueError: the template refuses the conversation, or a message spells a special token
                that cannot be encoded as text here; in one line.
        """
        contents = [message["content"] for message in messages]
        spelled = re.search(self._special, "\n".join(contents))
        if spelled is None:
            return self._tokenizer.encode_rendered(self.render(messages))
        before, after = _unused_characters("".join(contents))
        marked = [
            message | {"content": self._marked(content, before, after)}
            for message, content in zip(messages, contents, strict=True)
        ]
        rendered = self.render(marked)
        quoted = re.compile(f"{before}({self._special}){after}")
        self._refuse_inseparable(quoted.sub("", rendered), spelled[0])
        return self._by_parts(rendered, quoted, stray=f"[{before}{after}]")

    def encode_reply(
        self, text: str, response: Sequence[int], system: str | None = None
    ) -> list[int]:
        """The ids between a response of the model's and its next one, when `text` is what the user
        says in between.

        They begin with the token by which the template ends a message of the model's, unless the
        response has ended with it. They do not depend on what the response says: a template that
        leaves out earlier reasoning leaves out nothing here, where it was sampled and stays.

        Raises:
            ValueError: the template refuses such a conversation, or leaves out what the model said.
        """
        before, after = _unused_characters(text + (system or ""))
        said = f"{before}{after}"
        messages = [
            *([] if system is None else [{"role": "system", "content": system}]),
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": said},
            {"role": "user", "content": self._marked(text, before, after)},
        ]
        _, found, rest = self.render(messages).partition(said)
        if not found:
            raise ValueError("model.chat_template: leaves out what the model said before")
        quoted = re.compile(f"{before}({self._special}){after}")
        ids = self._by_parts(rest, quoted, stray=f"[{before}{after}]")
        return ids[1:] if list(response[-1:]) == ids[:1] else ids

    def _marked(self, content: str, before: str, after: str) -> str:
        """A message in which what spells a special token stands between two characters."""
        return re.sub(self._special, rf"{before}\g<0>{after}", content)

    def _by_parts(self, text: str, quoted: re.Pattern[str], stray: str) -> list[int]:
        """The ids of a rendered text, encoded between the special tokens of the template. What
        `quoted` matches is text; a template may have torn its marks apart (`stray`)."""
        ids: list[int] = []
        begin, plain = 0, ""
        for match in re.finditer(f"{quoted.pattern}|({self._special})", text):
            plain += text[begin : match.start()] + (match[1] or "")
            begin = match.end()
            if match[2] is not None:
                ids += self._encode(re.sub(stray, "", plain))
                ids.append(self._tokenizer.special_tokens[match[2]])
                plain = ""
        return [*ids, *self._encode(re.sub(stray, "", plain + text[begin:]))]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text) if text else []

    def _refuse_inseparable(self, text: str, spelled: str) -> None:
        """Where text beside a special token is encoded otherwise than by itself, parts do not add
        up to the whole: ValueError then."""
        nothing = re.compile("(?!)()")
        if self._by_parts(text, nothing, stray="(?!)") != self._tokenizer.encode_rendered(text):
            raise ValueError(
                f"a prompt spells the special token {spelled}, which this tokenizer cannot encode "
                "as text in a chat template; leave it out of the prompt"
            )


def _unused_characters(text: str) -> tuple[str, str]:
    unused: Iterator[str] = (chr(code) for code in PRIVATE_USE if chr(code) not in text)
    return next(unused), next(unused)


def chat_template(named: str, path: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """What `model.chat_template` names: a file, or the template of the model in `path` (on), whose
    tokenizer it is; None where off.

    Raises:
        ValueError: a library is missing, the model has no template, or the file cannot be read; in
            one line.
    """
    if named == "off":
        return None
    for library in ("transformers", "jinja2"):
        if importlib.util.find_spec(library) is None:
            raise ValueError(f"model.chat_template={named}: needs the library {library}: {INSTALL}")
    directory = SHIPPED_POLICY if path is None else local_directory(path)
    renderer: Any = _renderer(directory)
    if named != "on":
        return ChatTemplate(renderer, _read(named), tokenizer)
    try:
        own = renderer.get_chat_template()
    except ValueError:
        raise ValueError(
            f"model.chat_template=on: {path or 'the shipped policy'} has no chat template; "
            "name a jinja file"
        ) from None
    return ChatTemplate(renderer, own, tokenizer)


def _renderer(directory: Path) -> PreTrainedTokenizerBase:
    import transformers

    if not is_hugging_face(directory):
        return transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"),
            eos_token=END_OF_TEXT,
            pad_token=PAD,
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers has no error of its own
        raise ValueError(
            f"model.chat_template: transformers cannot read the tokenizer of {directory} "
            f"({one_line(error)})"
        ) from error


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"model.chat_template={path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"model.chat_template={path}: is not UTF-8") from None
