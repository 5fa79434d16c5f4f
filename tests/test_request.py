import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from nanovllm import SamplingParams
from nanovllm.core import FinishReason
from nanovllm.outputs import TokenLogprobs
from nanovllm.request import Completion, Request
from nanovllm.text.detokenizer import IncrementalDetokenizer
from tests.text.small_tokenizers import BAD, TOKENIZERS, bytes_of, from_words

BYTES = TOKENIZERS["byte-level"]  # ids 0 to 255 are the bytes
WORDS = from_words(["[UNK]", "ab", "cd", "ef", "gh"], decoders.Fuse())
END = BYTES.token_to_id("<|end|>")  # a special token
THINK = BYTES.token_to_id("<think>")  # an added one that is part of the text


def completion(tokenizer=BYTES, *, prompt=(), index=0, **params):
    params = SamplingParams(max_tokens=1000, **params)
    detokenizer = None
    if params.detokenize:
        detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids=prompt,
            skip_special_tokens=params.skip_special_tokens,
        )
    return Completion(index, index, 0, params, detokenizer)


def logprob(token_id, value=-0.5):
    return TokenLogprobs(token_id, value, 1, ((token_id, value),))


def feed(made, ids, last=None):
    """Append tokens until one ends it; `last` is what the core says of the last one."""
    deltas = []
    for place, token_id in enumerate(ids, start=1):
        made.append(token_id, logprob(token_id), last if place == len(ids) else None)
        deltas.append(made.take_delta("r"))
        if made.finish_reason is not None:
            break
    return deltas


def ended(ids, last=FinishReason.LENGTH, *args, **params):
    """What becomes of these tokens, having seen that the deltas together are just that."""
    made = completion(*args, **params)
    deltas = feed(made, ids, last)
    output = made.output()
    assert "".join(delta.text for delta in deltas) == output.text
    assert tuple(i for delta in deltas for i in delta.token_ids) == output.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == output.finish_reason
    assert deltas[-1].stop_reason == output.stop_reason
    return output


