"""Faults that people met in engines of this kind, each with the test that shows its right value.

The letters: C limits and inputs, D stopping, E sampling, F log-probabilities, G text, M platforms.
`CASES` says for each what is right and which tests hold it; tests that no other file has are here.

Some do not apply, or only in part:

- E11 asks for batch-invariant numerics as an option. In float32 greedy tokens are equal in any
  batch and are tested to be; logits may differ in their last bits, and in bfloat16 a near tie may
  fall either way. There is no mode with fixed shapes.
- M5 needs an old GPU. That bfloat16 counts as fast from Ampere on only, and that a backend with an
  obstacle is passed over with a note, is tested without one.
- M7 asks for several versions of Python, numpy and transformers, and for `spawn` beside `fork` with
  CUDA initialised. One environment has one version of each; and no process is ever started, which
  `test_no_side_effects.py` shows, so that it does not matter how one would be.
"""

import ast
import functools
import random
import threading
from pathlib import Path

import pytest

from nanovllm import LLM, ConfigError, RequestError, SamplingParams
from tests.checkpoints import VOCAB_SIZE, greedy_tokens
from tests.engines import greedy, is_idle, random_prompts, tiny_llm
from tests.model_folder import EOS_ID, EOS_TEXT, tiny_model_folder, write_model_folder

TESTS = Path(__file__).parent

HERE = "test_field_cases.py"

