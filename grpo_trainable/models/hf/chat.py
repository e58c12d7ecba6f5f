"""Prompts as conversations, rendered with the chat template of a model.

The library `transformers` (extra `hf`) renders the template. The rendered text is encoded by the
tokenizer that also decodes the responses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_trainable.models.directory import SHIPPED_POLICY
from grpo_trainable.models.hf.directory import refuse_missing_library
from grpo_trainable.models.hf.files import local_directory
from grpo_trainable.models.hf.json_files import is_hugging_face
from grpo_trainable.models.tokenizer import END_OF_TEXT, PAD, Tokenizer
from grpo_trainable.plugins import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, str]]

# The date given to templates that ask for the current date. A run's prompts must not depend on the
# day. Llama's templates use this date if they cannot get the current date.
DATE = "26 Jul 2024"
ASKS_FOR_DATE = "strftime_now"
FIXED_DATE = f"{{%- macro {ASKS_FOR_DATE}(format) -%}}{DATE}{{%- endmacro -%}}"
PRIVATE_USE = range(0xE000, 0xF900)  # characters without a fixed meaning


class ChatTemplate:
    """Turns a conversation into the ids of a prompt.

    Messages are plain text. A special token that a message spells out is encoded as ordinary
    characters. Only special tokens that the template writes are encoded as single tokens.
    """

    def __init__(
        self,
        renderer: PreTrainedTokenizerBase,
        template: str,
        tokenizer: Tokenizer,
        arguments: Mapping[str, Any],
    ) -> None:
        """Set up a template.

        Args:
            renderer: Provides values that the template may use, such as the spelling of
                end-of-text.
            template: The chat template, in the Jinja language.
            tokenizer: Tokenizer of the policy.
            arguments: Values of further variables in the template, by name.

        Raises:
            ValueError: The template ignores one of the arguments. The message is one line.
        """
        for name in arguments:
            if not re.search(rf"\b{re.escape(name)}\b", template):
                raise ValueError(f"model.template_args: the chat template does not use {name}")
        self._arguments = dict(arguments)
        self._renderer = renderer
        self._template = with_fixed_date(template)
        self._tokenizer = tokenizer
        longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = "|".join(map(re.escape, longest_first)) or r"(?!)"

    def render(self, messages: Messages) -> str:
        """Return the text of a conversation, up to the beginning of the response.

        Raises:
            ValueError: The template rejects the conversation. The message is one line.
        """
        return self._rendered(messages, begins_response=True)

    def _rendered(self, messages: Messages, *, begins_response: bool) -> str:
        """Return the text of a conversation, with or without the beginning of a response."""
        try:
            rendered = self._renderer.apply_chat_template(
                list(messages),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=begins_response,
                **self._arguments,
            )
        except Exception as error:  # a template may fail in any way
            why = one_line(error)
            raise ValueError(f"model.chat_template: cannot render a prompt: {why}") from error
        assert isinstance(rendered, str)
        return rendered

    def encode(self, messages: Messages) -> list[int]:
        """Return the ids of `render(messages)`.

        Raises:
            ValueError: The template rejects the conversation, or a message spells out a special
                token that cannot be encoded as text. The error message is one line.
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
        self,
        text: str,
        response: Sequence[int],
        *,
        role: str = "user",
        system: str | None = None,
    ) -> list[int]:
        """Return the ids that a message adds between two responses of the model.

        The template ends each message of the model with a token. The ids begin with that token,
        unless the response already ended with it. The ids do not depend on the content of the
        response. Even if the template drops earlier reasoning, the reasoning in the response stays.

        Args:
            text: Text of the message.
            response: Token ids of the response before the message.
            role: Role of the message.
            system: Text of the system message at the beginning of the conversation, if any.

        Raises:
            ValueError: The template rejects the conversation, or drops the model's earlier message.
        """
        before, after = _unused_characters(text + (system or ""))
        said, marked = f"{before}{after}", self._marked(text, before, after)
        messages = [*_opening(system), _says(said), {"role": role, "content": marked}]
        rest = _after(said, self.render(messages))
        # Some templates, such as the template of Llama 2, write a space before the token.
        spaced = re.match(rf"\s+({self._special})", rest)
        if spaced and [self._tokenizer.special_tokens[spaced[1]]] == list(response[-1:]):
            rest = rest[spaced.start(1) :]
        quoted = re.compile(f"{before}({self._special}){after}")
        ids = self._by_parts(rest, quoted, stray=f"[{before}{after}]")
        return ids[1:] if list(response[-1:]) == ids[:1] else ids

    def check_replies(self, role: str, system: str | None = None) -> None:
        """Check that a reply to the model only adds text to the end of a conversation.

        It does not matter whether the template renders the model's own message differently after a
        reply, because the ids of a response stay as they were sampled.

        Args:
            role: Role of the reply.
            system: Text of the system message at the beginning of the conversation, if any.

        Raises:
            ValueError: The template rejects the conversation, drops the reply, renders earlier text
                differently after a reply, or renders a reply differently in a later turn. The
                message is one line.
        """
        before, after = _unused_characters(system or "")
        said, reply = f"{before}{after}", f"{after}{before}"
        asked = _opening(system)
        answered = [*asked, _says(said), {"role": role, "content": reply}]
        whole = self.render([*answered, *answered[-2:]])
        rest = _after(said, self.render(answered))
        if reply not in rest:
            raise ValueError(
                f"model.chat_template: the template drops messages with the role {role}; set "
                "env.role, or change a copy of the template (docs/howto/env.md)"
            )
        begins = self._begins(asked, whole) and self._begins(answered, whole)
        if not begins or _after(said, whole) != rest:
            raise ValueError(
                f"model.chat_template: after a message with the role {role}, the template renders "
                "earlier messages differently, so the answers of an environment cannot be added "
                "to a response; change a copy of the template (docs/howto/env.md)"
            )
        if not self._separable(rest):
            raise ValueError(
                "model.chat_template: the tokenizer encodes text differently next to a special "
                "token, so the answers of an environment cannot be encoded separately"
            )

    def _begins(self, messages: Messages, whole: str) -> bool:
        """Return True if the longer text `whole` begins with the text of this conversation.

        Some templates end a conversation differently if nothing follows, and some begin a new
        response differently from the model's earlier messages. So the conversation is rendered both
        with and without the beginning of a response. One of the two texts has to match.
        """
        renderings = (self._rendered(messages, begins_response=begins) for begins in (True, False))
        return any(map(whole.startswith, renderings))

    def _marked(self, content: str, before: str, after: str) -> str:
        """Put a mark before and after every special token that a message spells out."""
        return re.sub(self._special, rf"{before}\g<0>{after}", content)

    def _by_parts(self, text: str, quoted: re.Pattern[str], stray: str) -> list[int]:
        """Encode a rendered text piece by piece, between the special tokens of the template.

        Matches of `quoted` are plain text. Marks that the template has separated from their token
        (`stray`) are removed.
        """
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

    def _separable(self, text: str) -> bool:
        """Return True if encoding `text` piece by piece gives the same ids as encoding it whole."""
        nothing = re.compile("(?!)()")
        parts = self._by_parts(text, nothing, stray="(?!)")
        return parts == self._tokenizer.encode_rendered(text)

    def _refuse_inseparable(self, text: str, spelled: str) -> None:
        """Raise a ValueError if encoding `text` piece by piece differs from encoding it as a whole.

        The two results differ if the tokenizer encodes some text differently next to a special
        token.
        """
        if not self._separable(text):
            raise ValueError(
                f"a prompt spells out the special token {spelled}, which this tokenizer cannot "
                "encode as text in a chat template; leave it out of the prompt"
            )


