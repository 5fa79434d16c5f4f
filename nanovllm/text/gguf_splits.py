"""How byte-level vocabularies in `.gguf` files want text cut, by the names that the files use.

A wrong cut gives plausible ids and worse answers, and nothing would tell. So a name stands here
only if the model's own `tokenizer.json` is known, and every other one is refused.
"""

from collections.abc import Mapping

import attrs


@attrs.frozen
class Split:
    """How text is cut before the merges apply.

    Attributes:
        pattern: The pieces are its matches and what lies between them. None: as GPT-2 cuts.
        digits_apart: Before that, cut on both sides of every digit.
        compose: Before all, compose characters (NFC).
        whole_words: A piece that is a token is taken whole, whatever the merges say.
        adds_bos: Whether a text begins with BOS where the file does not say.
    """

    pattern: str | None = None
    digits_apart: bool = False
    compose: bool = False
    whole_words: bool = False
    adds_bos: bool = False


# The parts that the families share, tried from left to right at each place.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"

# Tekken's words end where capitals begin again, and a slash may end symbols as a line break does.
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORD = (
    r"[^\r\n\p{L}\p{N}]?" + _CAPITALS + "*" + _SMALL + "+|"
    r"[^\r\n\p{L}\p{N}]?" + _CAPITALS + "+" + _SMALL + "*"
)
_TEKKEN_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_GPT2 = Split()
_LLAMA3 = Split(
    "|".join((_CONTRACTION, _WORD, r"\p{N}{1,3}", _SYMBOLS, _SPACE)),
    whole_words=True,
    adds_bos=True,
)

SPLITS: Mapping[str, Split] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    # Trained with single digits, which GPT-2's own cut would leave together.
    "smollm": Split(digits_apart=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Split(
        "|".join((_CONTRACTION, _WORD, r"\p{N}", _SYMBOLS, _SPACE)),
        compose=True,
    ),
    "tekken": Split(
        "|".join((_TEKKEN_WORD, r"\p{N}", _TEKKEN_SYMBOLS, _SPACE)),
        whole_words=True,
        adds_bos=True,
    ),
}
"""By the value of `tokenizer.ggml.pre`."""