CASES = {
    "C1": [
        "an empty prompt is an error of its own, in a batch too, and the engine goes on",
        f"{HERE}::test_an_empty_prompt_is_refused_and_the_engine_goes_on",
    ],
    "C3": [
        "a prompt of the model's length less one gets one token; longer ones name both numbers",
        f"{HERE}::test_a_prompt_at_the_models_length",
        "test_llm.py::test_the_model_length_bounds_prompt_and_completion_together",
    ],
    "C5": [
        "an id outside of the vocabulary, or of another type, is refused before anything is queued",
        f"{HERE}::test_ids_that_are_none_are_refused_before_anything_is_queued",
        "test_prompts.py::test_takes_every_id_that_the_model_has_an_embedding_for",
    ],
    "C7": [
        "as many parameters as prompts, or an error; no prompts give no outputs",
        "test_llm.py::test_fewer_parameters_than_prompts_are_refused",
        "test_llm.py::test_no_prompts_give_no_outputs_and_one_prompt_gives_one",
    ],
    "C9": [
        "the same typed errors under `python -O`",
        "test_bad_inputs.py::test_every_bad_input_is_a_typed_error_with_a_message",
        "test_bad_inputs.py::test_they_are_the_same_without_asserts",
    ],
    "C11": [
        "an exception fails whose it is, with its cause, frees the blocks, and again the next time",
        "test_failures.py::test_an_exception_in_a_step_fails_what_was_in_it_and_nothing_else",
        "test_failures.py::test_a_second_failure_is_reported_like_the_first",
        "test_isolation.py::test_an_exception_in_its_penalties_fails_that_request_and_changes_no_other",
        "test_isolation.py::test_a_detokenizer_that_raises_fails_its_own_request_also_if_it_never_stops",
        "test_isolation.py::TestHooks::test_a_stream_goes_on_and_finds_every_token",
        "test_guest_recovery.py::TestConsumers::test_an_exception_in_one_ends_its_request_only",
    ],
    "C13": [
        "threads that share an engine get each their own answers",
        f"{HERE}::test_eight_threads_with_twenty_prompts_each_get_their_own_answers",
        "test_soak.py::test_every_answer_is_its_own_and_nothing_is_left",
    ],
    "D1": [
        "an id that config, generation config or tokenizer name ends the text, and says so",
        "test_build.py::test_ids_that_end_a_text_are_those_of_config_generation_config_and_tokenizer",
        "test_build.py::test_each_of_the_ids_ends_a_text_and_is_said_to_have",
        "model/test_loading.py::test_token_ids_in_a_config_may_be_absent_or_one_or_several",
    ],
    "D3": [
        "a stop string ends the text wherever tokens are cut, streamed or not",
        f"{HERE}::test_the_earliest_stop_string_wins_streamed_or_not",
        "text/test_stop_strings.py::test_any_cutting_shows_what_the_whole_text_shows",
        "test_request.py::test_is_what_a_search_in_the_whole_text_finds",
    ],
    "D5": [
        "a stop token's text is left out without losing other text; its id is in `token_ids`",
        f"{HERE}::test_a_stop_token_takes_no_text_with_it",
        "test_request.py::test_its_text_is_left_out_unless_asked_for_and_no_other_is_lost",
    ],
    "D7": [
        "`min_tokens` holds off end of text and stop strings; some token is always left",
        f"{HERE}::test_min_tokens_hold_off_every_end_also_if_nothing_else_is_possible",
        "runtime/test_logits_processors.py::test_the_ban_is_lifted_where_it_would_leave_nothing",
    ],
    "E1": [
        "temperature 0 is the argmax, the lowest id on ties, whatever its neighbours draw",
        "runtime/test_sampler.py::test_takes_the_lowest_id_on_ties",
        "runtime/test_sampler.py::test_does_not_depend_on_random_neighbours",
        "runtime/test_sampler.py::test_neither_global_generator_is_touched",
    ],
    "E3": [
        "greedy rows with banned ids stay finite beside random ones",
        f"{HERE}::test_greedy_rows_with_banned_ids_stay_finite_beside_random_ones",
        "runtime/test_sampler.py::test_masked_tokens_stay_impossible",
    ],
    "E5": [
        "top_p of 0 keeps exactly the top token",
        "runtime/test_draw.py::test_top_p_of_0_keeps_exactly_the_top_token",
    ],
    "E7": [
        "top_k of 0, of -1 and of the vocabulary or more is off; greedy rows may share its batch",
        f"{HERE}::test_a_top_k_of_no_effect_is_off_in_a_batch_with_greedy_rows",
        "runtime/test_draw.py::test_top_k_of_no_effect_is_off",
    ],
    "E9": [
        "a seeded row draws the same alone, beside anyone, in any row, chunked, and preempted",
        "runtime/test_sampler.py::test_a_seeded_row_ignores_seeds_and_shapes_of_its_neighbours",
        "test_exact_tokens.py::test_a_seeded_request_gets_the_same_tokens_wherever_it_runs",
        "test_exact_tokens.py::test_an_unseeded_neighbour_changes_nothing_and_draws_differ",
    ],
    "E11": [
        "greedy tokens in float32 do not depend on the batch nor on the prefix cache",
        f"{HERE}::test_greedy_tokens_are_the_same_with_1_7_or_45_others_and_after_a_hit",
        "test_exact_tokens.py::test_no_schedule_changes_a_greedy_token",
    ],
    "E13": [
        "logits that are not finite are an error of their own request",
        "test_failures.py::test_logits_that_are_not_finite_fail_their_own_request_only",
    ],
    "F1": [
        "log-probabilities are those of the raw logits, sum to 1, and are numbers that JSON knows",
        "runtime/test_logprobs.py::test_are_the_log_softmax_of_the_logits",
        "runtime/test_logprobs.py::test_probabilities_of_the_whole_vocabulary_add_up_to_1",
        "runtime/test_logprobs.py::test_impossible_tokens_have_a_number_that_json_knows",
    ],
    "F3": [
        "one entry per token, streamed, cut by a stop string, and after preemption",
        f"{HERE}::test_log_probabilities_are_one_for_each_token_wherever_it_came_from",
        "test_request.py::test_are_one_for_each_token_in_every_delta_and_sum_up",
        "test_sampling_end_to_end.py::test_log_probabilities_are_those_of_the_raw_logits_after_preemption_too",
    ],
    "F5": [
        "a prompt's first position has none; chunks, cache and preemption change nothing",
        "test_prompt_logprobs.py::test_no_schedule_loses_one_and_a_warm_cache_changes_none",
        "test_prompt_logprobs.py::test_the_same_call_twice_gives_the_same_numbers_to_the_last_bit",
    ],
    "G1": [
        "the pieces of a stream are what decoding all of it gives, and no half character is shown",
        f"{HERE}::test_a_stream_of_any_ids_is_the_text_of_all_of_them",
        "text/test_detokenizer.py::test_one_byte_per_token_gives_whole_characters",
        "text/test_detokenizer_properties.py::test_the_pieces_are_what_decode_makes_of_all",
        "text/test_detokenizer_properties.py::test_nothing_but_an_incomplete_end_is_held_back",
    ],
    "G3": [
        "a prompt that ends in half a character is not repeated in the first delta",
        "text/test_detokenizer.py::test_a_prompt_that_ends_in_half_a_character_is_not_repeated",
        "test_request.py::test_continues_a_prompt_that_ends_in_half_a_character",
    ],
    "G5": [
        "special tokens are no text unless asked for; tokens that were merely added are",
        "text/test_detokenizer.py::test_special_tokens_show_only_if_wanted_and_added_ones_always",
        f"{HERE}::test_special_tokens_are_shown_if_asked_for",
    ],
    "G7": [
        "ids without a string are no text; ids alone need no tokenizer",
        "text/test_detokenizer.py::test_ids_without_a_string_are_no_text_and_no_error",
        "test_build.py::test_a_model_without_tokenizer_runs_on_ids_alone",
        f"{HERE}::test_without_detokenize_there_is_no_text_and_no_difference",
    ],
    "M1": [
        "it is imported and runs where optional packages are absent or broken, and says what runs",
        "test_layering.py::test_importing_loads_nothing_heavy",
        "test_layering.py::test_broken_optional_packages_do_not_keep_the_engine_from_running",
        "test_build.py::test_where_numba_does_not_work_torch_does_and_a_note_says_why",
    ],
    "M3": [
        "scattered blocks give what consecutive ones give",
        "model/test_decoder.py::test_logits_equal_those_of_transformers_over_scattered_blocks",
    ],
    "M5": [
        "an old GPU gets a type and a backend that it can run, and a note",
        "test_build.py::test_a_gpu_tells_its_memory_and_computes_in_bfloat16_from_ampere_on",
        "test_backends.py::test_auto_says_why_it_passed_over_the_better_ones_of_this_device",
    ],
    "M7": [
        "no process is started, however one would be",
        "test_no_side_effects.py::test_nothing_of_the_host_is_changed_at_any_time",
    ],
}
"""What is right, then the tests that hold it."""


