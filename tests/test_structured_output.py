"""Structured output through a whole engine: a random model writes what it was asked for."""

import asyncio
import json
import re

import pytest

from nanovllm import LLM, AsyncLLM, RequestError, SamplingParams
from nanovllm.text.structured import TokenMatcher
from tests.engines import SCHEDULES, is_idle
from tests.model_folder import EOS_ID, small_tokenizer, tiny_model_folder
from tests.runtime.sampling_rows import leave_the_cores_to_others

one_thread = pytest.fixture(autouse=True, scope="module")(leave_the_cores_to_others)

pytest.importorskip("llguidance")

PROMPTS = ["The quick", "def main(", "   ", "Grüße aus"]
TURN_ID = small_tokenizer().token_to_id("<|turn|>")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "home": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
}
DENSE = {**PERSON, "x-guidance": {"whitespace_flexible": False}}
"""The same without blanks, so that every answer is short."""
DENSE["properties"] = {
    **PERSON["properties"],
    "home": {**PERSON["properties"]["home"], "additionalProperties": False},
}


def is_person(text):
    person = json.loads(text)
    assert set(person) - {"tags"} == {"name", "age", "home"}
    assert isinstance(person["name"], str) and len(person["name"]) <= 8
    assert type(person["age"]) is int and 0 <= person["age"] <= 150
    assert set(person.get("tags", [])) <= {"a", "b"} and len(person.get("tags", [])) <= 3
    assert isinstance(person["home"]["ok"], bool)
    return True


def tiny(**options):
    given = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 256, **options}
    return LLM(tiny_model_folder(), **given)


@pytest.fixture(scope="module")
def llm():
    with tiny() as made:
        yield made


def hot(**params):
    return SamplingParams(**{"temperature": 1.5, "max_tokens": 200, **params})


class TestJson:
    def test_every_seed_gives_what_the_schema_allows(self, llm):
        params = [hot(json_schema=DENSE, seed=seed) for seed in range(24)]
        outputs = llm.generate([PROMPTS[seed % 4] for seed in range(24)], params)

        assert [output.finish_reason for output in outputs] == ["stop"] * 24
        assert all(is_person(output.text) for output in outputs)
        assert len({output.text for output in outputs}) > 20

    def test_blanks_are_allowed_where_json_has_them(self, llm):
        outputs = llm.generate(
            [PROMPTS[0]] * 6, [hot(json_schema=PERSON, seed=i) for i in range(6)]
        )
        whole = [output.text for output in outputs if output.finish_reason == "stop"]

        assert whole and all(is_person(text) for text in whole)
        assert any(re.search(r"[\n ]", text) for text in whole)

    def test_a_greedy_row_obeys_too(self, llm):
        (output,) = llm.generate(PROMPTS[0], hot(json_schema=DENSE, temperature=0))

        assert is_person(output.text)

    def test_max_tokens_cuts_it_anywhere(self, llm):
        params = hot(json_schema=DENSE, seed=1)
        (whole,) = llm.generate(PROMPTS[0], params)
        (cut,) = llm.generate(PROMPTS[0], hot(json_schema=DENSE, seed=1, max_tokens=5))

        assert cut.finish_reason == "length"
        assert whole.token_ids[:5] == cut.token_ids

    def test_the_last_token_that_it_may_have_completes_it_like_any_other(self, llm):
        (whole,) = llm.generate(PROMPTS[0], hot(json_schema=DENSE, seed=1))
        num_tokens = len(whole.token_ids)
        (same,) = llm.generate(PROMPTS[0], hot(json_schema=DENSE, seed=1, max_tokens=num_tokens))

        assert (same.text, same.finish_reason) == (whole.text, "stop")


def test_a_regular_expression_is_matched_as_a_whole(llm):
    pattern = r"[A-Z][a-z]{1,5} (\+|-)?[0-9]{2,4}é"
    outputs = llm.generate([PROMPTS[1]] * 20, [hot(regex=pattern, seed=i) for i in range(20)])

    assert all(re.fullmatch(pattern, output.text) for output in outputs)
    assert len({output.text for output in outputs}) > 10


def test_each_choice_is_made_sooner_or_later_and_nothing_else(llm):
    choice = ["yes", "no", "perhaps: 日本"]
    outputs = llm.generate([PROMPTS[2]] * 24, [hot(choice=choice, seed=i) for i in range(24)])

    assert {output.text for output in outputs} == set(choice)
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert {output.outputs[0].stop_reason for output in outputs} == {None}


def test_a_grammar_nests_as_no_regular_expression_can(llm):
    grammar = 'start: "(" start ")" | "x"'
    outputs = llm.generate([PROMPTS[0]] * 10, [hot(grammar=grammar, seed=i) for i in range(10)])
    for output in outputs:
        depth = output.text.count("(")

        assert output.finish_reason == "length" or output.text == "(" * depth + "x" + ")" * depth


