"""Chat templates: from messages to one prompt text, by the conventions of Hugging Face."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import attrs
import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from nanovllm.errors import RequestError


@attrs.frozen
class ChatTemplates:
    """The chat templates of a model, in the order of preference that transformers has.

    Attributes:
        default: The model's template, or None if it has none.
        tool_use: A template of its own for conversations with tools, or None.
    """

    default: str | None = None
    tool_use: str | None = None

    @classmethod
    def from_config(cls, value: Any) -> "ChatTemplates":
        """Read `chat_template` of a `tokenizer_config.json`: a text, or a list of named texts."""
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, Mapping):
            return cls(value.get("default"), value.get("tool_use"))
        if isinstance(value, Sequence):
            named = (item for item in value if isinstance(item, Mapping))
            return cls.from_config({item.get("name"): item.get("template") for item in named})
        return cls()

    def choose(self, *, with_tools: bool) -> str:
        """Return the template to use.

        Raises:
            RequestError: The model has no template.
        """
        chosen = (self.tool_use if with_tools else None) or self.default
        if chosen is None:
            raise RequestError(
                "The model has no chat template, so messages cannot be made a prompt; give the "
                "prompt as one text, or a tokenizer with a template."
            )
        return chosen


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """Render messages.

    Args:
        template: Jinja text.
        messages: The conversation, oldest first. Content is text, or a list of text parts, which
            become one text. An assistant's message with `tool_calls` needs no content.
        add_generation_prompt: End with what opens the assistant's turn.
        variables: What else the template can read, such as `tools` and `bos_token`.

    Raises:
        RequestError: The messages are malformed, or the template refuses them.
    """
    conversation = _checked(messages)
    try:
        return _compiled(template).render(
            {
                "tools": None,
                "documents": None,
                **variables,
                "messages": conversation,
                "add_generation_prompt": add_generation_prompt,
            }
        )
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(
            f"The model's chat template is not valid ({error}); give the prompt as one text."
        ) from error
    # A template is a program of the model's author: unexpected messages make it fail anyhow.
    except (
        jinja2.TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise RequestError(
            f"The model's chat template refuses the messages ({error}); check their roles, order "
            "and content."
        ) from error


def _checked(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _refused("`messages`", messages, "a list of messages")
    if not messages:
        raise _refused("`messages`", messages, "a list of at least one message")
    return [_checked_message(f"`messages[{i}]`", item) for i, item in enumerate(messages)]


def _checked_message(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refused(place, message, 'a mapping such as {"role": "user", "content": "Hi"}')
    # A missing key is what templates look for; None would be printed as a word.
    given = {key: value for key, value in message.items() if value is not None}
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise _refused(f"{place}['role']", role, "a name such as 'user'")
    if "content" in given:
        given["content"] = _checked_content(f"{place}['content']", given["content"])
    elif "tool_calls" not in given:
        raise _refused(f"{place}['content']", None, "text")
    return given


def _checked_content(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    # Templates that know parts write one after the other; the rest would print a Python list.
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    raise _refused(place, content, "text, or a list of parts that have a 'text'")


def _refused(place: str, value: Any, allowed: str) -> RequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return RequestError(f"{place} is {shown} but must be {allowed}.")


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@functools.cache
def _environment() -> jinja2.Environment:
    # Templates come with models from strangers: they run in a sandbox and can change nothing.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlocks],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - what jinja2 asks for

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Parse up to the closing tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().astimezone().strftime(layout)
