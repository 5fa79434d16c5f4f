import re
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.errors import RequestError
from nanovllm.text.fast_tokenizer import FastTokenizer
from nanovllm.text.gguf_tokenizer import tokenizer_from_gguf
from nanovllm.text.structured import StructureCompiler, StructureError
from tests.model_folder import EOS_ID, small_tokenizer
from tests.text.small_tokenizers import TOKENIZERS
from tests.text.test_gguf_sentence_piece import sentence_piece_metadata

pytest.importorskip("llguidance")

TOKENIZER = FastTokenizer(small_tokenizer())
VOCAB_SIZE = TOKENIZER.vocab_size
TURN_ID = TOKENIZER.backend.token_to_id("<|turn|>")
STRUCTURES = StructureCompiler(TOKENIZER, VOCAB_SIZE + 10, frozenset({EOS_ID}))


def ids_of(text, tokenizer=TOKENIZER):
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


def allowed(matcher):
    bits = np.unpackbits(matcher.allowed_tokens().view(np.uint8), bitorder="little")
    return {int(i) for i in bits.nonzero()[0]}


def strings(ids):
    return {TOKENIZER.token(i) for i in ids}


def start(name, value, *, stop=(EOS_ID,), structures=STRUCTURES):
    return structures.compile(name, value).fork(stop)


def walk(text, name, value):
    """Whether a text can be written, whether it may end there, and whether it must."""
    matcher = start(name, value)
    ids = ids_of(text)
    for end, token_id in enumerate(ids, start=1):
        if token_id not in allowed(matcher):
            return None
        matcher.follow(ids[:end])
    return EOS_ID in allowed(matcher), matcher.is_complete


@pytest.mark.parametrize(
    ("text", "name", "value", "end"),
    [
        ("aab", "regex", "a+b", (True, True)),
        ("aa", "regex", "a+b?", (True, False)),
        ("aa", "regex", "a+b", (False, False)),
        ("ba", "regex", "a+b", None),
        ("ab", "regex", "^ab$", (True, True)),
        ("a", "choice", ("a", "ab"), (True, False)),
        ("ab", "choice", ("a", "ab"), (True, True)),
        ("aab", "grammar", 'start: "a" start | "b"', (True, True)),
        ('{"a": 1}', "json_schema", '{"type": "object"}', (True, True)),
        ('{"a":[1,{"b":null}]}', "json_schema", '{"type": "object"}', (True, True)),
        ('{"a": 1}', "json_schema", '{"type": "object", "additionalProperties": false}', None),
        ("12", "json_schema", '{"type": "integer"}', (True, False)),
        ("{\n  \t}", "json_schema", '{"type": "object"}', (True, True)),
        ("{  }", "json_schema", '{"type": "object"}', None),
        ("{\n\n}", "json_schema", '{"type": "object"}', None),
    ],
)
def test_follows_a_text_and_says_where_it_may_and_where_it_must_end(text, name, value, end):
    assert walk(text, name, value) == end


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4))
def test_every_choice_can_be_written_whatever_is_in_it(choice):
    choice = [text.encode(errors="ignore").decode() or "x" for text in choice]
    for text in choice:
        assert walk(text, "choice", tuple(choice))[0]


def test_blanks_can_not_go_on_for_ever_unless_the_schema_says_so():
    dense = '{"type": "array", "x-guidance": {"whitespace_flexible": false}}'
    loose = '{"type": "array", "x-guidance": {"whitespace_pattern": "[ ]+"}}'

    assert walk("[" + "\n" + " " * 32 + "]", "json_schema", '{"type": "array"}')
    assert walk("[" + "\n" + " " * 33 + "]", "json_schema", '{"type": "array"}') is None
    assert walk("[" + " " * 50 + "]", "json_schema", loose)
    assert walk("[ ]", "json_schema", dense) is None


class TestStopTokens:
    def test_come_where_the_text_may_end_and_nowhere_else(self):
        matcher = start("regex", "a+", stop=(EOS_ID, TURN_ID))
        assert strings(allowed(matcher)) == {"a"}

        matcher.follow(ids_of("a"))

        assert allowed(matcher) == {EOS_ID, TURN_ID, *ids_of("a")}

    def test_a_token_of_the_text_that_is_one_too_waits_for_its_turn(self):
        matcher = start("regex", "aba?", stop=ids_of("a"))
        assert allowed(matcher) == set()

        matcher = start("regex", "ba?", stop=ids_of("a"))
        matcher.follow(ids_of("b"))
        assert allowed(matcher) == set(ids_of("a"))

    def test_end_of_text_does_not_come_for_a_request_that_goes_on_past_it(self):
        matcher = start("regex", "a+", stop=())
        matcher.follow(ids_of("a"))

        assert strings(allowed(matcher)) == {"a"}

    def test_one_completes_the_text(self):
        matcher = start("regex", "a+")
        matcher.follow([*ids_of("a"), EOS_ID])

        assert matcher.is_complete

    def test_a_model_without_any_still_ends_where_nothing_can_follow(self):
        structures = StructureCompiler(TOKENIZER, VOCAB_SIZE)
        matcher = start("regex", "ab?", stop=(), structures=structures)
        matcher.follow(ids_of("a"))
        assert (strings(allowed(matcher)), matcher.is_complete) == ({"b"}, False)

        matcher.follow(ids_of("ab"))
        assert matcher.is_complete

    def test_an_id_that_the_tokenizer_does_not_know_is_no_hindrance(self):
        structures = StructureCompiler(TOKENIZER, VOCAB_SIZE, frozenset({VOCAB_SIZE + 500}))
        matcher = start("regex", "ab?", stop=(VOCAB_SIZE + 500,), structures=structures)
        matcher.follow(ids_of("a"))

        assert strings(allowed(matcher)) == {"b"}


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 7, VOCAB_SIZE, VOCAB_SIZE + 77])
def test_the_model_may_have_more_or_fewer_tokens_than_the_tokenizer(vocab_size):
    structures = StructureCompiler(TOKENIZER, vocab_size, frozenset({EOS_ID}))
    ids = allowed(start("regex", r"(?s).*", structures=structures))

    assert {EOS_ID, *ids_of("a")} <= ids
    assert max(ids) < max(VOCAB_SIZE, vocab_size)
    assert not {token_id for token_id in ids if TOKENIZER.token(token_id) is None}


