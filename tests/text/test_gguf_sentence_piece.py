import itertools

import pytest

from nanovllm.errors import WeightsError
from nanovllm.model.gguf_file import end_token_ids
from nanovllm.text.gguf_tokenizer import tokenizer_from_gguf
from tests.tokenizer_files import texts


def build(metadata):
    return tokenizer_from_gguf(metadata, source="tiny.gguf", end_token_ids=end_token_ids(metadata))


# fmt: off
_PIECES = [
    "▁t", "he", "▁the", "in", "▁a", "re", "on", "er", "nd", "▁s", "▁w", "▁o", "ou", "en", "it",
    "at", "an", "or", "es", "is", "ing", "▁c", "▁p", "▁f", "▁b", "▁and", "ed", "▁d", "to", "al",
    "▁to", "▁th", "ar", "om", "as", "▁m", "▁h", "▁in", "st", "ion", "ent", "▁of", "▁▁", "▁▁▁▁",
    "aa", "ab", "abc", "bcd", "cd", "bc",
]
# fmt: on


def sentence_piece_metadata(**more):
    letters = sorted({*"▁theinaroudsgwcpfbl.,zq'xé日", *"".join(_PIECES)})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(tokens)
    # Training lists pieces as it finds them, best first, and then the letters.
    for rank, piece in enumerate([*_PIECES, *letters]):
        tokens.append(piece)
        types.append(1)
        scores.append(-float(rank))
    tokens.append("<|im_end|>")
    types.append(4)
    scores.append(0.0)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": tuple(types),
        "tokenizer.ggml.scores": tuple(scores),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def sentence_piece_ids(metadata, text):
    """What SentencePiece does, step by step: merge the best pair of neighbours, leftmost first."""
    tokens, types, scores = (
        metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores")
    )
    ids = {token: i for i, token in enumerate(tokens)}
    score = {token: scores[i] for token, i in ids.items() if types[i] == 1}
    symbols = list(text.replace(" ", "▁"))
    while True:
        unions = [left + right for left, right in itertools.pairwise(symbols)]
        known = [(-score[union], place) for place, union in enumerate(unions) if union in score]
        if not known:
            break
        place = min(known)[1]
        symbols[place : place + 2] = [unions[place]]
    found = []
    for symbol in symbols:
        fallback = [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        found += [ids[symbol]] if symbol in score else fallback
    return found


def test_merges_by_score_as_sentence_piece_does():
    metadata = sentence_piece_metadata()
    tokenizer = build(metadata)
    plain = [text for text in texts() if text and "<" not in text]
    plain += ["the thing and the other one", "aaaa abcd bcd abcabcd", "   the      end "]

    for text in plain:
        # Before the text goes BOS, and a space.
        assert tokenizer.encode(text) == [1, *sentence_piece_ids(metadata, " " + text)], text


def test_every_stretch_between_marks_begins_with_a_space():
    tokenizer = build(sentence_piece_metadata())

    tokens = [tokenizer.token(token_id) for token_id in tokenizer.encode("</s>the<|im_end|>in")]

    assert tokens == ["<s>", "</s>", "▁the", "<|im_end|>", "▁in"]


def test_text_comes_back_through_bytes_and_without_the_space_in_front():
    tokenizer = build(sentence_piece_metadata())

    for text in texts():
        if "<" not in text:
            assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_a_file_may_ask_for_no_space_in_front_and_no_beginning():
    metadata = sentence_piece_metadata(add_space_prefix=False, add_bos_token=False)
    tokenizer = build(metadata)

    assert [tokenizer.token(token_id) for token_id in tokenizer.encode("to the")] == ["to", "▁the"]
    assert tokenizer.decode(tokenizer.encode(" to"), skip_special_tokens=True) == " to"


def test_an_unknown_mark_is_special_and_a_users_token_is_text():
    tokenizer = build(sentence_piece_metadata())

    assert [tokenizer.is_special(token_id) for token_id in range(4)] == [True, True, True, False]
    assert not tokenizer.is_special(tokenizer.vocab_size - 1)
    assert tokenizer.token(tokenizer.vocab_size - 1) == "<|im_end|>"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("scores", (1.0,), "1 scores for"), ("unknown_token_id", 10**6, "no token 1000000")],
)
def test_refuses_damaged_sentence_piece_vocabularies(key, value, message):
    with pytest.raises(WeightsError, match=message):
        build(sentence_piece_metadata(**{key: value}))
