"""The native step computes what the decoder in torch computes, for every kind of batch."""

import random

import attrs
import numpy as np
import pytest
import torch

from tests.checkpoints import FAMILIES, VOCAB_SIZE, checkpoint_folder, reference_model
from tests.model.paged_model import BLOCK_SIZE, NUM_BLOCKS, kv_cache, load, make_batch, run

pytest.importorskip("numba", reason="the native backend needs Numba")

from nanovllm.model.config import read_model_config  # after the skip
from nanovllm.model.linear import PlainLinear  # as above
from nanovllm.model.safetensors_checkpoint import open_folder  # as above
from nanovllm.runtime.native.loading import load_in_panels  # as above
from nanovllm.runtime.native.panels import PanelLinear  # as above
from nanovllm.runtime.native.program import NativeProgram, native_obstacle  # as above

MAX_TOKENS = 64


def load_panels(name, dtype, *, int8=False):
    checkpoint = open_folder(checkpoint_folder(name))
    config = read_model_config(checkpoint.config, source=checkpoint.source)
    return load_in_panels(checkpoint, config, dtype=dtype, int8=int8)


@pytest.fixture
def make_program():
    """Programs whose threads end with the test."""
    programs = []

    def make(name, dtype=torch.float32, num_threads=2, int8=False):
        decoder = load_panels(name, dtype, int8=int8)
        cache = kv_cache(decoder, dtype)
        program = NativeProgram(
            decoder,
            cache,
            block_size=BLOCK_SIZE,
            max_num_seqs=9,
            max_num_batched_tokens=MAX_TOKENS,
            max_model_len=NUM_BLOCKS * BLOCK_SIZE,
            num_threads=num_threads,
        )
        programs.append(program)
        cache.fill_(float("nan"))  # whatever is read before it is written shows
        return program

    yield make
    for program in programs:
        program.close()