class TestStopStrings:
    @pytest.mark.parametrize(
        ("stop", "text", "num_tokens", "found"),
        [
            ("bc", "a", 2, "bc"),
            (("d", "bc"), "a", 2, "bc"),  # the first to be complete wins
            (("bcd", "cd", "d"), "a", 2, "bcd"),
            ("a", "", 1, "a"),
            ("abcdefgh", "", 4, "abcdefgh"),
            ("h", "abcdefg", 4, "h"),
            ("fg", "abcde", 4, "fg"),
        ],
    )
    @pytest.mark.parametrize("include", [False, True])
    def test_a_stop_string_is_found_wherever_the_tokens_are_cut(
        self, stop, text, num_tokens, found, include
    ):
        output = ended((1, 2, 3, 4), None, WORDS, stop=stop, include_stop_str_in_output=include)

        assert output.text == text + (found if include else "")
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, found)
        assert output.token_ids == (1, 2, 3, 4)[:num_tokens]

    @pytest.mark.parametrize("stop", ["abcdefghi", "x", ("ghi", "ba")])
    def test_an_unfinished_stop_string_is_text_after_all(self, stop):
        output = ended((1, 2, 3, 4), FinishReason.LENGTH, WORDS, stop=stop)

        assert output.text == "abcdefgh"
        assert (output.finish_reason, output.stop_reason) == (FinishReason.LENGTH, None)

    def test_nothing_that_may_become_a_stop_string_is_shown_early(self):
        made = completion(WORDS, stop="bcdex")

        assert [delta.text for delta in feed(made, [1, 2, 3, 4])] == ["a", "", "bcdef", "gh"]

    def test_the_last_token_may_complete_a_stop_string(self):
        output = ended((1, 2), FinishReason.LENGTH, WORDS, stop="cd")

        assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "cd")

    @pytest.mark.parametrize("byte_by_byte", ["🌶", "삼", "ď"])
    def test_a_stop_string_of_one_character_in_several_tokens_leaves_no_half(self, byte_by_byte):
        output = ended(bytes_of("x" + byte_by_byte + "y"), None, stop=byte_by_byte)

        assert (output.text, output.stop_reason) == ("x", byte_by_byte)

    def test_a_stop_string_that_only_the_end_completes_counts(self):
        output = ended([*b"x", 0xF0, 0x9F], FinishReason.LENGTH, stop=BAD)

        assert (output.text, output.finish_reason, output.stop_reason) == ("x", "stop", BAD)

    @pytest.mark.parametrize(
        ("min_tokens", "text"),
        [(0, "x"), (1, "x"), (2, "xbx"), (3, "xbx"), (4, "xbxbx"), (5, "xbxbx"), (6, "xbxbxb")],
    )
    def test_a_stop_string_that_ends_within_min_tokens_is_text(self, min_tokens, text):
        output = ended(bytes_of("xbxbxb"), stop="b", min_tokens=min_tokens)

        assert output.text == text
        assert output.finish_reason == ("length" if text == "xbxbxb" else "stop")

    def test_a_stop_string_that_begins_within_min_tokens_and_ends_later_counts(self):
        output = ended(bytes_of("xbcde"), stop="bcd", min_tokens=3)

        assert (output.text, len(output.token_ids), output.stop_reason) == ("x", 4, "bcd")

    @given(
        ids=st.lists(st.sampled_from([*b"ab", *bytes_of("🌶"), END, THINK]), max_size=20),
        stop=st.lists(st.text("ab🌶<", min_size=1, max_size=3), max_size=3),
        include=st.booleans(),
    )
    @example(ids=[*b"a", *bytes_of("🌶")], stop=["a🌶"], include=True)
    @settings(max_examples=100, deadline=None)
    def test_is_what_a_search_in_the_whole_text_finds(self, ids, stop, include):
        text = BYTES.decode(ids)
        ends = [(text.index(s) + len(s), -len(s), s) for s in stop if s in text]
        expected, found = text, None
        if ends:
            end, _, found = min(ends)
            expected = text[: end if include else end - len(found)]

        made = completion(stop=stop, include_stop_str_in_output=include)
        deltas = feed(made, ids)
        made.end(FinishReason.LENGTH)
        deltas.append(made.take_delta("r"))

        assert "".join(delta.text for delta in deltas) == made.output().text == expected
        assert made.stop_reason == found


class TestStopIds:
    @pytest.mark.parametrize(
        ("stop_id", "skip", "include", "text"),
        [
            (END, True, False, "ab"),
            (END, True, True, "ab"),
            (END, False, False, "ab"),
            (END, False, True, "ab<|end|>"),
            (THINK, True, False, "ab"),
            (THINK, True, True, "ab<think>"),
            (ord("b"), True, False, "ab"),
            (ord("b"), True, True, "abb"),
        ],
    )
    def test_its_text_is_left_out_unless_asked_for_and_no_other_is_lost(
        self, stop_id, skip, include, text
    ):
        output = ended(
            [*b"ab", stop_id],
            FinishReason.STOP,
            skip_special_tokens=skip,
            include_stop_str_in_output=include,
        )

        assert output.text == text
        assert output.token_ids == (*b"ab", stop_id)
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop_id)

    def test_what_was_held_back_comes_before_it(self):
        assert ended([*b"ab", END], FinishReason.STOP, stop="bc").text == "ab"
        assert ended([*b"ab", 0xF0, 0x9F, END], FinishReason.STOP).text == "ab" + BAD

    def test_a_request_that_never_had_text_has_none(self):
        output = ended([END], FinishReason.STOP)

        assert (output.text, output.token_ids, output.stop_reason) == ("", (END,), END)