@functools.cache
def names_in(name):
    """The tests in a file, those of classes with the class or without."""
    found = set()
    for node in ast.parse((TESTS / name).read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else []
        for function in (node, *inner):
            if isinstance(function, ast.FunctionDef):
                found |= {function.name, f"{node.name}::{function.name}"}
    return found


@pytest.mark.parametrize("case", CASES)
def test_each_case_names_tests_that_exist(case):
    right, *references = CASES[case]

    assert right and references
    for reference in references:
        name, _, test = reference.partition("::")
        assert test in names_in(name), reference


@pytest.fixture(scope="module")
def llm():
    options = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 64}
    with LLM(tiny_model_folder(), max_num_seqs=64, **options) as made:
        yield made


def goes_on(llm):
    assert is_idle(llm)
    (output,) = llm.generate([5, 6], greedy(3))
    return output.token_ids == greedy_tokens("llama", [5, 6], 3)


@pytest.mark.parametrize("prompts", [[[]], "", [""], [[1, 2], []], [[1], "", [2]]])
def test_an_empty_prompt_is_refused_and_the_engine_goes_on(llm, prompts):
    with pytest.raises(RequestError, match=r"empty|no tokens"):
        llm.generate(prompts, greedy(2))
    assert llm.generate([], greedy(2)) == []
    assert goes_on(llm)


def test_a_prompt_at_the_models_length():
    with tiny_llm(max_model_len=16) as llm:
        (last,) = llm.generate([7] * 15, greedy(8))
        assert (len(last.token_ids), last.finish_reason) == (1, "length")
        for length in (16, 17, 100):
            with pytest.raises(RequestError, match=rf"{length} tokens.*`max_model_len` is 16"):
                llm.generate([[1], [7] * length], greedy(8))
        outputs = llm.generate([[7] * 15, [7] * 12, [7]], greedy(8))
        assert [len(output.token_ids) for output in outputs] == [1, 4, 8]
        assert goes_on(llm)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([VOCAB_SIZE], {}),
        ([-1], {}),
        ([2**40], {}),
        (["1"], {}),
        ([1.0], {}),
        ([True], {}),
        ([1], {"stop_token_ids": [VOCAB_SIZE + 5]}),
        ([1], {"stop_token_ids": [-1]}),
        ([1], {"logit_bias": {VOCAB_SIZE: 1}}),
    ],
)
def test_ids_that_are_none_are_refused_before_anything_is_queued(llm, prompt, params):
    before = llm.stats().num_requests
    with pytest.raises((RequestError, ConfigError, ValueError)):
        llm.generate([[1, 2], prompt], SamplingParams(**params))
    assert llm.stats().num_requests == before
    assert goes_on(llm)


