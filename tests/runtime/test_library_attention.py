"""What libraries are called with, and what keeps one from being called.

The libraries are stood in for by functions with their signatures, which note what they are given
and compute the answer from it: the one thing that can't be tried without a GPU is the library.
"""

import inspect
import sys
import types
from collections import deque

import attrs
import numpy as np
import pytest
import torch

from nanovllm.kernels import ops
from nanovllm.runtime import library_attention
from nanovllm.runtime.library_attention import (
    FlashAttention,
    VarlenAttention,
    make_attention,
    obstacles,
)
from nanovllm.runtime.paged_attention import AttentionShape, TritonAttention
from nanovllm.runtime.verify_graphs import attention_for, decode_schedule, verify_world
from nanovllm.runtime.verify_worlds import CapturedWorld, Geometry, PlainWorld
from tests.runtime.decoders import plain_decoder
from tests.runtime.sampling_rows import leave_the_cores_to_others

one_thread = pytest.fixture(autouse=True, scope="module")(leave_the_cores_to_others)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 16, 256, 6
MAX_MODEL_LEN = 700
SHAPE = AttentionShape(NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, MAX_MODEL_LEN, num_sms=132)
HOPPER = (9, 0)


def attend(query, keys, values, block_table, lens_k, cu_seqlens_q, max_q, scale):
    """The answer, from what a library is given: `[T, H, D]`."""
    num_blocks, block_size, num_kv_heads, head_dim = keys.shape
    return ops.paged_prefill(
        query,
        keys.reshape(-1, num_kv_heads, head_dim),
        values.reshape(-1, num_kv_heads, head_dim),
        block_table,
        lens_k.int(),
        cu_seqlens_q,
        max_q,
        block_size,
        scale,
    )


