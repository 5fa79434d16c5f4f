"""Small tokenizers of every kind of decoder, and what streaming their ids should give."""

import itertools

from tokenizers import AddedToken, Tokenizer, decoders, models

from nanovllm.text.detokenizer import IncrementalDetokenizer

BAD = "\N{REPLACEMENT CHARACTER}"
NO_STRING = 10**6
TOO_LARGE = 2**40


def byte_alphabet():
    """The character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict(zip(printable + others, map(chr, [*printable, *range(256, 256 + 68)]), strict=True))


BYTE_CHARS = byte_alphabet()

SAMPLES = (
    "🌶",
    "삼겹살 먹자",
    "ďábel",
    "🇩🇪🇰🇷",  # flags: two characters of four bytes each
    "👩\u200d👩\u200d👧\u200d👦",  # a family: people, joined
    "Hello, world!\n\n",
    "日本語",
    "a\u0301e\u0308",  # combining marks
    BAD,  # the character itself, as text
    "\x00\t ",
)


def byte_level():
    """Ids 0..255 are the bytes; then tokens that cut characters anywhere."""
    strings = [bytes([byte]) for byte in range(256)]
    text = "".join(SAMPLES).encode()
    strings += sorted({text[i : i + size] for size in (2, 3, 5) for i in range(len(text) - size)})
    vocab = {"".join(BYTE_CHARS[b] for b in s): i for i, s in enumerate(dict.fromkeys(strings))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return with_added_tokens(tokenizer)


def with_added_tokens(tokenizer):
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def byte_fallback():
    """Ids 0..255 are the bytes, as in Llama 2; then some words."""
    words = ["▁", "▁▁", "▁hello", "lo", "▁한", "국", "a", BAD, "<0xZZ>", "🌶", "▁don", "'", "t", "."]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return with_added_tokens(tokenizer)


def from_words(words, decoder):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    if decoder is not None:
        tokenizer.decoder = decoder
    return with_added_tokens(tokenizer)


SPACED = ["▁", "▁▁", "▁hello", "lo", "▁한", "국", "a▁b", BAD]
PIECES = [
    "[UNK]",
    "un",
    "##believ",
    "##able",
    "##",
    "한",
    ".",
    "'",
    "##s",
    "do",
    "n't",
    "#",
    "###x",
]
SUFFIXED = ["he", "llo</w>", "a</w>", "</w>", "한", "국</w>", "."]

TOKENIZERS = {
    "byte-level": byte_level(),
    "metaspace": from_words(SPACED, decoders.Metaspace()),
    "metaspace, no prefix": from_words(SPACED, decoders.Metaspace(prepend_scheme="never")),
    "wordpiece": from_words(PIECES, decoders.WordPiece()),
    "wordpiece, as it is": from_words(PIECES, decoders.WordPiece(cleanup=False)),
    "bpe with suffix": from_words(SUFFIXED, decoders.BPEDecoder()),
    "no decoder": from_words([*SUFFIXED, ""], None),
    "fused": from_words(SUFFIXED, decoders.Fuse()),
}
FALLBACK = byte_fallback()


def continuation(tokenizer, prompt, ids, skip_special_tokens=True):
    """What the ids add to the prompt's text: the law that the class states."""

    def decode(some):
        known = [i for i in some if i < TOO_LARGE]
        return tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

    before, after = decode(prompt), decode([*prompt, *ids])
    common = sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(before, after)))  # noqa: B905
    return after[common:]


def stream(tokenizer, ids, prompt=(), size=1, skip_special_tokens=True):
    detokenizer = IncrementalDetokenizer(
        tokenizer, prompt_token_ids=prompt, skip_special_tokens=skip_special_tokens
    )
    pieces = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*pieces, detokenizer.flush()]


def bytes_of(text):
    return list(text.encode())
