import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from nanovllm.text.detokenizer import IncrementalDetokenizer
from tests.text.small_tokenizers import (
    BAD,
    BYTE_CHARS,
    FALLBACK,
    NO_STRING,
    PIECES,
    SAMPLES,
    SUFFIXED,
    TOKENIZERS,
    TOO_LARGE,
    bytes_of,
    continuation,
    stream,
)


class TestExamples:
    @pytest.mark.parametrize("text", SAMPLES)
    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    @pytest.mark.parametrize("tokenizer", [TOKENIZERS["byte-level"], FALLBACK])
    def test_one_byte_per_token_gives_whole_characters(self, tokenizer, text, size):
        pieces = stream(tokenizer, bytes_of(text), prompt=bytes_of("Hi"), size=size)

        assert "".join(pieces) == text
        if BAD not in text:
            assert BAD not in "".join(pieces)

    @pytest.mark.parametrize("text", SAMPLES[:-2])
    @pytest.mark.parametrize("tokenizer", [TOKENIZERS["byte-level"], FALLBACK])
    def test_a_character_comes_with_its_last_byte(self, tokenizer, text):
        pieces = stream(tokenizer, bytes_of(text))

        expected = []
        for character in text:
            expected += [""] * (len(character.encode()) - 1) + [character]
        assert pieces == [*expected, ""]

    def test_an_incomplete_tail_comes_out_at_the_end(self):
        ids = bytes_of("ab🌶")[:-1]

        assert stream(TOKENIZERS["byte-level"], ids) == ["a", "b", "", "", "", BAD]
        assert stream(FALLBACK, ids) == ["a", "b", "", "", "", BAD * 3]

    def test_the_whole_part_of_a_token_that_ends_in_half_a_character_comes_at_once(self):
        vocab = {"".join(BYTE_CHARS[b] for b in s): i for i, s in enumerate([b"hi \xf0", b"\x9f"])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.decoder = decoders.ByteLevel()

        assert stream(tokenizer, [0, 1]) == ["hi ", "", BAD]

    @pytest.mark.parametrize("tokenizer", [TOKENIZERS["byte-level"], FALLBACK])
    @pytest.mark.parametrize("num_missing", [1, 2, 3])
    def test_a_prompt_that_ends_in_half_a_character_is_not_repeated(self, tokenizer, num_missing):
        text = bytes_of("Hi 🌶")
        prompt, rest = text[:-num_missing], text[-num_missing:]

        assert "".join(stream(tokenizer, rest, prompt=prompt)) == "🌶"
        assert "".join(stream(tokenizer, [*rest, *bytes_of("!")], prompt=prompt)) == "🌶!"
        assert "".join(stream(tokenizer, [], prompt=prompt)) == ""

    def test_what_a_prompt_left_broken_belongs_to_the_prompt(self):
        prompt = bytes_of("Hi 🌶")[:-1]

        assert stream(TOKENIZERS["byte-level"], bytes_of("A"), prompt=prompt) == ["A", ""]

    @pytest.mark.parametrize("tokenizer", [FALLBACK, TOKENIZERS["metaspace"]])
    def test_the_space_of_the_first_token_shows_after_a_prompt_and_not_without(self, tokenizer):
        hello, lo = tokenizer.token_to_id("▁hello"), tokenizer.token_to_id("lo")

        assert stream(tokenizer, [hello, hello]) == ["hello", " hello", ""]
        assert stream(tokenizer, [hello, lo], prompt=[hello]) == [" hello", "lo", ""]
        assert stream(tokenizer, [lo, hello], prompt=[hello]) == ["lo", " hello", ""]

    def test_a_prompt_of_special_tokens_is_no_text(self):
        hello, end = FALLBACK.token_to_id("▁hello"), FALLBACK.token_to_id("<|end|>")

        assert stream(FALLBACK, [hello], prompt=[end] * 500) == ["hello", ""]

    def test_special_tokens_show_only_if_wanted_and_added_ones_always(self):
        tokenizer = TOKENIZERS["byte-level"]
        ids = [*b"a", tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<think>"), *b"b"]

        assert "".join(stream(tokenizer, ids)) == "a<think>b"
        assert "".join(stream(tokenizer, ids, skip_special_tokens=False)) == "a<|end|><think>b"

    @pytest.mark.parametrize("name", TOKENIZERS)
    def test_ids_without_a_string_are_no_text_and_no_error(self, name):
        ids = [NO_STRING, 2**32 - 1, 2**32, TOO_LARGE, -1]

        assert "".join(stream(TOKENIZERS[name], ids, prompt=ids)) == ""
        assert stream(TOKENIZERS[name], []) == [""]

    @pytest.mark.parametrize("tokenizer", [TOKENIZERS["byte-level"], FALLBACK])
    @pytest.mark.parametrize("num_between", [1, 300])
    def test_tokens_without_text_within_a_character_do_not_break_it(self, tokenizer, num_between):
        between = [tokenizer.token_to_id("<|end|>"), NO_STRING] * num_between
        ids = [i for byte in bytes_of("🌶") for i in (byte, *between)]

        assert "".join(stream(tokenizer, ids)) == "🌶"


class CountingDecoder:
    """Counts the ids that it is asked to decode."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.num_ids = 0

    def decode(self, ids, /, *, skip_special_tokens):
        self.num_ids += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


class TestCost:
    ENDLESS = (
        ("byte-level", bytes_of("Hello, 삼겹살! ")),
        ("byte-level", [0x80]),
        ("byte-level", [0xF0]),
        ("byte-level", [0x9F, 0xF0]),
        ("byte-level", [0xF0, 0x9F, 0x8C]),
        ("byte-level", [NO_STRING]),
        ("metaspace", [0]),
        ("wordpiece", [PIECES.index("##")]),
        ("wordpiece", [PIECES.index("un"), PIECES.index("##able")]),
        ("bpe with suffix", [SUFFIXED.index("</w>")]),
        ("no decoder", [len(SUFFIXED)]),
        ("fallback", bytes_of("🌶한")),
        ("fallback", [0x80]),
        ("fallback", [0x80, *bytes_of("🌶")]),
        ("fallback", [*bytes_of("🌶"), 0x80]),
        ("fallback", [*bytes_of("🌶"), 0x80, 256]),
    )

    @pytest.mark.parametrize(("name", "pattern"), ENDLESS)
    def test_a_token_costs_the_same_after_thousands(self, name, pattern):
        decoder = CountingDecoder({**TOKENIZERS, "fallback": FALLBACK}[name])
        detokenizer = IncrementalDetokenizer(decoder)
        costs = []
        for _ in range(4):
            decoder.num_ids = 0
            detokenizer.push((pattern * 1000)[:1000])
            costs.append(decoder.num_ids / 1000)

        assert max(costs) < 130
        assert costs[3] <= costs[1] * 1.2

    @pytest.mark.parametrize(("name", "pattern"), ENDLESS)
    def test_the_text_is_still_right_after_thousands(self, name, pattern):
        tokenizer = {**TOKENIZERS, "fallback": FALLBACK}[name]
        ids = pattern * (2000 // len(pattern))

        text = "".join(stream(tokenizer, ids))

        if name != "fallback" or len(pattern) == 1 or 0x80 not in pattern:
            assert text == continuation(tokenizer, [], ids)
        else:
            # Byte by byte it is U+FFFD, or else the character.
            assert set(text) <= {BAD, "🌶", " "}
            assert sum(4 if character == "🌶" else 1 for character in text) == len(ids)

    def test_a_long_prompt_costs_no_more_than_a_short_one(self):
        decoder = CountingDecoder(TOKENIZERS["byte-level"])

        IncrementalDetokenizer(decoder, prompt_token_ids=bytes_of("Hello, world! ") * 10_000)

        assert decoder.num_ids < 50


def test_the_bytes_are_those_of_the_library():
    assert sorted(BYTE_CHARS.values()) == sorted(ByteLevel.alphabet())
