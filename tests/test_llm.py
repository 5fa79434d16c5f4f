"""What a caller of `LLM` meets: whole answers, streams, the manual loop, mistakes, and the end."""

import gc
import threading
import weakref

import pytest

from nanovllm import ConfigError, NanoVLLMError, RequestError, SamplingParams
from nanovllm.core import check
from tests.checkpoints import VOCAB_SIZE, greedy_tokens
from tests.engines import greedy, is_idle, random_prompts, tiny_llm


@pytest.fixture(scope="module")
def llm():
    with tiny_llm("llama", attention_backend="torch", max_model_len=64) as llm:
        yield llm


@pytest.fixture(autouse=True)
def leaves_an_idle_engine(llm):
    """Whatever a test does, afterwards the engine holds nothing and answers."""
    yield
    prompt = [5, 6, 7]

    assert is_idle(llm)
    assert llm.generate(prompt, greedy(3))[0].token_ids == greedy_tokens("llama", prompt, 3)


class TestGenerate:
    def test_one_output_per_prompt_in_order(self, llm):
        prompts = random_prompts(5)
        outputs = llm.generate(prompts, [greedy(i + 1) for i in range(5)])

        assert [list(output.prompt_token_ids) for output in outputs] == prompts
        assert [len(output.token_ids) for output in outputs] == [1, 2, 3, 4, 5]
        assert all(output.finished and output.finish_reason == "length" for output in outputs)
        assert len({output.request_id for output in outputs}) == 5

    def test_no_prompts_give_no_outputs_and_one_prompt_gives_one(self, llm):
        assert llm.generate([]) == []
        assert len(llm.generate([1, 2, 3], greedy(1))) == 1
        assert len(llm.generate([[1, 2, 3]], greedy(1))) == 1

    def test_outputs_can_be_read_as_nano_vllm_wrote_them(self, llm):
        (output,) = llm.generate([1, 2, 3], greedy(2))

        assert output["token_ids"] == output.token_ids
        assert output["text"] == output.text == ""
        with pytest.raises(KeyError):
            output["other"]

    def test_a_hundred_calls_on_one_engine_each_get_their_own(self, llm):
        for call in range(100):
            prompts = random_prompts(1 + call % 5, seed=call)
            outputs = llm.generate(prompts, greedy(1 + call % 3))

            assert [list(output.prompt_token_ids) for output in outputs] == prompts

    @pytest.mark.parametrize(
        ("num_tokens", "num_new"), [(55, 8), (62, 2), (63, 1), (64, None), (100, None)]
    )
    def test_the_model_length_bounds_prompt_and_completion_together(self, llm, num_tokens, num_new):
        prompt = [1] * num_tokens
        if num_new is None:
            with pytest.raises(RequestError, match=rf"{num_tokens} tokens.* is 64"):
                llm.generate(prompt, greedy(8))
        else:
            (output,) = llm.generate(prompt, greedy(8))
            assert (len(output.token_ids), output.finish_reason) == (num_new, "length")

    def test_metrics_are_in_order(self, llm):
        (output,) = llm.generate([1, 2, 3], greedy(4))
        metrics = output.metrics

        assert (
            metrics.arrival_s
            <= metrics.first_scheduled_s
            <= metrics.first_token_s
            <= metrics.finished_s
        )
        assert metrics.ttft_s > 0
        assert metrics.mean_itl_s > 0
        assert metrics.num_preemptions == 0


BAD_PROMPTS = [
    [],
    [[]],
    [[1, 2], []],
    [VOCAB_SIZE],
    [-1],
    [2**40],
    [1.0],
    [True],
    [None],
    None,
    7,
    {"prompt": [1]},
    "text without a tokenizer",
    [[1, 2], [3, VOCAB_SIZE]],
    [1] * 64,
]


@pytest.mark.parametrize("prompts", BAD_PROMPTS[1:], ids=repr)
def test_a_bad_prompt_is_refused_before_anything_is_queued(llm, prompts):
    before = llm.stats().num_requests
    with pytest.raises(RequestError):
        llm.generate(prompts, greedy(1))

    assert llm.stats().num_requests == before


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"stop_token_ids": [VOCAB_SIZE + 5]}, "stop_token_ids"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"stop": "x"}, "stop"),
    ],
)
def test_parameters_that_the_model_can_not_serve_are_refused_by_name(llm, params, name):
    with pytest.raises(RequestError, match=name):
        llm.generate([1, 2], SamplingParams(**params))


