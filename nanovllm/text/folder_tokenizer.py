"""The tokenizer in a Hugging Face folder: `tokenizer.json` by itself, or through transformers.

Importing transformers takes seconds, and a `tokenizer.json` says nearly all there is to say. So the
light way is taken if what else is in the folder agrees with that file, and the long way otherwise.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from tokenizers import AddedToken, Tokenizer, decoders

from nanovllm.errors import ConfigError, WeightsError
from nanovllm.text.chat_template import ChatTemplates
from nanovllm.text.fast_tokenizer import FastTokenizer

_CONFIG, _TOKENIZER = "tokenizer_config.json", "tokenizer.json"
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

_AS_WRITTEN = frozenset({"PreTrainedTokenizer", "TokenizersBackend"})
"""Classes, without their `Fast`, that take `tokenizer.json` as it is."""

_BYTE_LEVEL = frozenset({"GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer", None})
"""Classes of models whose byte-level `tokenizer.json` is what they were trained with.

transformers 5 builds some of these anew from the vocabulary alone. That loses what the file says
besides, for instance that SmolLM2, which calls itself GPT2Tokenizer, has its digits one by one.
"""


@attrs.frozen
class _Folder:
    """The small files beside a vocabulary.

    Attributes:
        path: The folder.
        config: `tokenizer_config.json`, or empty.
        special_tokens: Special tokens by name, as far as the folder names them.
        templates: Chat templates.
    """

    path: Path
    config: Mapping[str, Any]
    special_tokens: Mapping[str, str]
    templates: ChatTemplates


def tokenizer_from_folder(path: Path) -> FastTokenizer:
    """Load the tokenizer of a folder that has one.

    Raises:
        ConfigError: transformers cannot load it, or only as one that is not a fast tokenizer.
        WeightsError: A file is damaged.
    """
    folder = _read_folder(path)
    if (path / _TOKENIZER).is_file():
        backend = _read_backend(path / _TOKENIZER)
        if _agrees(folder, backend):
            # A tokenizer trains with limits that do not bind its users.
            backend.no_truncation()
            backend.no_padding()
            eos = folder.special_tokens.get("eos_token")
            eos_id = None if eos is None else backend.token_to_id(eos)
            return FastTokenizer(
                backend,
                eos_token_ids=frozenset() if eos_id is None else frozenset({eos_id}),
                templates=folder.templates,
                special_tokens=folder.special_tokens,
            )
    return _through_transformers(folder)


def _read_folder(path: Path) -> _Folder:
    config = _read_json(path / _CONFIG)
    named: dict[str, Any] = {}
    # As in transformers, the older file counts where the newer one does not list its tokens.
    for source in (config, {} if "added_tokens_decoder" in config else _special_map(path)):
        named |= {key: source[key] for name in _SPECIAL if (key := f"{name}_token") in source}
    special = {key: text for key, value in named.items() if (text := _content(value)) is not None}
    return _Folder(path, config, special, _read_templates(path, config))


def _special_map(path: Path) -> Mapping[str, Any]:
    return _read_json(path / "special_tokens_map.json")


def _read_json(path: Path) -> Mapping[str, Any]:
    text = _read_text(path)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except ValueError as error:
        raise WeightsError(f"`{path}` is no JSON ({error}); download it again.") from error
    if not isinstance(content, dict):
        raise WeightsError(f"`{path}` holds no JSON object; download it again.")
    return content


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise WeightsError(f"`{path}` cannot be read ({error}); download it again.") from error


def _content(token: Any) -> str | None:
    """A token's string; files write it bare, or as an object with its properties."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _read_templates(path: Path, config: Mapping[str, Any]) -> ChatTemplates:
    template = _read_text(path / "chat_template.jinja")
    if template is not None:
        tool_use = path / "additional_chat_templates" / "tool_use.jinja"
        return ChatTemplates(template, _read_text(tool_use))
    value = config.get("chat_template")
    if value is None:
        value = _read_json(path / "chat_template.json").get("chat_template")
    return ChatTemplates.from_config(value)


def _read_backend(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    # The library raises nothing narrower.
    except Exception as error:
        raise WeightsError(
            f"`{path}` is no tokenizer that this version of tokenizers can read ({error}); "
            "download it again, or get a newer tokenizers package."
        ) from error


def _agrees(folder: _Folder, backend: Tokenizer) -> bool:
    """Whether the other files add nothing to `tokenizer.json` that would change an id."""
    config = folder.config
    declared = config.get("tokenizer_class") or _read_json(folder.path / "config.json").get(
        "tokenizer_class"
    )
    if isinstance(declared, str):
        declared = declared.removesuffix("Fast")
    is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
    if declared not in _AS_WRITTEN and not (declared in _BYTE_LEVEL and is_byte_level):
        return False
    asks_for_more = ("auto_map", "split_special_tokens", "fix_mistral_regex", "add_prefix_space")
    if any(config.get(key) for key in asks_for_more):
        return False
    added = {str(i): token for i, token in backend.get_added_tokens_decoder().items()}
    specials = {token.content for token in added.values() if token.special}
    if not specials.issuperset(_wanted_specials(folder)):
        return False
    listed = config.get("added_tokens_decoder") or {}
    return all(i in added and _same(token, added[i]) for i, token in listed.items())


def _wanted_specials(folder: _Folder) -> Iterator[str]:
    """Strings that transformers would make special tokens, whatever `tokenizer.json` says."""
    yield from folder.special_tokens.values()
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = folder.config.get(key) or ()
        for token in more.values() if isinstance(more, Mapping) else more:
            yield _content(token) or ""


def _same(listed: Any, added: AddedToken) -> bool:
    return bool(
        isinstance(listed, Mapping)
        and listed.get("content") == added.content
        and listed.get("special", False) == added.special
        and listed.get("lstrip", False) == added.lstrip
        and listed.get("rstrip", False) == added.rstrip
        and listed.get("normalized", not added.special) == added.normalized
        and listed.get("single_word", False) == added.single_word
    )


def _through_transformers(folder: _Folder) -> FastTokenizer:
    import transformers  # takes seconds, and most folders do without

    try:
        loaded = transformers.AutoTokenizer.from_pretrained(
            str(folder.path), trust_remote_code=False, local_files_only=True
        )
    # Whatever a tokenizer class of its own does with files that it does not like.
    except Exception as error:
        raise ConfigError(
            f"transformers cannot load the tokenizer of `{folder.path}` ({error}); check its "
            "files, or give `tokenizer=`. Code inside model folders is never run."
        ) from error
    if not isinstance(loaded, transformers.PreTrainedTokenizerFast):
        raise ConfigError(
            f"`{folder.path}` has a {type(loaded).__name__}, but only fast tokenizers are "
            "supported; give `tokenizer=`, a folder with a tokenizer.json."
        )
    eos = loaded.eos_token_id
    return FastTokenizer(
        loaded.backend_tokenizer,
        eos_token_ids=frozenset() if eos is None else frozenset({eos}),
        templates=ChatTemplates.from_config(loaded.chat_template),
        special_tokens=dict(loaded.special_tokens_map),
    )