class TestText:
    @given(st.lists(st.integers(0, 300), min_size=1, max_size=30))
    @settings(max_examples=60, deadline=None)
    def test_is_that_of_all_tokens_together_even_if_it_ends_in_half_a_character(self, ids):
        assert ended(ids).text == BYTES.decode(ids)

    def test_continues_a_prompt_that_ends_in_half_a_character(self):
        start, end = [*b"Hi ", 0xF0, 0x9F, 0x8C], [0xB6, *b"!"]

        assert ended(end, prompt=start).text == "🌶!"

    def test_there_is_none_without_a_tokenizer_or_if_not_asked_for(self):
        output = ended([*b"ab", END], FinishReason.STOP, detokenize=False)

        assert (output.text, output.token_ids) == ("", (*b"ab", END))
        assert output.stop_reason == END


class TestEndFromOutside:
    @pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
    def test_gives_out_what_was_held_back_and_then_nothing(self, reason):
        made = completion(stop="bc")
        assert "".join(delta.text for delta in feed(made, [*b"ab", 0xF0, 0x9F])) == "a"
        assert not made.has_delta

        made.end(reason, "why")

        assert made.has_delta
        delta = made.take_delta("r")
        assert (delta.text, delta.token_ids, delta.finish_reason) == ("b" + BAD, (), reason)
        assert made.output().text == "ab" + BAD
        assert made.error == "why"
        assert not made.has_delta
        assert made.take_delta("r").text == ""

    def test_before_the_first_token_there_is_one_last_empty_delta(self):
        made = completion()
        assert not made.has_delta

        made.end(FinishReason.ABORT)

        assert made.has_delta
        delta = made.take_delta("r")
        assert (delta.text, delta.token_ids, delta.finish_reason) == ("", (), FinishReason.ABORT)
        assert not made.has_delta

    @pytest.mark.parametrize("first", [FinishReason.STOP, FinishReason.ERROR])
    def test_changes_nothing_once_it_has_ended(self, first):
        made = completion()
        made.end(first, "the first reason")
        before = made.output()

        made.end(FinishReason.ABORT)

        assert made.output() == before
        assert made.error == "the first reason"


class TestLogprobs:
    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_are_one_for_each_token_in_every_delta_and_sum_up(self, count):
        made = completion(stop="cd", logprobs=count)
        for place, token_id in enumerate(b"abcd"):
            made.append(token_id, logprob(token_id, -0.25 * place), None)
            if place % 2:  # two at a time, of which the second two have no text
                delta = made.take_delta("r")
                assert tuple(entry.token_id for entry in delta.logprobs) == delta.token_ids
                assert len(delta.token_ids) == 2

        output = made.output()
        assert output.text == "ab"
        assert tuple(entry.token_id for entry in output.logprobs) == output.token_ids
        assert output.cumulative_logprob == -1.5

    def test_are_empty_before_the_first_token_and_absent_if_not_asked_for(self):
        assert completion(logprobs=1).output().logprobs == ()
        assert completion(logprobs=1).output().cumulative_logprob == 0

        made = completion()
        made.append(97, None, None)

        assert made.take_delta("r").logprobs is None
        assert made.output().logprobs is None
        assert made.output().cumulative_logprob is None


def test_an_output_is_a_value_that_later_tokens_do_not_change():
    made = completion(logprobs=1)
    feed(made, b"ab")
    output = made.output()
    kept = attrs.asdict(output)

    feed(made, b"cd")

    assert attrs.asdict(output) == kept
    assert made.output().text == "abcd"


def test_deltas_say_whose_they_are():
    completions = [completion(index=index) for index in range(3)]
    request = Request("name", "p", (1,), completions, arrival_s=0.0)
    completions[2].append(97, None, None)
    completions[1].append(98, None, FinishReason.LENGTH)

    deltas = request.take_deltas()

    assert [(delta.index, delta.text) for delta in deltas] == [(1, "b"), (2, "a")]
    assert {delta.request_id for delta in deltas} == {"name"}
    assert request.take_deltas() == []
