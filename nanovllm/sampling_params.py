"""`SamplingParams`: how a request wants its tokens chosen and when it wants to stop. Pure data."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from nanovllm.errors import RequestError

MAX_LOGPROBS = 20
"""Most alternatives per token that may be asked for (the figure that the OpenAI API uses)."""

STRUCTURES = ("json_schema", "regex", "choice", "grammar")
"""The fields that say what the text has to look like. At most one of them is set."""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # not so NaN, infinities and integers beyond floats


def _as_tuple(value: Any) -> Any:
    """A tuple of what was given; a lone string is one item, and no collection stays as it is."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) else value


def _as_pairs(value: Any) -> Any:
    """The items of a mapping, as an immutable value."""
    return tuple(value.items()) if isinstance(value, Mapping) else value


def _as_choice(value: Any) -> Any:
    """A tuple of what was given, but a lone string as it is: it is no choice."""
    return value if value is None or isinstance(value, str) else _as_tuple(value)


def _as_json(value: Any) -> Any:
    """A mapping as JSON text, in its own order; what has no such text stays as it is."""
    if not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return value


def _is_schema(value: Any) -> bool:
    """Whether this is a JSON object, as text."""
    if not isinstance(value, str):
        return False
    try:
        return isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_logprobs(value: Any) -> bool:
    return value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS)


def _is_bias(pair: Any) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and _is_int(pair[0])
        and pair[0] >= 0
        and _is_number(pair[1])
    )


def _each(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple) and all(holds(item) for item in value)