class TestTogetherWithTheOtherParameters:
    def test_end_of_text_may_come_where_the_structure_may_end(self, llm):
        outputs = llm.generate(
            [PROMPTS[0]] * 20, [hot(regex="a+", seed=i, logit_bias={EOS_ID: 2}) for i in range(20)]
        )
        for output in outputs:
            assert output.token_ids[-1] == EOS_ID
            assert output.outputs[0].stop_reason == EOS_ID
            assert re.fullmatch("a+", output.text)

    def test_min_tokens_hold_off_the_end_as_long_as_something_can_follow(self, llm):
        forced = {"logit_bias": {EOS_ID: 100}, "min_tokens": 5}
        (going,) = llm.generate(PROMPTS[0], hot(regex="a+", **forced))
        (complete,) = llm.generate(PROMPTS[0], hot(choice=["a"], **forced))

        assert going.text == "a" * 5
        assert (complete.text, complete.finish_reason) == ("a", "stop")

    def test_going_on_past_end_of_text_keeps_it_out(self, llm):
        params = hot(regex="a+", ignore_eos=True, max_tokens=20, logit_bias={EOS_ID: 100})
        (output,) = llm.generate(PROMPTS[0], params)

        assert (output.text, output.finish_reason) == ("a" * 20, "length")

    def test_a_stop_string_ends_it_early(self, llm):
        params = hot(regex="[ab]{60}", stop="b", seed=3)
        (output,) = llm.generate(PROMPTS[0], params)

        assert re.fullmatch("a*", output.text)
        assert output.outputs[0].stop_reason == "b"

    def test_completions_of_one_prompt_go_their_own_ways(self, llm):
        (output,) = llm.generate(PROMPTS[0], hot(json_schema=DENSE, n=4, seed=5))

        assert len({completion.text for completion in output.outputs}) == 4
        assert all(is_person(completion.text) for completion in output.outputs)

    def test_log_probabilities_are_the_models_own(self, llm):
        params = {"seed": 1, "logprobs": 2, "max_tokens": 1}
        (free,) = llm.generate(PROMPTS[0], hot(**params))
        (bound,) = llm.generate(PROMPTS[0], hot(choice=["é"], **params))

        assert bound.outputs[0].logprobs[0].top == free.outputs[0].logprobs[0].top
        assert bound.outputs[0].logprobs[0].token_id == bound.token_ids[0]
        assert bound.outputs[0].logprobs[0].rank > 1

    def test_streams_as_it_comes(self, llm):
        params = hot(json_schema=DENSE, seed=2)
        text = "".join(delta.text for delta in llm.stream(PROMPTS[0], params))

        assert text == llm.generate(PROMPTS[0], params)[0].text


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "plain"])
def test_no_schedule_changes_a_token(llm, schedule):
    """The state follows from the completion's tokens alone: chunks and preemptions lose nothing."""
    params = [
        hot(json_schema=DENSE, seed=1),
        hot(seed=2, max_tokens=20, ignore_eos=True),
        hot(regex="[a-f]{20}", seed=3),
        hot(json_schema=DENSE, temperature=0),
        hot(choice=["The quick brown fox", "def main"], seed=4),
    ]
    prompts = [PROMPTS[i % 4] for i in range(5)]
    options = dict(SCHEDULES[schedule])
    if schedule == "preempted":
        # As few blocks as admission takes.
        options |= {"num_kvcache_blocks": 40, "max_model_len": 150}
        params = [hot(**{**vars_of(one), "max_tokens": 120}) for one in params]
    alone = [llm.generate(p, one)[0] for p, one in zip(prompts, params, strict=True)]
    with tiny(**options) as other:
        together = other.generate(prompts, params)
        stats = other.stats()

    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert is_person(together[0].text)
    if schedule == "preempted":
        assert stats.num_preemptions


def vars_of(params):
    return {name: getattr(params, name) for name in ("json_schema", "regex", "choice", "seed")} | {
        "temperature": params.temperature,
        "ignore_eos": params.ignore_eos,
    }


def test_works_in_the_thread_of_an_async_engine():
    async def answers():
        async with AsyncLLM(
            tiny_model_folder(), device="cpu", dtype="float32", num_kvcache_blocks=64
        ) as llm:
            params = [hot(json_schema=DENSE, seed=i) for i in range(3)]
            first = llm.generate(PROMPTS[:3], params)
            second = llm.generate(PROMPTS[0], hot(choice=["yes", "no"]))
            return [o.text for outputs in await asyncio.gather(first, second) for o in outputs]

    *people, choice = asyncio.run(answers())

    assert all(is_person(text) for text in people)
    assert choice in ("yes", "no")


class TestRefusals:
    def test_a_bad_schema_is_refused_by_name_and_nothing_is_queued(self, llm):
        before = llm.stats().num_requests
        params = [hot(regex="a"), hot(json_schema={"type": "strin"})]
        with pytest.raises(
            RequestError, match=r"Prompt 1 of 2: `json_schema`.*Invalid type: strin"
        ):
            llm.generate(PROMPTS[:2], params)

        assert llm.stats().num_requests == before

    def test_an_engine_without_a_tokenizer_says_so(self):
        with (
            tiny(skip_tokenizer_init=True) as llm,
            pytest.raises(
                RequestError, match=r"`choice` is given, but the engine has no tokenizer"
            ),
        ):
            llm.generate([1, 2], hot(choice=["a"]))


@pytest.mark.parametrize("method", ["allowed_tokens", "follow"])
def test_a_matcher_that_breaks_fails_its_own_request_only(llm, monkeypatch, method):
    params = [hot(regex="[ab]{9}", seed=i, stop_token_ids=[TURN_ID] * (i == 1)) for i in range(3)]
    expected = llm.generate(PROMPTS[:3], params)
    function = getattr(TokenMatcher, method)

    def faulty(self, *args):
        if TURN_ID in self._stop_token_ids and self._num_followed == 2:
            raise ArithmeticError("grammar overflow")
        return function(self, *args)

    monkeypatch.setattr(TokenMatcher, method, faulty)
    outputs = llm.generate(PROMPTS[:3], params)

    assert [output.finish_reason for output in outputs] == ["stop", "error", "stop"]
    assert outputs[1].error == "ArithmeticError: grammar overflow"
    assert [outputs[i].token_ids for i in (0, 2)] == [expected[i].token_ids for i in (0, 2)]
    assert is_idle(llm)
