import itertools

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from nanovllm.text.detokenizer import IncrementalDetokenizer
from tests.text.small_tokenizers import (
    BAD,
    BYTE_CHARS,
    FALLBACK,
    NO_STRING,
    SAMPLES,
    TOKENIZERS,
    TOO_LARGE,
    bytes_of,
    continuation,
    stream,
)


def ids_of(tokenizer, **kwargs):
    token_id = st.integers(0, tokenizer.get_vocab_size() - 1)
    return st.lists(token_id | st.sampled_from([NO_STRING, TOO_LARGE]), **kwargs)


class TestEqualityWithDecode:
    @pytest.mark.parametrize("name", TOKENIZERS)
    @settings(deadline=None, max_examples=60)
    @given(st.data())
    def test_the_pieces_are_what_decode_makes_of_all(self, name, data):
        tokenizer = TOKENIZERS[name]
        skip = data.draw(st.booleans(), label="skip_special_tokens")
        prompt = data.draw(ids_of(tokenizer, max_size=40), label="prompt")
        ids = data.draw(ids_of(tokenizer, max_size=80), label="ids")
        size = data.draw(st.integers(1, 4), label="size")

        pieces = stream(tokenizer, ids, prompt, size, skip)

        assert "".join(pieces) == continuation(tokenizer, prompt, ids, skip)

    # Bytes that begin and continue characters, so that these are often cut and often completed.
    CRITICAL = st.sampled_from(b"a\x80\x9f\x8c\xb6\xbf\xbd\xc3\xe2\xed\xef\xf0\xf4\xff")

    @settings(deadline=None, max_examples=300)
    @given(st.lists(CRITICAL, max_size=6), st.lists(CRITICAL, max_size=120), st.integers(1, 4))
    def test_they_are_so_for_garbage_bytes(self, prompt, ids, size):
        tokenizer = TOKENIZERS["byte-level"]

        pieces = stream(tokenizer, ids, prompt, size)

        assert "".join(pieces) == continuation(tokenizer, prompt, ids)

    @settings(deadline=None, max_examples=100)
    @given(st.lists(st.sampled_from(SAMPLES), max_size=12).map("".join), st.data())
    def test_they_are_so_for_text_cut_anywhere(self, text, data):
        tokenizer, left, ids = TOKENIZERS["byte-level"], text.encode(), []
        while left:
            size = data.draw(st.integers(1, 5))
            token_id = tokenizer.token_to_id("".join(BYTE_CHARS[byte] for byte in left[:size]))
            if token_id is not None:
                ids.append(token_id)
                left = left[size:]
        num_prompt = data.draw(st.integers(0, len(ids)))

        pieces = stream(tokenizer, ids[num_prompt:], ids[:num_prompt])

        assert "".join(stream(tokenizer, ids)) == text
        assert "".join(pieces) == continuation(tokenizer, ids[:num_prompt], ids[num_prompt:])

    @pytest.mark.parametrize("name", TOKENIZERS)
    @settings(deadline=None, max_examples=30)
    @given(st.data())
    def test_nothing_but_an_incomplete_end_is_held_back(self, name, data):
        tokenizer = TOKENIZERS[name]
        ids = data.draw(ids_of(tokenizer, max_size=40), label="ids")
        detokenizer = IncrementalDetokenizer(tokenizer)
        shown = ""
        for num_ids, token_id in enumerate(ids, start=1):
            shown += detokenizer.push([token_id])

            so_far = continuation(tokenizer, [], ids[:num_ids])
            assert so_far.startswith(shown)
            assert so_far[len(shown) :] in ("", BAD, BAD * 2, BAD * 3)


class TestByteFallback:
    """Where `decode` takes back what it gave, and where it does not."""

    @staticmethod
    def expected(ids):
        """`decode`, but a run of bytes keeps the good characters before its first bad byte."""
        text = ""
        ids = [i for i in ids if FALLBACK.decode([i, i])]
        for is_bytes, group in itertools.groupby(ids, lambda i: i < 256):
            if is_bytes:
                run = bytes(group)
                good = max(n for n in range(len(run) + 1) if is_utf8(run[:n]))
                text += run[:good].decode() + BAD * (len(run) - good)
            else:
                text += "".join(FALLBACK.id_to_token(i) for i in group).replace("▁", " ")
        return text.removeprefix(" ")

    # Not U+FFFD itself, written as the bytes EF BF BD: see the class.
    TEXTS = st.sampled_from([sample for sample in SAMPLES if sample != BAD])
    BYTES = st.sampled_from(b"a\x80\x9f\x8c\xb6\xbf\xc3\xe2\xed\xef\xf0\xf4\xff")
    IDS = st.lists(
        st.lists(BYTES, max_size=6)
        | TEXTS.map(bytes_of)
        | st.lists(st.integers(256, FALLBACK.get_vocab_size() - 1), max_size=6),
        max_size=12,
    ).map(lambda lists: list(itertools.chain(*lists)))

    @settings(deadline=None, max_examples=300)
    @given(IDS, st.integers(1, 4))
    @example([*bytes_of("a🌶한"), 0x80, *b"bc"], 1)
    @example([0xF0, *bytes_of("🌶한")], 1)
    def test_is_decode_but_for_good_characters_before_a_bad_byte(self, ids, size):
        expected = self.expected(ids)
        runs = [list(g) for b, g in itertools.groupby(ids, lambda i: i < 256) if b]
        assume(max(map(len, runs), default=0) <= 40)

        assert "".join(stream(FALLBACK, ids, size=size)) == expected
        if all(is_utf8(bytes(run)) for run in runs):
            assert FALLBACK.decode(ids) == expected

    @settings(deadline=None, max_examples=100)
    @given(st.data())
    def test_is_decode_after_a_prompt_for_text_that_is_well_formed(self, data):
        parts = st.lists(
            self.TEXTS.map(bytes_of)
            | st.lists(st.integers(256, FALLBACK.get_vocab_size() - 1), max_size=6),
            max_size=12,
        ).map(lambda lists: list(itertools.chain(*lists)))
        ids = data.draw(parts, label="ids")
        num_prompt = data.draw(st.integers(0, len(ids)), label="num_prompt")
        prompt, rest = ids[:num_prompt], ids[num_prompt:]
        runs = [list(g) for b, g in itertools.groupby(prompt, lambda i: i < 256) if b]
        assume(max(map(len, runs), default=0) <= 40)

        text = "".join(stream(FALLBACK, rest, prompt))

        if BAD not in FALLBACK.decode(prompt):
            assert text == continuation(FALLBACK, prompt, rest)
        else:
            # The prompt ends in half a character, of which `decode` makes more than one.
            assert FALLBACK.decode(ids).endswith(text)

    def test_what_follows_a_broken_run_is_right_again(self):
        hello = FALLBACK.token_to_id("▁hello")

        pieces = stream(FALLBACK, [*bytes_of("ok"), 0xFF, *bytes_of("no"), hello, *b"ok"])

        assert "".join(pieces) == "ok" + BAD * 3 + " hello" + "ok"


def is_utf8(some):
    try:
        some.decode()
    except UnicodeDecodeError:
        return False
    return True