def with_fixed_date(template: str) -> str:
    """Return a template that does not depend on the current date."""
    return FIXED_DATE + template if ASKS_FOR_DATE in template else template


def _opening(system: str | None) -> list[dict[str, str]]:
    """Return the beginning of a conversation, up to a message of the user."""
    asked = {"role": "user", "content": "?"}
    return [asked] if system is None else [{"role": "system", "content": system}, asked]


def _says(text: str) -> dict[str, str]:
    """Return a message of the model."""
    return {"role": "assistant", "content": text}


def _after(said: str, rendered: str) -> str:
    """Return the text after the last occurrence of the model's message `said`.

    Raises:
        ValueError: The template drops the message. The error message is one line.
    """
    _, found, rest = rendered.rpartition(said)
    if not found:
        raise ValueError("model.chat_template: the template drops the model's earlier message")
    return rest


def _unused_characters(text: str) -> tuple[str, str]:
    unused: Iterator[str] = (chr(code) for code in PRIVATE_USE if chr(code) not in text)
    return next(unused), next(unused)


def chat_template(
    named: str, path: str | None, tokenizer: Tokenizer, arguments: str | None = None
) -> ChatTemplate | None:
    """Return the template that `model.chat_template` names, or None if the setting is off.

    Args:
        named: "off"; "on", which means the template of the model in `path`; or the path of a
            template file.
        path: Directory or hub id of the model. None means the shipped policy.
        tokenizer: Tokenizer of the model.
        arguments: `model.template_args`, a JSON object of arguments of the template.

    Raises:
        ValueError: A library is missing, the model has no template, the file cannot be read, or the
            template ignores one of the arguments. The message is one line.
    """
    if named == "off":
        return None
    for library in ("transformers", "jinja2"):
        refuse_missing_library(f"model.chat_template={named}", library)
    directory = SHIPPED_POLICY if path is None else local_directory(path)
    renderer: Any = _renderer(directory)
    given = json.loads(arguments or "{}")
    if named != "on":
        return ChatTemplate(renderer, _read(named), tokenizer, given)
    try:
        own = renderer.get_chat_template()
    except ValueError:
        raise ValueError(
            f"model.chat_template=on: {path or 'the shipped policy'} has no chat template; "
            "name a Jinja template file"
        ) from None
    return ChatTemplate(renderer, own, tokenizer, given)


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
    except Exception as error:  # transformers has no common error class
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