def test_eight_threads_with_twenty_prompts_each_get_their_own_answers(llm):
    prompts = random_prompts(20, seed=5)
    want = [output.token_ids for output in llm.generate(prompts, greedy(4))]
    wrong = []

    def work(seed):
        order = random.Random(seed).sample(range(20), 20)
        for index in order:
            (output,) = llm.generate([prompts[index]], greedy(4))
            if output.token_ids != want[index]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert goes_on(llm)


def test_the_earliest_stop_string_wins_streamed_or_not(llm):
    """Of the text as it comes without: stops that begin in the middle of any of its tokens."""
    text = llm.generate("walk", greedy(12))[0].text
    for start in range(len(text) - 3):
        stops = [text[start + 1 : start + 4], text[start : start + 2], "never there"]
        first = min(stops[:2], key=lambda stop: (text.find(stop) + len(stop), text.find(stop)))
        (output,) = llm.generate("walk", greedy(12, stop=stops))
        deltas = list(llm.stream("walk", greedy(12, stop=stops)))

        assert output.text == text[: text.find(first)]
        assert "".join(delta.text for delta in deltas) == output.text
        assert output.finish_reason == deltas[-1].finish_reason == "stop"
        assert output.outputs[0].stop_reason == deltas[-1].stop_reason == first


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_token_takes_no_text_with_it(llm, included):
    bias = {EOS_ID: -100}
    (plain,) = llm.generate("walk", greedy(8, logit_bias=bias))
    ends = {"stop_token_ids": [plain.token_ids[4]], "include_stop_str_in_output": included}
    (output,) = llm.generate("walk", greedy(8, logit_bias=bias, **ends))
    end = plain.token_ids.index(plain.token_ids[4]) + 1
    shown = plain.token_ids[: end if included else end - 1]

    assert output.token_ids == plain.token_ids[:end]
    assert output.outputs[0].stop_reason == plain.token_ids[4]
    assert output.text == llm.tokenizer.decode(shown, skip_special_tokens=True)
    special = SamplingParams(temperature=0, logit_bias={EOS_ID: 1e9}, min_tokens=0, max_tokens=8)
    (ended,) = llm.generate("walk", special)
    assert (ended.text, ended.token_ids, ended.finish_reason) == ("", (EOS_ID,), "stop")


def test_min_tokens_hold_off_every_end_also_if_nothing_else_is_possible(llm):
    wanted = {"temperature": 0, "max_tokens": 6, "logit_bias": {EOS_ID: 1e9}}
    (output,) = llm.generate("walk", SamplingParams(min_tokens=4, **wanted))
    assert (len(output.token_ids), output.token_ids[-1]) == (5, EOS_ID)
    assert EOS_ID not in output.token_ids[:4]

    text = llm.generate("walk", greedy(8))[0].text
    (late,) = llm.generate("walk", greedy(8, min_tokens=8, stop=text[:1]))
    assert (late.text, late.finish_reason) == (text, "length")

    banned = {token_id: -1e9 for token_id in range(VOCAB_SIZE) if token_id != EOS_ID}
    (only,) = llm.generate("walk", SamplingParams(temperature=0.5, min_tokens=3, logit_bias=banned))
    assert only.error is None and len(only.token_ids) >= 3