def test_following_depends_on_the_tokens_and_not_on_how_they_came():
    ids = ids_of('{"age": 12, "name": "fox"}')
    schema = '{"type": "object", "properties": {"age": {"type": "integer"}}}'
    at_once, bit_by_bit = start("json_schema", schema), start("json_schema", schema)
    at_once.follow(ids[:-1])
    for end in range(len(ids)):
        bit_by_bit.follow(ids[:end])
        bit_by_bit.follow(ids[:end])  # nothing new

    assert allowed(at_once) == allowed(bit_by_bit) != set()


def test_forks_go_their_own_ways():
    first = start("choice", ("ab", "cd"))
    second = first.fork([EOS_ID])
    first.follow(ids_of("a"))
    second.follow(ids_of("c"))
    third = second.fork([])

    assert [strings(allowed(one)) for one in (first, second, third)] == [{"b"}, {"d"}, {"d"}]
    assert strings(allowed(start("choice", ("ab", "cd")))) == {"a", "c"}


def test_a_token_that_does_not_fit_is_an_error_from_then_on():
    matcher = start("regex", "ab")
    with pytest.raises(StructureError, match="doesn't satisfy"):
        matcher.follow(ids_of("b"))
    with pytest.raises(StructureError):
        matcher.allowed_tokens()


def test_works_with_the_tokenizer_of_a_sentence_piece_file():
    metadata = sentence_piece_metadata()
    tokenizer = tokenizer_from_gguf(metadata, source="x.gguf", end_token_ids=frozenset({2}))
    structures = StructureCompiler(tokenizer, tokenizer.vocab_size, frozenset({2}))
    matcher = structures.compile("regex", " the é?").fork([2])
    ids = [tokenizer.backend.token_to_id(text) for text in ("▁the", "▁", "<0xC3>", "<0xA9>")]
    for end, token_id in enumerate(ids, start=1):
        assert token_id in allowed(matcher)
        matcher.follow(ids[:end])

    assert matcher.is_complete


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "value", "reason"),
        [
            ("regex", "a(b", "unclosed group"),
            ("regex", "a(?=b)", "look-around"),
            ("regex", r"[^\s\S]", "no token of the model can begin"),
            ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
            ("json_schema", '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
            ("json_schema", '{"enum": []}', "Unsatisfiable"),
            ("json_schema", '{"$ref": "#/nowhere"}', "'/nowhere' does not exist"),
            ("json_schema", '{"$ref": "https://example.org/x.json"}', "example.org"),
            ("grammar", "start: nothing", 'unknown name: "nothing"'),
            ("grammar", "hello", ""),
        ],
    )
    def test_names_field_value_and_reason(self, name, value, reason):
        with pytest.raises(RequestError) as caught:
            STRUCTURES.compile(name, value)

        message = str(caught.value)
        assert message.startswith(f"`{name}` is {value!r}"[:40])
        assert reason in message
        assert "\n" not in message

    @pytest.mark.parametrize("kind", ["metaspace", "wordpiece", "no decoder"])
    def test_a_tokenizer_of_an_unknown_kind_is_said_to_be_one(self, kind):
        tokenizer = FastTokenizer(TOKENIZERS[kind])
        structures = StructureCompiler(tokenizer, tokenizer.vocab_size)
        with pytest.raises(RequestError, match=r"`regex` can't be used with this model: .*decoder"):
            structures.compile("regex", "a")

    def test_a_missing_package_is_named_with_the_command_that_gets_it(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "llguidance", None)
        command = re.escape("pip install 'nanovllm[structured]'")
        with pytest.raises(RequestError, match=f"`regex` needs the llguidance package.*{command}"):
            StructureCompiler(TOKENIZER, VOCAB_SIZE).compile("regex", "a")


def test_a_structure_is_compiled_once_and_by_any_number_of_threads():
    structures = StructureCompiler(TOKENIZER, VOCAB_SIZE)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(structures.compile("regex", "a+b")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 8 and len(set(map(id, found))) == 1
    assert structures.compile("regex", "a+") is not found[0]


def test_old_structures_are_forgotten_so_that_memory_stays_bounded():
    structures = StructureCompiler(TOKENIZER, VOCAB_SIZE)
    first = structures.compile("regex", "a")
    for i in range(70):
        structures.compile("choice", (f"a{i}",))

    assert structures.compile("regex", "a") is not first
    assert len(structures._compiled) <= 64