def test_fewer_parameters_than_prompts_are_refused(llm):
    with pytest.raises(RequestError, match="2 entries for 3 prompts"):
        llm.generate([[1], [2], [3]], [greedy(1)] * 2)


def test_one_request_that_can_never_fit_is_refused_and_its_batch_with_it():
    with tiny_llm(num_kvcache_blocks=2, kvcache_block_size=4) as llm:
        with pytest.raises(RequestError, match=r"needs 3 blocks.* has 2"):
            llm.generate([[1, 2, 3], [1, 2, 3, 4, 5, 6]], greedy(5))

        assert is_idle(llm)
        assert llm.stats().num_requests == 0
        assert len(llm.generate([1, 2, 3], greedy(5))[0].token_ids) == 5


class TestStream:
    def test_deltas_add_up_to_what_generate_gives(self, llm):
        deltas = list(llm.stream([1, 2, 3], greedy(5)))

        assert [len(delta.token_ids) for delta in deltas] == [1] * 5
        assert sum((delta.token_ids for delta in deltas), ()) == greedy_tokens(
            "llama", [1, 2, 3], 5
        )
        assert [delta.finish_reason for delta in deltas] == [None] * 4 + ["length"]

    def test_closing_aborts(self, llm):
        stream = llm.stream([1, 2, 3], greedy(50))
        next(stream)
        stream.close()

        assert is_idle(llm)
        assert stream.output.finish_reason == "abort"

    def test_dropping_aborts_even_before_the_first_token(self, llm):
        stream = llm.stream([1, 2, 3], greedy(50))
        assert llm.has_unfinished_requests()
        del stream
        gc.collect()

        assert is_idle(llm)

    def test_a_bad_prompt_is_refused_at_the_call(self, llm):
        with pytest.raises(RequestError):
            llm.stream([VOCAB_SIZE])

    def test_two_streams_take_turns_and_do_not_mix(self, llm):
        first, second = llm.stream([1, 2, 3], greedy(6)), llm.stream([9, 8], greedy(6))
        collected = {"first": (), "second": ()}
        for one, other in zip(first, second, strict=True):
            collected["first"] += one.token_ids
            collected["second"] += other.token_ids

        assert collected["first"] == greedy_tokens("llama", [1, 2, 3], 6)
        assert collected["second"] == greedy_tokens("llama", [9, 8], 6)


class TestManualLoop:
    def test_steps_return_what_changed_until_nothing_is_left(self, llm):
        ids = [llm.add_request([1, 2], greedy(2)), llm.add_request([3], greedy(3), request_id="x")]
        seen = []
        while llm.has_unfinished_requests():
            seen.append({output.request_id: len(output.token_ids) for output in llm.step()})

        assert ids[1] == "x"
        assert seen == [{ids[0]: 1, "x": 1}, {ids[0]: 2, "x": 2}, {"x": 3}]
        assert llm.step() == []

    def test_a_live_id_is_refused_and_a_finished_one_may_come_again(self, llm):
        llm.add_request([1], greedy(1), request_id="x")
        with pytest.raises(RequestError, match="'x'"):
            llm.add_request([1], greedy(1), request_id="x")
        while llm.has_unfinished_requests():
            llm.step()
        llm.add_request([1], greedy(1), request_id="x")
        while llm.has_unfinished_requests():
            llm.step()

    def test_abort_is_reported_and_an_unknown_id_is_false(self, llm):
        request_id = llm.add_request([1], greedy(9))
        llm.step()

        assert llm.abort(request_id)
        assert not llm.abort(request_id)
        assert not llm.abort("unknown")
        (output,) = llm.step()
        assert (output.finish_reason, output.finished) == ("abort", True)
        assert not llm.has_unfinished_requests()

    def test_a_generate_in_between_takes_nothing_away_from_it(self, llm):
        request_id = llm.add_request([1, 2], greedy(3))
        llm.generate([7, 8], greedy(6))
        (output,) = llm.step()

        assert output.request_id == request_id
        assert output.finished
        assert output.token_ids == greedy_tokens("llama", [1, 2], 3)