class FakeFlashAttention:
    """The two functions of the flash-attn package, by the names of their arguments."""

    def __init__(self):
        self.calls = []

    def with_kvcache(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        self.calls.append(dict(locals()))
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        answer = attend(
            q[:, 0], k_cache, v_cache, block_table, cache_seqlens, starts, 1, softmax_scale
        )
        return answer[:, None]

    def varlen(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        self.calls.append(dict(locals()))
        lens_k = cu_seqlens_k.diff()
        return attend(q, k, v, block_table, lens_k, cu_seqlens_q, max_seqlen_q, softmax_scale)


class FakeVarlen:
    """`torch.nn.attention.varlen.varlen_attn` as from torch 2.12 on."""

    def __init__(self):
        self.calls = []

    def varlen_attn(
        self,
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
        enable_gqa=False,
        seqused_k=None,
        block_table=None,
        num_splits=None,
    ):
        self.calls.append(dict(locals()))
        return attend(query, key, value, block_table, seqused_k, cu_seq_q, max_q, scale)


@pytest.fixture
def tensors():
    """Random caches of one layer as views of a larger one, and three rows over their blocks."""
    generator = torch.Generator().manual_seed(0)
    num_slots = NUM_BLOCKS * BLOCK_SIZE
    kv_cache = torch.randn(2, 2, num_slots, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    return {
        "key_cache": kv_cache[1, 0],
        "value_cache": kv_cache[1, 1],
        "block_tables": torch.tensor([[4, 0, -1], [2, -1, -1], [1, 5, 3]], dtype=torch.int32),
        "context_lens": torch.tensor([300, 1, 700], dtype=torch.int32),
    }


def queries(count):
    return torch.randn(count, NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))


LENS_Q = (5, 1, 3)
CU_SEQLENS_Q = torch.tensor([0, 5, 6, 9], dtype=torch.int32)


def flash():
    fake = FakeFlashAttention()
    return FlashAttention(SHAPE, fake.with_kvcache, fake.varlen), fake


def varlen():
    fake = FakeVarlen()
    return VarlenAttention(SHAPE, fake.varlen_attn), fake


def is_page_shaped(call, tensors, *names):
    """Whether these arguments are the caches by block, without a copy."""
    for name, cache in zip(names, ("key_cache", "value_cache"), strict=True):
        pages = call[name]
        assert pages.shape == (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        assert pages.data_ptr() == tensors[cache].data_ptr()
        assert pages.stride(-1) == 1
    return True


@pytest.mark.parametrize("make", [flash, varlen])
def test_decodes_are_those_of_our_kernels(make, tensors):
    attention, _ = make()
    query = queries(3)

    torch.testing.assert_close(
        attention.decode(query, **tensors), TritonAttention(SHAPE).decode(query, **tensors)
    )


@pytest.mark.parametrize("make", [flash, varlen])
def test_prefills_are_those_of_our_kernels(make, tensors):
    attention, _ = make()
    query = queries(sum(LENS_Q))
    # The second row has but one position, and computes it.
    more = {"cu_seqlens_q": CU_SEQLENS_Q, "max_seqlen_q": max(LENS_Q)}

    torch.testing.assert_close(
        attention.prefill(query, **tensors, **more),
        TritonAttention(SHAPE).prefill(query, **tensors, **more),
    )


def test_flash_attention_decodes_with_its_cache_function(tensors):
    attention, fake = flash()
    attention.decode(queries(3), **tensors)

    (call,) = fake.calls
    assert is_page_shaped(call, tensors, "k_cache", "v_cache")
    assert call["q"].shape == (3, 1, NUM_HEADS, HEAD_DIM)
    assert call["cache_seqlens"] is tensors["context_lens"]
    assert call["block_table"] is tensors["block_tables"]
    assert call["cache_seqlens"].dtype == call["block_table"].dtype == torch.int32
    assert call["causal"] is True
    assert call["softmax_scale"] == HEAD_DIM**-0.5


def test_flash_attention_prefills_with_its_varlen_function(tensors):
    attention, fake = flash()
    attention.prefill(queries(9), **tensors, cu_seqlens_q=CU_SEQLENS_Q, max_seqlen_q=5)

    (call,) = fake.calls
    assert is_page_shaped(call, tensors, "k", "v")
    assert call["cu_seqlens_q"] is CU_SEQLENS_Q
    assert call["cu_seqlens_k"].tolist() == [0, 300, 301, 1001]
    assert call["cu_seqlens_k"].dtype == torch.int32
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (5, MAX_MODEL_LEN)
    assert call["causal"] is True


def test_varlen_attention_never_splits_and_never_looks_at_lengths(tensors):
    attention, fake = varlen()
    attention.decode(queries(3), **tensors)
    attention.prefill(queries(9), **tensors, cu_seqlens_q=CU_SEQLENS_Q, max_seqlen_q=5)

    decode, prefill = fake.calls
    assert decode["cu_seq_q"].tolist() == [0, 1, 2, 3]
    assert (decode["max_q"], prefill["max_q"]) == (1, 5)
    for call in fake.calls:
        assert is_page_shaped(call, tensors, "key", "value")
        assert call["max_k"] == MAX_MODEL_LEN
        assert call["num_splits"] == 1
        assert call["window_size"] == (-1, 0)
        assert call["enable_gqa"] is True
        assert call["seqused_k"] is tensors["context_lens"]
        assert call["block_table"] is tensors["block_tables"]
        for name in ("cu_seq_q", "cu_seq_k", "seqused_k", "block_table"):
            assert call[name].dtype == torch.int32, name


@pytest.mark.parametrize("make", [flash, varlen])
def test_launches_do_not_depend_on_lengths(make, tensors):
    """What is no tensor is baked into a capture."""
    attention, fake = make()
    for lens in ([1, 1, 1], [300, 1, 700]):
        given = {**tensors, "context_lens": torch.tensor(lens, dtype=torch.int32)}
        attention.decode(queries(3), **given)

    first, again = (
        {name: value for name, value in call.items() if not isinstance(value, torch.Tensor)}
        for call in fake.calls
    )
    assert first == again


@pytest.mark.parametrize("make", [flash, varlen])
def test_a_decode_step_with_them_is_safe_to_replay(make):
    """All but the library itself: nothing is looked at on the host, kept or read from outside."""
    attention, fake = make()
    fake.calls = deque(maxlen=0)  # a call that is kept holds tensors of the pool
    decoder, geometry = plain_decoder("qwen3"), Geometry(sizes=(1, 4))
    config = decoder.config
    shape = attrs.evolve(
        attention_for(config, geometry).shape, max_model_len=geometry.max_model_len
    )
    attention = attrs.evolve(attention, shape=shape)
    steps = decode_schedule(geometry, config.vocab_size, num_steps=12, seed=0)

    report = verify_world(
        lambda: CapturedWorld(decoder, attention, geometry),
        lambda: PlainWorld(decoder, geometry),
        steps,
        geometry,
    )

    assert report.ok, report


# What keeps a library from being used


@pytest.fixture
def libraries(monkeypatch):
    """All three libraries, as they should be; a test breaks them."""
    fake_flash, fake_varlen = FakeFlashAttention(), FakeVarlen()
    modules = {
        "flash_attn": types.SimpleNamespace(
            flash_attn_with_kvcache=fake_flash.with_kvcache,
            flash_attn_varlen_func=fake_flash.varlen,
        ),
        "torch.nn.attention.varlen": types.SimpleNamespace(varlen_attn=fake_varlen.varlen_attn),
        "triton": types.SimpleNamespace(jit=lambda function: function),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


@pytest.mark.usefixtures("libraries")
def test_nothing_is_in_the_way_where_all_are_there():
    assert obstacles(HOPPER, 128) == {}


BACKENDS = {"triton": "triton", "flash_attn": "flash_attn", "varlen": "torch.nn.attention.varlen"}


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", BACKENDS)
def test_a_library_that_is_not_there_is_an_obstacle(name, monkeypatch):
    monkeypatch.setitem(sys.modules, BACKENDS[name], None)

    found = obstacles(HOPPER, 128)
    assert found.keys() == {name}
    assert f"{BACKENDS[name]} can't be imported (" in found[name]


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("error", [OSError("wrong ABI"), RuntimeError("no driver"), SyntaxError()])
def test_so_is_one_that_fails_to_load(error, monkeypatch):
    def fail(name):
        if name == "flash_attn":
            raise error
        return sys.modules[name]

    monkeypatch.setattr(library_attention.importlib, "import_module", fail)

    found = obstacles(HOPPER, 128)
    assert found.keys() == {"flash_attn"}
    assert type(error).__name__ in found["flash_attn"]


@pytest.mark.parametrize(
    ("module", "function", "name"),
    [
        ("flash_attn", "flash_attn_with_kvcache", "flash_attn"),
        ("flash_attn", "flash_attn_varlen_func", "flash_attn"),
        ("torch.nn.attention.varlen", "varlen_attn", "varlen"),
        ("triton", "jit", "triton"),
    ],
)
def test_so_is_one_without_its_function(libraries, module, function, name):
    delattr(libraries[module], function)

    assert obstacles(HOPPER, 128).keys() == {name}


def test_an_older_one_is_named_with_what_its_function_does_not_take(libraries):
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None):
        """As in torch 2.11."""

    libraries["torch.nn.attention.varlen"].varlen_attn = varlen_attn

    found = obstacles(HOPPER, 128)
    assert found.keys() == {"varlen"}
    for argument in ("block_table", "seqused_k", "num_splits"):
        assert argument in found["varlen"]


@pytest.mark.parametrize("function", ["flash_attn_with_kvcache", "flash_attn_varlen_func"])
def test_flash_attention_must_read_pages_in_both_of_its_functions(libraries, function):
    setattr(libraries["flash_attn"], function, lambda q, k, v, causal=False: None)

    found = obstacles(HOPPER, 128)
    assert found == {"flash_attn": f"{function} of flash_attn does not take block_table"}


def test_every_argument_that_is_passed_is_asked_after(libraries, tensors):
    """A library is chosen by what it takes, so the list must hold all that it is given."""
    attention, fake = varlen()
    attention.decode(queries(3), **tensors)

    since_torch_2_11 = set(inspect.signature(fake.varlen_attn).parameters) - {
        "query",
        "key",
        "value",
        "cu_seq_q",
        "cu_seq_k",
        "max_q",
        "max_k",
        "scale",
        "return_aux",
    }
    assert since_torch_2_11 == library_attention._VARLEN_ARGUMENTS


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("head_dim", [8, 24, 100, 272])
def test_triton_takes_only_some_head_sizes(head_dim):
    found = obstacles(HOPPER, head_dim)

    assert found.keys() == {"triton"}
    assert str(head_dim) in found["triton"]


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_none_runs_on_a_gpu_before_ampere(capability):
    found = obstacles(capability, 128)

    assert found.keys() == BACKENDS.keys()
    assert all(str(capability) in why for why in found.values())


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("flash_attn", FlashAttention), ("varlen", VarlenAttention), ("triton", TritonAttention)],
)
def test_each_name_is_made_of_its_library(name, kind, tensors):
    attention = make_attention(name, SHAPE)

    assert isinstance(attention, kind)
    assert attention.block_size == BLOCK_SIZE
    answer = attention.decode(queries(3), **tensors)
    assert np.isfinite(answer.numpy()).all()


def test_the_real_torch_is_asked_without_failing():
    found = obstacles(HOPPER, 128)

    # Whatever this torch has: an obstacle is a sentence, or there is none.
    assert found.keys() <= BACKENDS.keys()
    assert all(isinstance(why, str) and why for why in found.values())
