"""Text of tokens as they come: never half a character, and no token decoded over and over.

A decoder is only known by what it makes of a list of ids. So the last few tokens, the window, are
decoded anew with each token, and what has come to their text is shown. Three facts make it right:

1. What a token means depends on its neighbours only: a space at the start of a text is left out,
   a character is spread over a few tokens.
2. UTF-8 finds its feet again: after the bytes that continue a cut character, three at most, it no
   longer matters where decoding began. So only the first characters of a window are unsure.
3. A character that lacks bytes shows as U+FFFD, once or once per byte, and thus at the very end
   of the text and at most three times. These are held back, and all else is final.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes that are no character, or not yet."""

_MAX_HELD = 3
"""A character of UTF-8 has four bytes at most, so that no more than three can be waiting."""

_NUM_UNSURE = 4
"""Characters at the start of a window that may be others than in the whole text.

These are the bytes of a cut character, at most three, and a space more or less, or instead a mark
such as the `##` of WordPiece, which shows only at the start of a text.
"""

_WINDOW_SIZES = (8, 16, 40)
"""Tokens to keep, the first that will do. 40 bytes always will: they are 10 characters or more."""

_WINDOW_LIMIT = 96
"""Tokens after which a window is given up for which none of the sizes did."""

_NUM_IDS = 2**32
"""Ids are 32-bit numbers to a tokenizer, which refuses others rather than give them no text."""


class Decoder(Protocol):
    """The part of a tokenizer that is needed here. `tokenizers.Tokenizer` has it."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """Text of ids. An id without a string has none."""


class IncrementalDetokenizer:
    """Gives the text of generated tokens, piece by piece.

    All pieces and the `flush` together are what `decode` makes of all tokens. After a prompt they
    are what `decode` makes of prompt and tokens, less the beginning that it has in common with
    what `decode` makes of the prompt alone.

    There are two exceptions.

    - Bytes as tokens, such as `<0xE2>` (the byte fallback of SentencePiece): of a run of these the
      decoder makes U+FFFD only, one per byte, if there is any byte in it that fits no character.
      So it takes back good characters that came before this byte. They are not taken back here;
      this byte and the rest of the run are U+FFFD. A run is remembered for about `_WINDOW_LIMIT`
      tokens at most, so that a longer one may recover. And U+FFFD itself, if it comes in three such
      bytes with more bytes behind it, may be shown up to three times.
    - Decoders that look further than to the neighbours: a clean-up of spaces in the whole text, or
      the merging of equal tokens over a blank in speech recognition (CTC).
    """

    def __init__(
        self,
        tokenizer: Decoder,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """Begin after a prompt.

        Args:
            tokenizer: Decodes a few ids at a time.
            prompt_token_ids: What the tokens continue. Only its end is looked at.
            skip_special_tokens: Leave special tokens such as end-of-turn out of the text.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window, self._text = self._end_of(prompt_token_ids)
        # `_text[:_num_shown]` was shown, the rest is held; of the rest the prompt has this much.
        self._num_prompt = _num_waiting(self._text)
        self._num_shown = len(self._text) - self._num_prompt
        self._shorten()

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the text that has become certain."""
        return "".join([self._push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return what is held back, as no token is to follow: U+FFFD, if anything."""
        return self._show(len(self._text))

    def _push(self, token_id: int) -> str:
        if not 0 <= token_id < _NUM_IDS:
            return ""
        text = self._decode([*self._window, token_id])
        if text == self._text and self._decode([token_id, token_id]) == "":
            # It has no text anywhere. Many such tokens may come, so that they are not kept.
            return ""
        if text.startswith(self._text[: self._num_shown]):
            self._window.append(token_id)
            self._text = text
        else:
            # A run of bytes no longer fits, or does so now. What was shown stays; go on without.
            held = self._held_tokens()
            # Of a prompt more may be held than the last character, which is complete now.
            tails = ([*held[start:], token_id] for start in range(len(held)))
            whole = (tail for tail in tails if REPLACEMENT not in self._decode(tail))
            self._restart(next(whole, [*held, token_id]))
        new = self._show(len(self._text) - _num_waiting(self._text))
        # Not each time: shortening costs as much as decoding.
        if len(self._window) % _WINDOW_SIZES[0] == 0:
            self._shorten()
        return new

    def _show(self, end: int) -> str:
        """Show the text up to `end`, but not what is the prompt's."""
        start = self._num_shown
        while start < end and self._num_prompt > 0:
            if self._text[start] == REPLACEMENT:
                start += 1
                self._num_prompt -= 1
            else:
                # The prompt's half character has become a whole one, which is new.
                self._num_prompt = 0
        # Not less than before, should tokens follow a `flush` after all.
        self._num_shown = max(start, end)
        return self._text[start:end]

    def _shorten(self) -> None:
        """Forget the tokens that do not matter any more."""
        for size in _WINDOW_SIZES:
            if len(self._window) <= size:
                return
            window = self._window[-size:]
            text = self._decode(window)
            sure = text[_NUM_UNSURE:]
            # U+FFFD alone may be a run of bytes that began earlier: the more of it the better.
            is_anchored = sure.strip(REPLACEMENT) != "" or size == _WINDOW_SIZES[-1]
            # One more than can be held, so that all that is held is sure.
            if is_anchored and len(sure) > _MAX_HELD and self._text.endswith(sure):
                self._num_shown -= len(self._text) - len(text)
                self._window, self._text = window, text
                return
        if len(self._window) >= _WINDOW_LIMIT:
            self._restart(self._held_tokens())

    def _held_tokens(self) -> list[int]:
        """The tokens of the text that is held, where they are single bytes, each one U+FFFD."""
        num_held = len(self._text) - self._num_shown
        # Not [-num_held:], which is all of them if nothing is held.
        return self._window[len(self._window) - num_held :]

    def _restart(self, token_ids: list[int]) -> None:
        """Begin a new window with these tokens, none of whose text was shown.

        In front of them goes any token that they leave alone, so that they do not seem to be the
        start of a text.
        """
        for first in reversed(self._window):
            front = self._decode([first])
            if front and REPLACEMENT not in front:
                text = self._decode([first, *token_ids])
                if text.startswith(front):
                    self._window, self._text = [first, *token_ids], text
                    self._num_shown = len(front)
                    return
        self._window, self._text = token_ids, self._decode(token_ids)
        self._num_shown = 0

    def _end_of(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], str]:
        """As much of the end of a prompt as it takes for some text that is sure, and this text."""
        size = _WINDOW_SIZES[0]
        while True:
            window = [i for i in prompt_token_ids[-size:] if 0 <= i < _NUM_IDS]
            text = self._decode(window)
            # As in `_shorten`, but without the whole text to compare with.
            is_anchored = text[_NUM_UNSURE:].strip(REPLACEMENT) != "" or size >= _WINDOW_LIMIT
            if is_anchored and len(text) > _NUM_UNSURE + _MAX_HELD:
                return window, text
            if size >= len(prompt_token_ids):
                return window, text
            size *= 2

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _num_waiting(text: str) -> int:
    """How many characters at the end may become another one with the next bytes."""
    end = text[-_MAX_HELD:]
    return len(end) - len(end.rstrip(REPLACEMENT))