_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("temperature", lambda v: _is_number(v) and v >= 0, "a number >= 0"),
    ("top_p", lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    ("top_k", lambda v: _is_int(v) and v >= -1, "an integer >= 0, or -1 for all tokens"),
    ("min_p", lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    ("seed", lambda v: v is None or _is_int(v), "an integer or None"),
    ("n", lambda v: _is_int(v) and v >= 1, "an integer >= 1"),
    ("max_tokens", lambda v: _is_int(v) and v >= 1, "an integer >= 1"),
    ("min_tokens", lambda v: _is_int(v) and v >= 0, "an integer >= 0"),
    ("stop", lambda v: _each(v, _is_text), "non-empty strings"),
    ("stop_token_ids", lambda v: _each(v, lambda i: _is_int(i) and i >= 0), "token ids >= 0"),
    ("ignore_eos", lambda v: isinstance(v, bool), "True or False"),
    ("repetition_penalty", lambda v: _is_number(v) and v > 0, "a number > 0"),
    ("presence_penalty", lambda v: _is_number(v) and -2 <= v <= 2, "a number from -2 to 2"),
    ("frequency_penalty", lambda v: _is_number(v) and -2 <= v <= 2, "a number from -2 to 2"),
    (
        "logit_bias",
        lambda v: v is None or _each(v, _is_bias),
        "None or a mapping of token ids >= 0 to numbers",
    ),
    ("logprobs", _is_logprobs, f"None or an integer from 0 to {MAX_LOGPROBS}"),
    ("skip_special_tokens", lambda v: isinstance(v, bool), "True or False"),
    ("include_stop_str_in_output", lambda v: isinstance(v, bool), "True or False"),
    ("detokenize", lambda v: isinstance(v, bool), "True or False"),
    ("prompt_logprobs", _is_logprobs, f"None or an integer from 0 to {MAX_LOGPROBS}"),
    (
        "json_schema",
        lambda v: v is None or _is_schema(v),
        "None or a JSON schema: a mapping, or a JSON object as text",
    ),
    ("regex", lambda v: v is None or _is_text(v), "None or a regular expression as text"),
    (
        "choice",
        lambda v: v is None or (v != () and _each(v, _is_text)),
        "None or a list of non-empty strings",
    ),
    ("grammar", lambda v: v is None or _is_text(v), "None or a Lark grammar as text"),
)
"""Field, what must hold of its value, and the same in words."""


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request stops. Immutable; checked on construction.

    Attributes:
        temperature: Divides the logits. 0 means greedy: the largest logit, the lowest id on ties.
        top_p: Keep the smallest set of most likely tokens whose probability reaches this.
            0 keeps exactly the most likely token.
        top_k: Keep this many of the most likely tokens. 0 or -1: all.
        min_p: Drop tokens less likely than this share of the most likely one.
        seed: Makes the request reproducible: its draws depend on (seed, position) alone.
            None: the engine derives one for the request.
        n: Number of completions of the prompt.
        max_tokens: Most tokens to generate.
        min_tokens: Only a token after this many may end the request, by id or by stop string.
        stop: Strings that end the text, wherever they fall on token borders. One, or several.
        stop_token_ids: Ids that end the request, besides the model's own end-of-text ids.
        ignore_eos: Go on past the model's end-of-text ids.
        repetition_penalty: Divides positive and multiplies negative logits of the tokens seen in
            prompt or output. 1 is off.
        presence_penalty: Subtracted once from the logits of tokens in the output.
        frequency_penalty: Subtracted per occurrence from the logits of tokens in the output.
        logit_bias: Added to the logits of the given ids. Given as a mapping, kept as pairs.
        logprobs: Report each token's log-probability and this many alternatives. None: off.
        skip_special_tokens: Leave special tokens such as end-of-turn marks out of the text.
        include_stop_str_in_output: Keep the stop string at the end of the text.
        detokenize: Produce text. False needs no tokenizer.
        prompt_logprobs: Report each prompt token's log-probability and this many alternatives.
            Such a request computes its whole prompt: it takes nothing from the prefix cache.
            None: off.
        json_schema: The text is JSON that this schema allows. Given as a mapping or as text, kept
            as text. Keys come in the schema's order; between the parts stands a space, a new line
            with up to 32 blanks, or nothing.
        regex: The whole text matches this regular expression, in the syntax of Rust's `regex`
            crate: no look-around, no back-references.
        choice: The text is one of these.
        grammar: The text is what this grammar produces, in llguidance's dialect of Lark.

    At most one of the last four is given. They need the `llguidance` package (`pip install
    'nanovllm[structured]'`) and a tokenizer. A request ends as soon as nothing can follow, also
    before `min_tokens`; where something may follow, an end-of-text id may come too, and only there.
    `max_tokens` still cuts the text anywhere, with `finish_reason` "length".

    Raises:
        RequestError: A field holds what it must not; the message names field, value and range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int = 64
    min_tokens: int = 0
    stop: tuple[str, ...] = attrs.field(default=(), converter=_as_tuple)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_as_tuple)
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] | None = attrs.field(
        default=None, converter=_as_pairs
    )
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    prompt_logprobs: int | None = None
    json_schema: str | None = attrs.field(default=None, converter=_as_json)
    regex: str | None = None
    choice: tuple[str, ...] | None = attrs.field(default=None, converter=_as_choice)
    grammar: str | None = None

    def __attrs_post_init__(self) -> None:
        for name, holds, allowed in _RULES:
            value = getattr(self, name)
            if not holds(value):
                raise RequestError(f"`{name}` is {_shown(value)} but must be {allowed}.")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"`min_tokens` is {self.min_tokens} but `max_tokens` is {self.max_tokens}; "
                "lower the one or raise the other."
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                f"`stop` is {_shown(self.stop)} but `detokenize` is False, and stop strings are "
                "looked for in the text; leave one of them out or use `stop_token_ids`."
            )
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError(
                f"{' and '.join(f'`{name}`' for name in given)} are given, but a text has one "
                "structure; leave out all but one."
            )

    @property
    def structure(self) -> tuple[str, str | tuple[str, ...]] | None:
        """The name and the value of the field that says what the text looks like, if one does."""
        for name in STRUCTURES:
            value = getattr(self, name)
            if value is not None:
                return name, value
        return None
