"""`FastTokenizer`: a tokenizer over the `tokenizers` library, whatever files it was built from."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import tokenizers

from nanovllm.errors import RequestError
from nanovllm.text.chat_template import ChatTemplates, render

_ID_LIMIT = 1 << 32


@attrs.frozen(eq=False, slots=False)
class FastTokenizer:
    """Implements `Tokenizer`.

    Attributes:
        backend: The library's tokenizer. Not to be changed once it is here.
        eos_token_ids: Ids that end a text, as far as the tokenizer's files say.
        templates: Chat templates.
        special_tokens: Strings that templates may name, such as `bos_token`.
    """

    backend: tokenizers.Tokenizer
    eos_token_ids: frozenset[int] = frozenset()
    templates: ChatTemplates = attrs.field(factory=ChatTemplates)
    special_tokens: Mapping[str, str] = attrs.field(factory=dict)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id that has a string."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with BOS or EOS if this tokenizer adds them by itself."""
        return self._encode(text, add_special_tokens=True)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Text of ids. Ids that mean nothing give nothing, and no space is cleaned up."""
        # Ids inside the range that have no string are dropped by the library.
        known = [token_id for token_id in ids if 0 <= token_id < _ID_LIMIT]
        return self.backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's string of an id, or None if it has none."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < _ID_LIMIT else None

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a mark such as end-of-turn, which is no part of the text."""
        return token_id in self._special_ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text of a conversation, by the model's chat template."""
        return render(
            self.templates.choose(with_tools=bool(template_kwargs.get("tools"))),
            messages,
            add_generation_prompt=add_generation_prompt,
            variables={**self.special_tokens, **template_kwargs},
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """The prompt's ids. The template writes BOS where it belongs, so none is added here."""
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            # The library's word for no string, and for one with half a surrogate pair in it.
            shown = repr(text)
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            raise RequestError(
                f"The prompt is {shown} but must be text that UTF-8 can encode."
            ) from error
