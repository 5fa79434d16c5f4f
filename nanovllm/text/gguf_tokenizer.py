"""The tokenizer inside a `.gguf` file: from metadata to a `FastTokenizer`. Reads no file itself."""

from collections.abc import Mapping
from typing import Any

import attrs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from nanovllm.errors import ConfigError, WeightsError
from nanovllm.text.chat_template import ChatTemplates
from nanovllm.text.fast_tokenizer import FastTokenizer
from nanovllm.text.gguf_splits import SPLITS

_KEY = "tokenizer.ggml."

# Token types in the file. Type 6, one byte, needs no other treatment than normal ones.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5


def tokenizer_from_gguf(
    metadata: Mapping[str, Any], *, source: str, end_token_ids: frozenset[int]
) -> FastTokenizer:
    """Build the tokenizer that the metadata describes.

    Args:
        metadata: The file's metadata.
        source: The file, for messages.
        end_token_ids: Ids that end a text, as `gguf_file.end_token_ids` gives them.

    Raises:
        ConfigError: The file holds no tokenizer.
        WeightsError: It is of a kind that is not supported, or damaged.
    """
    if _KEY + "tokens" not in metadata:
        raise ConfigError(
            f"`{source}` holds no tokenizer; give `tokenizer=`, or pass token ids and "
            "`skip_tokenizer_init=True`."
        )
    vocabulary = _Vocabulary.read(metadata, source)
    model = metadata.get(_KEY + "model")
    if model == "gpt2":
        backend, adds_bos = _byte_level(vocabulary, metadata, source)
    elif model == "llama":
        backend, adds_bos = _sentence_piece(vocabulary, metadata, source), True
    else:
        raise WeightsError(
            f"`{source}` has a tokenizer of kind {model!r}, but gpt2 and llama are supported; give "
            "`tokenizer=`, a Hugging Face folder or hub id with the same vocabulary."
        )
    backend.add_special_tokens(vocabulary.added(_UNKNOWN, _CONTROL, special=True))
    backend.add_tokens(vocabulary.added(_USER_DEFINED, special=False))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{name}_token": vocabulary.tokens[token_id]
        for name, key in names.items()
        if 0 <= (token_id := metadata.get(f"{_KEY}{key}_token_id", -1)) < len(vocabulary.tokens)
    }
    _add_ends(
        backend,
        bos=special.get("bos_token") if metadata.get(_KEY + "add_bos_token", adds_bos) else None,
        eos=special.get("eos_token") if metadata.get(_KEY + "add_eos_token", False) else None,
    )
    template = "tokenizer.chat_template"
    return FastTokenizer(
        backend,
        eos_token_ids=end_token_ids,
        templates=ChatTemplates(metadata.get(template), metadata.get(template + ".tool_use")),
        special_tokens=special,
    )


@attrs.frozen
class _Vocabulary:
    """The file's tokens: strings, and the type of each."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]

    @classmethod
    def read(cls, metadata: Mapping[str, Any], source: str) -> "_Vocabulary":
        tokens = metadata[_KEY + "tokens"]
        types = metadata.get(_KEY + "token_type") or (_NORMAL,) * len(tokens)
        if len(types) != len(tokens):
            raise _damaged(source, f"{len(types)} types for {len(tokens)} tokens")
        return cls(tokens, types)

    def ids(self) -> dict[str, int]:
        """Ids by string, without the rows that only pad the matrix: those have no text."""
        pairs = zip(self.tokens, self.types, strict=True)
        return {token: i for i, (token, kind) in enumerate(pairs) if kind != _UNUSED}

    def added(self, *kinds: int, special: bool) -> list[AddedToken]:
        """Tokens of some types, to be matched whole in the raw text."""
        return [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in kinds
        ]


def _damaged(source: str, what: str) -> WeightsError:
    return WeightsError(
        f"`{source}` has a damaged tokenizer ({what}); download it again, or give `tokenizer=`."
    )


def _byte_level(
    vocabulary: _Vocabulary, metadata: Mapping[str, Any], source: str
) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether it adds BOS by default."""
    name = metadata.get(_KEY + "pre")
    split = SPLITS.get(str(name))
    if split is None:
        raise WeightsError(
            f"`{source}` wants text cut the way {name!r}, but {', '.join(SPLITS)} are supported; "
            "give `tokenizer=`, a Hugging Face folder or hub id with the same vocabulary."
        )
    ids = vocabulary.ids()
    merges = [_pair(line, source) for line in metadata.get(_KEY + "merges", ())]
    for left, right in merges:
        if left not in ids or right not in ids or left + right not in ids:
            raise _damaged(source, f"a merge of {left!r} and {right!r}, which makes no token")
    backend = Tokenizer(BPE(ids, merges, ignore_merges=split.whole_words))
    backend.decoder = decoders.ByteLevel()
    if split.compose:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.digits_apart:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return backend, split.adds_bos


def _pair(line: str, source: str) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not space or " " in right:
        raise _damaged(source, f"a merge {line!r} that is no pair")
    return left, right


def _sentence_piece(vocabulary: _Vocabulary, metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """SentencePiece BPE with byte fallback, as Llama 2 and Mistral have it.

    The normalizer runs on every stretch between added tokens, so each of them gets the space in
    front that SentencePiece puts before a text. That is what the models' own `tokenizer.json` does.
    """
    scores = metadata.get(_KEY + "scores", ())
    if len(scores) != len(vocabulary.tokens):
        raise _damaged(source, f"{len(scores)} scores for {len(vocabulary.tokens)} tokens")
    unknown = metadata.get(_KEY + "unknown_token_id", 0)
    if not 0 <= unknown < len(vocabulary.tokens):
        raise _damaged(source, f"no token {unknown} for what is unknown")
    backend = Tokenizer(
        BPE(
            vocabulary.ids(),
            _merges(vocabulary, scores),
            unk_token=vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_space = metadata.get(_KEY + "add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    undo: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if add_space:
        steps.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", left=1, right=0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(undo)
    return backend


def _merges(vocabulary: _Vocabulary, scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """The merges that SentencePiece makes: any two neighbours whose union is a token, best first.

    SentencePiece ranks unions; a list of merges ranks pairs. The two differ only where one union
    can be had from overlapping pairs, and there the longer left half goes first, as in the merges
    that Hugging Face derives.
    """
    normal = {
        token: score
        for token, kind, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
        if kind == _NORMAL
    }
    ranked = [
        (score, cut, union)
        for union, score in normal.items()
        for cut in range(1, len(union))
        if union[:cut] in normal and union[cut:] in normal
    ]
    ranked.sort(key=lambda item: item[:2], reverse=True)
    return [(union[:cut], union[cut:]) for _, cut, union in ranked]


def _add_ends(backend: Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Make `encode` put these tokens around a text."""
    ends = [token for token in (bos, eos) if token is not None]
    if not ends:
        return
    backend.post_processor = TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, backend.token_to_id(token)) for token in ends],
    )
