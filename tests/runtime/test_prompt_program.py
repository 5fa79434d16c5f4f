"""Steps with prompts as captured programs: their inputs, and what survives a replay."""

import random

import attrs
import numpy as np
import pytest
import torch

from graphs.tape import TapeBackend
from nanovllm import SamplingParams
from nanovllm.runtime import prompt_program
from nanovllm.runtime.prompt_program import PromptLayout, prompt_layouts
from tests.checkpoints import greedy_tokens
from tests.engines import greedy, is_idle, random_prompts, tiny_llm
from tests.runtime.graph_engines import graph_llm
from tests.runtime.sampling_rows import leave_the_cores_to_others

one_thread = pytest.fixture(autouse=True, scope="module")(leave_the_cores_to_others)

PAD_BLOCK = 77


def random_arrays(rng, layout):
    """The inputs of a step that fits, by name."""
    num_rows = rng.integers(1, layout.num_rows + 1)
    spare = layout.num_positions - num_rows
    lens = 1 + rng.multinomial(rng.integers(0, spare + 1), np.full(num_rows, 1 / num_rows))
    num_columns = rng.integers(1, layout.num_table_columns + 1)
    num_drawn = rng.integers(0, num_rows + 1)
    num_positions = int(lens.sum())

    def int32(*shape):
        return rng.integers(1, 1000, shape).astype(np.int32)

    return {
        "out_offset": int32(1),
        "input_ids": int32(num_positions),
        "positions": int32(num_positions),
        "slot_mapping": int32(num_positions),
        "context_lens": int32(num_rows),
        "cu_seqlens_q": np.concatenate([[0], lens.cumsum()]).astype(np.int32),
        "block_tables": int32(num_rows, num_columns),
        "logits_indices": int32(num_drawn),
        "position": int32(num_drawn),
        "temperature": rng.random(num_drawn).astype(np.float32),
        "min_p": rng.random(num_drawn).astype(np.float32),
        "seed_low": int32(num_drawn),
        "seed_high": int32(num_drawn),
    }


@pytest.mark.parametrize("layout", [PromptLayout(16, 8, 5, PAD_BLOCK), PromptLayout(3, 3, 1, 0)])
def test_a_step_reads_what_was_packed_and_padding_whatever_was_there_before(layout):
    rng = np.random.default_rng(layout.num_positions)
    for _ in range(200):
        arrays = random_arrays(rng, layout)
        vector = rng.integers(-(2**31), 2**31, layout.num_words + 3).astype(np.int32)
        behind = vector[layout.num_words :].copy()
        layout.pack(arrays, vector)
        views = layout.views(torch.from_numpy(vector)[: layout.num_words])

        assert (vector[layout.num_words :] == behind).all()
        assert views.keys() == arrays.keys()
        assert views.pop("out_offset") == arrays.pop("out_offset")
        table, given = views.pop("block_tables").numpy(), arrays.pop("block_tables")
        num_rows, num_columns = given.shape
        assert (table[:num_rows, :num_columns] == given).all()
        assert (table[:num_rows, num_columns:] == layout.pad_block).all()
        assert (table[num_rows:] == layout.pad_block).all()
        for name, given in arrays.items():
            view, count = views[name].numpy(), len(given)
            pad = {"slot_mapping": -1, "cu_seqlens_q": given[-1] if count else None}.get(name, 0)
            assert view.dtype == given.dtype
            assert (view[:count] == given).all(), name
            assert (view[count:] == pad).all(), name
            assert view.ctypes.data % 16 == vector.ctypes.data % 16


def test_padding_alone_has_no_row_and_stores_nothing():
    layout = PromptLayout(16, 8, 5, PAD_BLOCK)
    views = layout.views(torch.from_numpy(layout.empty()))

    assert (views["slot_mapping"] == -1).all()
    assert (views["cu_seqlens_q"] == 0).all()
    assert (views["block_tables"] == PAD_BLOCK).all()


