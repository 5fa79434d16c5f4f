"""What a tokenizer is to the rest of the engine, and how to get the one of a model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Protocol

import tokenizers

from nanovllm.errors import ConfigError
from nanovllm.hub import VOCABULARY_FILES, FilesKind, ModelFiles, find_tokenizer, say
from nanovllm.text.folder_tokenizer import tokenizer_from_folder
from nanovllm.text.gguf_tokenizer import tokenizer_from_gguf


class Tokenizer(Protocol):
    """Text to ids and back. Immutable; its methods may be called from any thread."""

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, for decoding step by step. Not to be changed."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text, as far as the tokenizer's files say; perhaps none."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has a string; a model may have rows for more."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with BOS or EOS if this tokenizer adds them by itself.

        Raises:
            RequestError: The text is not valid Unicode.
        """

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Text of ids. Ids that mean nothing give nothing, and no space is cleaned up."""

    def token(self, token_id: int) -> str | None:
        """The vocabulary's string of an id, or None if it has none."""

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a mark such as end-of-turn, which is no part of the text.

        Tokens that were merely added to the vocabulary are part of it.
        """

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text of a conversation, by the model's chat template.

        Raises:
            RequestError: The messages are malformed, the template refuses them, or there is none.
        """

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """The ids of what `render_chat` gives; BOS and the like are the template's to write."""


def load_tokenizer(
    files: ModelFiles,
    *,
    tokenizer: str | PathLike[str] | None = None,
    progress: Callable[[str], None] = say,
) -> Tokenizer:
    """Load a model's tokenizer, or another one.

    Args:
        files: The model.
        tokenizer: Take the tokenizer from here instead: what `find_model` takes, but a folder
            needs no model in it.
        progress: Called with a line before a download.

    Raises:
        ConfigError: There is no tokenizer, or none at `tokenizer`.
        WeightsError: Its files are damaged or of an unsupported kind.
    """
    if tokenizer is not None:
        files = find_tokenizer(tokenizer, progress=progress)
    if files.kind is FilesKind.GGUF:
        # The reader lives with the weights; through it a model folder's tokenizer loads no more.
        from nanovllm.model.gguf_file import end_token_ids, read_gguf

        metadata = read_gguf(files.path).metadata
        return tokenizer_from_gguf(
            metadata, source=str(files.path), end_token_ids=end_token_ids(metadata)
        )
    if not any(next(files.path.glob(pattern), None) for pattern in VOCABULARY_FILES):
        raise ConfigError(
            f"`{files.path}` holds no tokenizer (one of {', '.join(VOCABULARY_FILES)}); give "
            "`tokenizer=`, or pass token ids and `skip_tokenizer_init=True`."
        )
    return tokenizer_from_folder(files.path)