def test_threads_get_their_own_answers(llm):
    prompts = {thread: random_prompts(5, seed=thread) for thread in range(8)}
    answers = {}

    def work(thread):
        answers[thread] = [
            llm.generate(prompt, greedy(4))[0].token_ids for prompt in prompts[thread]
        ]

    threads = [threading.Thread(target=work, args=(thread,)) for thread in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for thread, mine in prompts.items():
        assert answers[thread] == [greedy_tokens("llama", prompt, 4) for prompt in mine]


def test_the_state_is_safe_to_keep(llm):
    llm.add_request([1, 2, 3], greedy(6))
    llm.step()
    kept = llm.state
    tokens = kept.running[0].token_ids
    while llm.has_unfinished_requests():
        llm.step()

    assert kept.running[0].token_ids == tokens
    assert kept is not llm.state


def test_the_state_is_seen_at_rest_also_while_a_step_runs():
    seen = []

    class Looking:
        def __init__(self, executor):
            self.executor, self.close = executor, executor.close
            self.recover = executor.recover

        def submit(self, batch, rows):
            thread = threading.Thread(target=lambda: seen.append(llm.state))
            thread.start()
            thread.join()
            return self.executor.submit(batch, rows)

    with tiny_llm() as llm:
        llm._engine._loop.executor = Looking(llm._engine._loop.executor)
        llm.generate(random_prompts(3), greedy(4))

    assert len(seen) == 4
    for state in seen:
        check(state, at_rest=True)


def test_a_finished_stream_leaves_a_later_request_of_its_name_alone(llm):
    stream = llm.stream([1, 2], greedy(2))
    list(stream)
    llm.add_request([3], greedy(9), request_id=stream.request_id)
    stream.close()
    del stream
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()

    assert outputs[-1].finish_reason == "length"


def test_threads_may_share_the_manual_loop(llm):
    collected = []

    def work():
        while llm.has_unfinished_requests():
            collected.extend(output for output in llm.step() if output.finished)

    for index, prompt in enumerate(random_prompts(30)):
        llm.add_request(prompt, greedy(1 + index % 4))
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {output.finish_reason for output in collected} == {"length"}
    assert len({output.request_id for output in collected}) == 30


@pytest.mark.parametrize("call", ["generate", "stream", "add_request"])
def test_a_closed_engine_says_so(call):
    llm = tiny_llm(attention_backend="torch")
    llm.close()
    with pytest.raises(NanoVLLMError, match="closed"):
        getattr(llm, call)([1, 2])

    assert llm.step() == []


def test_resetting_the_prefix_cache_forgets_it(llm):
    prompt = list(range(40))
    llm.generate(prompt, greedy(1))
    hit = llm.generate(prompt, greedy(1))[0].num_cached_tokens
    llm.reset_prefix_cache()
    miss = llm.generate(prompt, greedy(1))[0].num_cached_tokens

    assert hit >= 32
    assert miss == 0


def test_closing_twice_is_no_error_and_ends_what_runs():
    llm = tiny_llm()
    stream = llm.stream([1, 2], greedy(50))
    next(stream)
    llm.close()
    llm.close()

    assert stream.output.finish_reason == "abort"


def test_a_dropped_engine_gives_its_threads_and_memory_back():
    before = threading.active_count()
    llm = tiny_llm(attention_backend="native")
    llm.generate([1, 2], greedy(2))
    engine = weakref.ref(llm._engine)
    del llm
    gc.collect()

    assert engine() is None
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "options",
    [{"device": "cuda:99"}, {"dtype": "int3"}, {"max_model_len": 10**6}, {"max_num_seqs": 0}],
)
def test_options_that_can_not_work_are_refused(options):
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        tiny_llm(**options)


def test_a_misspelt_option_is_a_type_error():
    with pytest.raises(TypeError, match="max_num_sequences"):
        tiny_llm(max_num_sequences=3)