def random_rows(num_decodes, num_prefills, *, seed=0):
    """Rows of a batch, (tokens, computed before, blocks), over blocks scattered at random."""
    rng = random.Random(seed)
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    rows = []
    for index in range(num_decodes + num_prefills):
        tokens = rng.choices(range(VOCAB_SIZE), k=rng.randint(2, 14))
        start = len(tokens) - 1 if index < num_decodes else rng.randint(0, len(tokens) - 2)
        rows.append((tokens, start, [blocks.pop() for _ in range(-(-len(tokens) // BLOCK_SIZE))]))
    return rows


def warm(program, rows):
    """Compute what the rows say was computed before."""
    for tokens, start, blocks in rows:
        if start:
            program.run(last_only(make_batch([(tokens[:start], 0, blocks)])))


def last_only(batch):
    return attrs.evolve(batch, logits_indices=batch.logits_indices[-1:])


def expected_logits(name, rows):
    with torch.inference_mode():
        return torch.stack(
            [reference_model(name)(torch.tensor([tokens])).logits[0, -1] for tokens, _, _ in rows]
        )


BATCHES = [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (9, 0), (0, 1), (0, 4), (1, 1), (3, 2), (5, 3)]


@pytest.mark.parametrize(("num_decodes", "num_prefills"), BATCHES)
def test_every_kind_of_batch_gives_the_logits_of_transformers(
    make_program, num_decodes, num_prefills
):
    rows = random_rows(num_decodes, num_prefills, seed=num_decodes * 10 + num_prefills)
    program = make_program("llama")
    warm(program, rows)
    logits = program.run(make_batch(rows))

    torch.testing.assert_close(logits, expected_logits("llama", rows), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_logits_of_transformers(make_program, name):
    rows = random_rows(3, 2, seed=7)
    program = make_program(name)
    warm(program, rows)
    logits = program.run(make_batch(rows))

    torch.testing.assert_close(logits, expected_logits(name, rows), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_torch_in_bfloat16_is(make_program, name):
    rows = random_rows(3, 2, seed=8)
    expected = expected_logits(name, rows)
    program = make_program(name, torch.bfloat16)
    warm(program, rows)
    native = program.run(make_batch(rows))
    decoder = load(name, torch.bfloat16)
    cache = kv_cache(decoder, torch.bfloat16)
    for tokens, start, blocks in rows:
        if start:
            run(decoder, cache, make_batch([(tokens[:start], 0, blocks)]))
    batch = make_batch(rows)
    in_torch = run(decoder, cache, batch)[torch.from_numpy(batch.logits_indices.astype(np.int64))]

    def error(logits):
        return (logits.float() - expected).abs().mean() / expected.abs().mean()

    assert error(native) < max(0.02, 1.2 * error(in_torch))


@pytest.mark.parametrize("name", FAMILIES)
def test_int8_adds_little_to_the_rounding_of_its_weights(make_program, name):
    """Beside torch in bfloat16 with the very weights that int8 leaves."""
    rows = random_rows(3, 2, seed=8)
    program = make_program(name, torch.bfloat16, int8=True)
    warm(program, rows)
    native = program.run(make_batch(rows))
    rounded = load(
        name,
        torch.float32,
        make_linear=lambda weight, bias: PlainLinear(
            PanelLinear(weight.bfloat16(), bias, int8_group=32).unpacked(), bias
        ),
    )
    tied = rounded.config.tie_word_embeddings
    embedding = (
        rounded.lm_head.weight
        if tied
        else PanelLinear(rounded.embedding.bfloat16(), None, int8_group=32).unpacked()
    )
    rounded = attrs.evolve(rounded, embedding=embedding)
    cache = kv_cache(rounded)
    for tokens, start, blocks in rows:
        if start:
            run(rounded, cache, make_batch([(tokens[:start], 0, blocks)]))
    batch = make_batch(rows)
    expected = run(rounded, cache, batch)[torch.from_numpy(batch.logits_indices.astype(np.int64))]

    # K/V in bfloat16 and inputs of 16 bits are all that is left.
    assert (native - expected).abs().mean() < 0.01 * expected.abs().mean()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_bits_do_not_depend_on_who_does_the_work(make_program, num_threads):
    """More threads than cores, so that some are always put aside."""
    rows = random_rows(4, 3, seed=9)
    alone = make_program("qwen3", torch.bfloat16, num_threads=1)
    team = make_program("qwen3", torch.bfloat16, num_threads=num_threads)
    for program in (alone, team):
        warm(program, rows)
    expected = alone.run(make_batch(rows)).clone()
    for _ in range(40):
        assert torch.equal(team.run(make_batch(rows)), expected)


def test_helpers_that_slept_wake_and_those_that_lag_are_harmless(make_program):
    import time

    rows = random_rows(2, 1, seed=10)
    program = make_program("llama", num_threads=3)
    warm(program, rows)
    expected = program.run(make_batch(rows)).clone()
    for pause_s in (0, 0.02, 0, 0.05, 0):
        time.sleep(pause_s)
        for _ in range(30):
            assert torch.equal(program.run(make_batch(rows)), expected)


def test_closing_ends_the_threads_and_may_be_repeated(make_program):
    import threading

    before = threading.active_count()
    program = make_program("llama", num_threads=4)
    assert threading.active_count() == before + 3
    program.close()
    program.close()

    assert threading.active_count() == before


@pytest.mark.parametrize("num_tokens", [1, 3, 9])
def test_a_batch_that_draws_nothing_writes_no_logits(make_program, num_tokens):
    program = make_program("llama")
    program._memory.logits[:] = 7
    batch = make_batch([(list(range(num_tokens)), 0, [0, 1, 2])])
    logits = program.run(attrs.evolve(batch, logits_indices=batch.logits_indices[:0]))

    assert logits.shape == (0, VOCAB_SIZE)
    assert (program._memory.logits == 7).all()


class GuardedNumpy:
    """numpy whose new arrays lie between guards, to see what is written beside them."""

    GUARD_BYTES = 4096

    def __init__(self):
        self.arrays = []

    def __getattr__(self, name):
        return getattr(np, name)

    def zeros(self, shape, dtype):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.full(num_bytes + 2 * self.GUARD_BYTES, 0xA5, np.uint8)
        inner = raw[self.GUARD_BYTES : self.GUARD_BYTES + num_bytes]
        inner[:] = 0
        self.arrays.append((shape, raw))
        return inner.view(dtype).reshape(shape)

    def touched(self):
        """Shapes of the arrays beside which something was written."""
        guard = self.GUARD_BYTES
        return [
            shape
            for shape, raw in self.arrays
            if (raw[:guard] != 0xA5).any() or (raw[-guard:] != 0xA5).any()
        ]


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens"), [(1, 1), (2, 7), (3, 3), (5, 64), (9, 9)]
)
def test_nothing_is_written_beside_the_buffers(monkeypatch, max_num_seqs, max_num_batched_tokens):
    from nanovllm import LLM
    from nanovllm.runtime import kv_cache as kv_cache_module
    from nanovllm.runtime.native import memory as memory_module
    from nanovllm.runtime.native import team as team_module
    from tests.checkpoints import checkpoint_folder
    from tests.engines import greedy, random_prompts

    guarded = GuardedNumpy()
    monkeypatch.setattr(team_module, "np", guarded)
    for module in (memory_module, kv_cache_module):
        monkeypatch.setattr(module, "lazy_zeros", guarded.zeros)
    for name in ("mistral", "qwen3"):  # groups of 4 and of 2
        with LLM(
            checkpoint_folder(name),
            device="cpu",
            attention_backend="native",
            skip_tokenizer_init=True,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kvcache_block_size=3,
            num_kvcache_blocks=40,
        ) as llm:
            llm.generate(random_prompts(6), greedy(5))

    assert len(guarded.arrays) > 40
    assert guarded.touched() == []


def test_logits_are_overwritten_by_the_next_run(make_program):
    program = make_program("llama")
    rows = random_rows(0, 1, seed=11)
    kept = program.run(last_only(make_batch(rows)))
    before = kept.clone()
    program.run(last_only(make_batch(random_rows(0, 1, seed=12))))

    assert not torch.equal(kept, before), "documented: valid until the next call"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hidden_size": 100}, "hidden_size"),
        ({"intermediate_size": 161}, "intermediate_size"),
        ({"head_dim": 16}, "head_dim"),
    ],
)
def test_shapes_that_do_not_fit_the_vectors_are_named(changes, name):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        **changes,
    }
    obstacle = native_obstacle(read_model_config(config, source="x"))

    assert name in obstacle
    assert (
        native_obstacle(
            read_model_config(
                {**config, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}, source="x"
            )
        )
        is None
    )
