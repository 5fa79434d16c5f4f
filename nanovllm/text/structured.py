"""Structured output: which tokens may come next, so that the text is what was asked for.

A thin layer over the `llguidance` package, an extra, which parses JSON schemas, regular expressions
and Lark grammars and walks a tokenizer's vocabulary along with its parser.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

import attrs
import numpy as np
import numpy.typing as npt

from nanovllm.errors import RequestError
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NUM_KEPT = 64
"""Structures of which the compiled form is kept, the last ones used."""

_WORD_BITS = 32

_JSON_WHITESPACE = r"\x20|\r?\n[\x20\t]{0,32}"
"""What may stand between the parts of JSON: a space, or a new line with its indentation.

JSON itself sets no bound, and a weak model would go on writing blanks until `max_tokens`.
"""


class StructureError(ValueError):
    """A text left its structure, or the matcher met a limit of its own."""


@attrs.define(eq=False)
class TokenMatcher:
    """Where one text stands in its structure: a function of the tokens followed, and no more.

    A `fork` starts where its origin stands and shares with it what never changes.
    """

    _matcher: "LLMatcher"
    _end_ids: frozenset[int]  # what the library takes for the end of a text
    _num_words: int
    _stop_token_ids: frozenset[int] = frozenset()
    _num_followed: int = 0
    _has_ended: bool = False

    def fork(self, stop_token_ids: Iterable[int]) -> Self:
        """An independent matcher that stands where this one does.

        Args:
            stop_token_ids: What ends the request, the model's own ids included. They may come
                where the text may end, and nowhere else.
        """
        return attrs.evolve(
            self,
            matcher=self._matcher.deep_copy(),
            stop_token_ids=frozenset(stop_token_ids),
        )

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take in those of a text's tokens, given from its start, that were not followed yet.

        Raises:
            StructureError: They are no such text.
        """
        new = list(token_ids[self._num_followed :])
        self._num_followed += len(new)
        if new and new[-1] in self._stop_token_ids:
            self._has_ended = True
            new.pop()
        if not self._matcher.consume_tokens(new):
            raise StructureError(_gist(self._matcher.get_error()))

    def allowed_tokens(self) -> npt.NDArray[np.int32]:
        """Which tokens may come next.

        Returns:
            `[W]` int32, a bitmask: bit `i` of word `j` stands for the token `32 * j + i`. Ids past
            its end may not come.

        Raises:
            StructureError: The matcher has failed.
        """
        words = np.empty(self._num_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise StructureError(_gist(self._matcher.get_error()))
        may_end = self._matcher.is_accepting()
        bits = words.view(np.uint32)
        for token_id in self._end_ids | self._stop_token_ids:
            word, bit = divmod(token_id, _WORD_BITS)
            if word < len(bits):
                one = np.uint32(1 << bit)
                if may_end and token_id in self._stop_token_ids:
                    bits[word] |= one
                else:
                    bits[word] &= ~one
        return words

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._has_ended or self._matcher.is_stopped()


@attrs.define(eq=False)
class StructureCompiler:
    """Makes matchers for one model. Its methods may be called from any thread.

    Attributes:
        tokenizer: The model's.
        vocab_size: Tokens that the model has logits for; may differ from the tokenizer's.
        eos_token_ids: The model's own end-of-text ids.
    """

    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    _vocabulary: "LLTokenizer | None" = attrs.field(default=None, init=False)
    _compiled: "OrderedDict[tuple[str, str | tuple[str, ...]], TokenMatcher]" = attrs.field(
        factory=OrderedDict, init=False
    )
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def compile(self, name: str, value: str | tuple[str, ...]) -> TokenMatcher:
        """A matcher at the start of a text, to be forked and not to be moved on itself.

        The first call reads the vocabulary, which takes a few tenths of a second. A structure that
        was compiled before costs next to nothing.

        Args:
            name: The field of `SamplingParams` that the structure came in.
            value: Its value.

        Raises:
            RequestError: The package is missing, it can't read this tokenizer, or the structure
                is malformed, uses what is not supported, or describes no text.
        """
        key = (name, value)
        with self._lock:
            known = self._compiled.get(key)
            if known is not None:
                self._compiled.move_to_end(key)
                return known
            made = self._compile(name, value)
            self._compiled[key] = made
            if len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
            return made

    def _compile(self, name: str, value: str | tuple[str, ...]) -> TokenMatcher:
        try:
            # Delayed: an extra.
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise RequestError(
                f"`{name}` needs the llguidance package ({error}); "
                "pip install 'nanovllm[structured]'."
            ) from error
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary(name)
        vocabulary = self._vocabulary
        try:
            matcher = LLMatcher(
                vocabulary,
                _grammar(name, value),
                log_level=0,
                limits=LLParserLimits(verbose_errors=False),
            )
        except ValueError as error:
            raise _refusal(name, value, str(error)) from error
        if matcher.is_error():
            raise _refusal(name, value, matcher.get_error())
        made = TokenMatcher(
            matcher,
            frozenset(vocabulary.eos_tokens),
            -(-vocabulary.vocab_size // _WORD_BITS),
        )
        if not matcher.is_accepting() and not _can_begin(made):
            raise _refusal(name, value, "no token of the model can begin such a text")
        return made

    def _read_vocabulary(self, name: str) -> "LLTokenizer":
        from llguidance import LLTokenizer

        # The library wants to know what ends a text. Where nothing does, some other mark will do:
        # it is no part of a text either, and whether it may come is for `TokenMatcher` to say.
        num_tokens = self.tokenizer.vocab_size
        ends = sorted(i for i in self.eos_token_ids if i < num_tokens)
        if not ends:
            special = (i for i in range(num_tokens) if self.tokenizer.is_special(i))
            ends = list(special)[:1]
        try:
            return LLTokenizer(
                self.tokenizer.backend.to_str(),
                n_vocab=max(num_tokens, self.vocab_size),
                eos_token=ends or None,
            )
        except ValueError as error:
            raise RequestError(
                f"`{name}` can't be used with this model: llguidance does not know its kind of "
                f"tokenizer ({_gist(str(error))})."
            ) from error


def _grammar(name: str, value: str | tuple[str, ...]) -> str:
    """The structure in llguidance's own words."""
    from llguidance import LLMatcher

    grammar: str
    if isinstance(value, tuple):
        grammar = LLMatcher.grammar_from_regex("|".join(map(_literally, value)))
    elif name == "json_schema":
        own = json.loads(value).get("x-guidance")
        defaults = {"whitespace_pattern": _JSON_WHITESPACE}
        if isinstance(own, dict) and {"whitespace_pattern", "whitespace_flexible"} & own.keys():
            defaults = {}
        grammar = LLMatcher.grammar_from_json_schema(value, defaults=defaults)
    elif name == "regex":
        grammar = LLMatcher.grammar_from_regex(value)
    else:
        grammar = LLMatcher.grammar_from_lark(value)
    return grammar


def _literally(text: str) -> str:
    """A regular expression that matches this text and no other."""
    return "".join(
        char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text
    )


def _can_begin(matcher: TokenMatcher) -> bool:
    try:
        return bool(matcher.allowed_tokens().any())
    except StructureError:
        return False


def _refusal(name: str, value: object, reason: str) -> RequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return RequestError(f"`{name}` is {shown}, which can't be used: {_gist(reason)}.")


def _gist(message: str) -> str:
    """The line of a message that says what is wrong: what stands around it draws a picture."""
    lines = message.strip().splitlines() or ["unknown error"]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (told or lines)[0].rstrip(".")