def test_there_is_a_size_of_few_rows_and_one_of_all():
    found = prompt_layouts((4, 16, 64), max_num_rows=20, num_table_columns=3, pad_block=9)

    assert [(one.num_positions, one.num_rows) for one in found] == [
        (4, 4),
        (16, 8),
        (16, 16),
        (64, 8),
        (64, 20),
    ]


def busy(llm, *, seed, count=24):
    """Requests that arrive while others run, so that steps mix prompts and decodes of all sizes."""
    rng = random.Random(seed)
    prompts = random_prompts(count, seed=seed)
    params = [
        greedy(rng.randint(1, 9))
        if rng.random() < 0.5
        else SamplingParams(
            temperature=0.9,
            min_p=rng.choice((0.0, 0.1)),
            seed=i,
            max_tokens=rng.randint(1, 9),
            ignore_eos=True,
        )
        for i in range(count)
    ]
    waiting, done, names = list(range(count)), {}, {}
    while waiting or llm.has_unfinished_requests():
        for _ in range(rng.choice((0, 0, 1, 1, 3))):
            if waiting:
                index = waiting.pop(0)
                names[llm.add_request(prompts[index], params[index])] = index
        for output in llm.step():
            if output.finished:
                done[names[output.request_id]] = output.token_ids
    return [done[index] for index in range(count)]


OPTIONS = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 9, "max_prefill_chunk": 5},
    "preempted": {"kvcache_block_size": 4, "num_kvcache_blocks": 22},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("seed", range(4))
def test_captured_steps_with_prompts_give_the_tokens_of_the_plain_executor(seed, options):
    options = {"max_num_seqs": 6, **options}
    with tiny_llm(attention_backend="torch", **options) as llm:
        want = busy(llm, seed=seed)
    records = []
    with graph_llm(prompt_sizes=(2, 8, 32), sizes=(1, 4, 6), **options) as llm:
        llm.subscribe(records.append)
        got = busy(llm, seed=seed)
        assert is_idle(llm)

    assert got == want
    buckets = {record.bucket for record in records if record.num_prefill_tokens}
    assert len(buckets) > 1


def replayed(prompts, **options):
    """Tokens by an engine whose steps are replayed over poisoned memory, and what it found."""
    events, records = [], []
    with graph_llm(
        backend=TapeBackend(), events=events, prompt_sizes=(4, 24), sizes=(2,), **options
    ) as llm:
        llm.subscribe(records.append)
        outputs = llm.generate(prompts, greedy(4))
        findings = llm._engine._loop.executor._captured._session.findings
    assert {record.mode for record in records if record.num_prefill_tokens} == {"replay"}
    return [output.token_ids for output in outputs], list(findings)


def test_they_depend_on_nothing_but_their_inputs():
    """Replayed over memory full of NaN, as if all other graphs had run in between."""
    prompts = random_prompts(5, seed=3, longest=20)
    tokens, findings = replayed(prompts, max_num_seqs=2)

    assert findings == []
    assert tokens == [greedy_tokens("llama", prompt, 4) for prompt in prompts]


FAULTS = {
    "padding is stored": {"slot_mapping": 3},
    "padding rows begin at 0": {"cu_seqlens_q": 0},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_wrong_padding_is_seen(fault, monkeypatch):
    prompts = random_prompts(5, seed=3, longest=20)
    sound = PromptLayout.pack

    def pack(layout, arrays, out):
        sound(layout, arrays, out)
        for name, pad in fault.items():
            place, _ = layout._places[name]
            out[place][len(arrays[name]) :] = pad

    monkeypatch.setattr(prompt_program.PromptLayout, "pack", pack)
    tokens, _ = replayed(prompts, max_num_seqs=2)

    assert tokens != [greedy_tokens("llama", prompt, 4) for prompt in prompts]


def test_a_layout_is_a_value():
    layout = PromptLayout(16, 8, 5, PAD_BLOCK)

    assert attrs.evolve(layout, num_rows=4) == PromptLayout(16, 4, 5, PAD_BLOCK)
    assert hash(layout) == hash(PromptLayout(16, 8, 5, PAD_BLOCK))