def test_greedy_rows_with_banned_ids_stay_finite_beside_random_ones(llm):
    banned = dict.fromkeys(range(0, VOCAB_SIZE, 2), -1e30)
    (alone,) = llm.generate([1, 2, 3], greedy(6, logit_bias=banned))
    noisy = SamplingParams(temperature=1.5, top_k=3, max_tokens=6, ignore_eos=True)
    outputs = llm.generate([[1, 2, 3]] * 4, [noisy, greedy(6, logit_bias=banned), noisy, noisy])

    assert all(token_id % 2 for token_id in alone.token_ids)
    assert outputs[1].token_ids == alone.token_ids
    assert {output.error for output in outputs} == {None}


def test_a_top_k_of_no_effect_is_off_in_a_batch_with_greedy_rows(llm):
    base = {"temperature": 0.8, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    off = [0, -1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31]
    rows = [SamplingParams(top_k=top_k, **base) for top_k in off]
    outputs = llm.generate([[1, 2, 3]] * 7, [*rows, greedy(6), SamplingParams(top_k=1, **base)])

    assert len({output.token_ids for output in outputs[:5]}) == 1
    assert outputs[5].token_ids == outputs[6].token_ids == greedy_tokens("llama", [1, 2, 3], 6)


def test_greedy_tokens_are_the_same_with_1_7_or_45_others_and_after_a_hit(llm):
    prompt = random_prompts(1, seed=8)[0]
    want = greedy_tokens("llama", prompt, 8)
    for num_others in (0, 1, 7, 45):
        others = random_prompts(num_others, seed=num_others) if num_others else []
        outputs = llm.generate([*others, prompt], greedy(8))
        assert outputs[-1].token_ids == want
    long = prompt * 12
    cold, warm = (llm.generate([long], greedy(8))[0] for _ in range(2))
    assert warm.num_cached_tokens > 0
    assert cold.token_ids == warm.token_ids == greedy_tokens("llama", long, 8)


def test_log_probabilities_are_one_for_each_token_wherever_it_came_from(llm):
    params = greedy(10, logprobs=2)
    (whole,) = llm.generate("walk", params)
    deltas = list(llm.stream("walk", params))
    stop = whole.text[len(whole.text) // 2 :][:2]
    (cut,) = llm.generate("walk", greedy(10, logprobs=2, stop=stop))

    for output in (whole, cut):
        told = [entry.token_id for entry in output.outputs[0].logprobs]
        assert tuple(told) == output.token_ids
    for delta in deltas:
        assert tuple(entry.token_id for entry in delta.logprobs) == delta.token_ids
    assert sum((delta.logprobs for delta in deltas), ()) == whole.outputs[0].logprobs
    assert whole.outputs[0].logprobs[: len(cut.token_ids)] == cut.outputs[0].logprobs


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_of_any_ids_is_the_text_of_all_of_them(llm, seed):
    params = SamplingParams(temperature=5.0, seed=seed, max_tokens=40, ignore_eos=True)
    deltas = list(llm.stream("삼겹살 🌶", params))
    token_ids = sum((delta.token_ids for delta in deltas), ())
    (whole,) = llm.generate("삼겹살 🌶", params)

    assert token_ids == whole.token_ids
    assert "".join(delta.text for delta in deltas) == whole.text
    both = llm.tokenizer.encode("삼겹살 🌶") + list(token_ids)
    # But for broken bytes, of which decoding in one go may see more or fewer.
    decoded = llm.tokenizer.decode(both, skip_special_tokens=True).removeprefix("삼겹살 🌶")
    assert whole.text.replace("\ufffd", "") == decoded.replace("\ufffd", "")


def test_without_detokenize_there_is_no_text_and_no_difference(llm):
    (ids,) = llm.generate([1, 2, 3], greedy(5, detokenize=False))
    (text,) = llm.generate([1, 2, 3], greedy(5))

    assert (ids.text, ids.token_ids) == ("", text.token_ids)


def test_special_tokens_are_shown_if_asked_for(tmp_path):
    folder = write_model_folder(tmp_path / "model")
    force = {"temperature": 0, "logit_bias": {EOS_ID: 1e9}, "max_tokens": 2, "ignore_eos": True}
    with LLM(folder, device="cpu", dtype="float32", num_kvcache_blocks=8) as llm:
        hidden, shown = (
            llm.generate("walk", SamplingParams(skip_special_tokens=skip, **force))[0].text
            for skip in (True, False)
        )

    assert (hidden, shown) == ("", EOS_TEXT * 2)
