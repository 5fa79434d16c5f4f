"""`SamplingParams`: how a request wants its tokens chosen and when it wants to stop. Pure data."""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from nanovllm.errors import RequestError

MAX_LOGPROBS = 20
"""Most alternatives per token that `logprobs` may ask for (the figure that the OpenAI API uses)."""


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
    ("stop", lambda v: _each(v, lambda s: isinstance(s, str) and s != ""), "non-empty strings"),
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
    (
        "logprobs",
        lambda v: v is None or (_is_int(v) and 0 <= v <= MAX_LOGPROBS),
        f"None or an integer from 0 to {MAX_LOGPROBS}",
    ),
    ("skip_special_tokens", lambda v: isinstance(v, bool), "True or False"),
    ("include_stop_str_in_output", lambda v: isinstance(v, bool), "True or False"),
    ("detokenize", lambda v: isinstance(v, bool), "True or False"),
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
