"""`resolve`, the part of nanovllm.config that decides what was left open."""

import re

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.config import (
    DeviceFacts,
    EngineConfig,
    ModelFacts,
)
from nanovllm.core import SchedulerLimits
from nanovllm.errors import ConfigError
from nanovllm.resolve import GRAPH_BYTES, NUM_GRAPH_VARIANTS, PROMPT_SIZES, resolve

GIB = 2**30

MODEL = ModelFacts(
    max_position_embeddings=2048,
    sliding_window=None,
    kv_values_per_token=2 * 4 * 2 * 64,
    dtype="bfloat16",
    eos_token_ids=frozenset({2, 7}),
)
CPU = DeviceFacts("cpu", 16 * GIB, 8 * GIB, frozenset({"float32", "bfloat16"}))
NEW_GPU = DeviceFacts("cuda:0", 24 * GIB, 22 * GIB, frozenset({"float32", "bfloat16", "float16"}))
NO_KERNELS = dict.fromkeys(("triton", "flash_attn", "varlen"), "it is not there")
GPU = attrs.evolve(NEW_GPU, obstacles=NO_KERNELS)
BLOCK_SIZE = 16
DEVICES = pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])


def resolved(device=CPU, model=MODEL, **options):
    return resolve(EngineConfig(**options), model, device)


# The K/V cache


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_a_block_has_room_for_the_keys_and_values_of_its_tokens(dtype, size, block_size):
    config = resolved(dtype=dtype, kvcache_block_size=block_size, num_kvcache_blocks=3)

    assert config.kv_cache_bytes == 3 * block_size * MODEL.kv_values_per_token * size


@pytest.mark.parametrize(("free_gib", "budget_gib"), [(1, 0.25), (8, 2), (16, 4), (500, 4)])
def test_a_cpu_gives_a_quarter_of_what_is_free_and_4_gib_at_most(free_gib, budget_gib):
    device = attrs.evolve(CPU, free_bytes=free_gib * GIB)
    config = resolved(device, max_num_seqs=10**6)

    assert config.kv_cache_bytes == budget_gib * GIB


@pytest.mark.parametrize(
    ("total", "free", "share", "budget"),
    [(24, 22, 0.9, 19.6), (24, 22, 1, 22), (80, 79, 0.5, 39), (24, 10, 0.9, 7.6)],
)
def test_a_gpu_gives_the_share_asked_for_less_all_that_is_in_use(total, free, share, budget):
    device = attrs.evolve(GPU, total_bytes=total * GIB, free_bytes=free * GIB)
    block_bytes = BLOCK_SIZE * MODEL.kv_values_per_token * 2
    config = resolved(device, gpu_memory_utilization=share, max_num_seqs=10**6)

    assert config.num_kvcache_blocks == int(budget * GIB) // block_bytes


@DEVICES
def test_no_more_blocks_than_the_limits_can_fill(device):
    config = resolved(device, max_num_seqs=3, max_model_len=1000, kvcache_block_size=256)

    assert config.num_kvcache_blocks == 3 * 4  # 1000 tokens take four blocks


@DEVICES
@pytest.mark.parametrize("free_bytes", [1, 8 * GIB])
def test_what_was_asked_for_is_given_whatever_is_free(device, free_bytes):
    device = attrs.evolve(device, free_bytes=free_bytes)
    block_bytes = 16 * MODEL.kv_values_per_token * 2

    by_number = resolved(device, kvcache_block_size=16, num_kvcache_blocks=77)
    by_bytes = resolved(device, kvcache_block_size=16, kv_cache_bytes=78 * block_bytes - 1)

    assert by_number == by_bytes
    assert by_number.num_kvcache_blocks == 77
    assert by_number.kv_cache_bytes == 77 * block_bytes


@DEVICES
def test_less_than_a_block_is_refused_with_both_sizes(device):
    block_bytes = 16 * MODEL.kv_values_per_token * 2

    assert resolved(device, kvcache_block_size=16, kv_cache_bytes=block_bytes).num_kvcache_blocks
    with pytest.raises(ConfigError, match=f"`kv_cache_bytes` is {block_bytes - 1} .*{block_bytes}"):
        resolved(device, kvcache_block_size=16, kv_cache_bytes=block_bytes - 1)


CROWDED = attrs.evolve(GPU, free_bytes=10 * GIB)  # others use 12 GiB, the weights 2


def test_memory_that_others_use_is_an_error_with_the_numbers():
    with pytest.raises(ConfigError) as caught:
        resolved(CROWDED, gpu_memory_utilization=0.4)

    message = str(caught.value)
    for number in (CROWDED.total_bytes, 14 * GIB, BLOCK_SIZE * MODEL.kv_values_per_token * 2):
        assert str(number) in message
    assert "`gpu_memory_utilization`" in message
    assert "40%" in message


def test_memory_that_others_use_is_an_error_with_the_share_that_would_do():
    with pytest.raises(ConfigError) as caught:
        resolved(CROWDED, gpu_memory_utilization=0.4)

    named = re.search(r"`gpu_memory_utilization`\D*(0\.\d+)", str(caught.value))
    assert named is not None, str(caught.value)
    assert resolved(CROWDED, gpu_memory_utilization=float(named[1])).num_kvcache_blocks >= 1
    assert float(named[1]) < 0.61


@pytest.mark.parametrize("free_bytes", [0, 1, 1000])
def test_a_cpu_without_memory_is_an_error_with_the_numbers(free_bytes):
    with pytest.raises(ConfigError, match=rf"25% of {free_bytes} free bytes") as caught:
        resolved(attrs.evolve(CPU, free_bytes=free_bytes))

    assert str(BLOCK_SIZE * MODEL.kv_values_per_token * 2) in str(caught.value)


@given(
    total=st.integers(1, 2**40),
    free=st.floats(0, 1),
    share=st.floats(0.01, 1),
    is_cpu=st.booleans(),
    max_num_seqs=st.integers(1, 10**5),
)
@settings(max_examples=60, deadline=None)
def test_the_cache_is_at_least_a_block_and_within_the_budget_or_refused(
    total, free, share, is_cpu, max_num_seqs
):
    free_bytes = int(free * total)
    device = attrs.evolve(CPU if is_cpu else GPU, total_bytes=total, free_bytes=free_bytes)
    budget = free_bytes / 4 if is_cpu else total * share - (total - free_bytes)
    block_bytes = MODEL.kv_values_per_token * 2 * BLOCK_SIZE

    try:
        config = resolved(device, gpu_memory_utilization=share, max_num_seqs=max_num_seqs)
    except ConfigError:
        assert budget < block_bytes + 1
    else:
        assert config.num_kvcache_blocks >= 1
        assert config.kv_cache_bytes == config.num_kvcache_blocks * block_bytes <= budget


# Lengths


@pytest.mark.parametrize("window", [None, 2048, 5000])
def test_a_request_may_be_as_long_as_the_model_was_trained_for(window):
    model = attrs.evolve(MODEL, sliding_window=window)

    assert resolved(model=model).max_model_len == 2048
    assert resolved(model=model, max_model_len=2048).max_model_len == 2048
    assert resolved(model=model, max_model_len=1).max_model_len == 1
    with pytest.raises(
        ConfigError, match="`max_model_len` is 2049 but the model was trained for 2048; lower it to"
    ):
        resolved(model=model, max_model_len=2049)


def test_a_request_may_be_as_long_as_the_sliding_window():
    model = attrs.evolve(MODEL, sliding_window=512)

    config = resolved(model=model)

    assert config.max_model_len == resolved(model=model, max_model_len=512).max_model_len == 512
    assert any("max_model_len 512" in note and "sliding window" in note for note in config.notes)
    with pytest.raises(ConfigError, match=r"`max_model_len` is 513 .*window of 512.* to 512 or"):
        resolved(model=model, max_model_len=513)


# Types


@pytest.mark.parametrize(
    ("checkpoint", "fast", "dtype"),
    [
        ("bfloat16", {"float32", "bfloat16"}, "bfloat16"),
        ("bfloat16", {"float32"}, "float32"),  # a CPU without bfloat16
        ("bfloat16", {"float32", "float16"}, "float16"),  # a GPU before Ampere
        ("float16", {"float32", "float16", "bfloat16"}, "float16"),
        ("float16", {"float32"}, "float32"),
        ("float32", {"float32", "bfloat16"}, "float32"),
        ("float64", {"float32", "bfloat16"}, "float32"),
        ("int8", {"float32"}, "float32"),
        (None, {"float32", "bfloat16"}, "float32"),
    ],
)
def test_takes_the_checkpoints_type_where_it_is_fast(checkpoint, fast, dtype):
    device = attrs.evolve(CPU, fast_dtypes=frozenset(fast))
    model = attrs.evolve(MODEL, dtype=checkpoint)

    config = resolved(device, model)

    assert config.dtype == dtype
    assert any(
        note.startswith(f"dtype {dtype}: ")
        and ("as the checkpoint" if dtype == checkpoint else f"{checkpoint or 'no type'}") in note
        for note in config.notes
    )


@DEVICES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_takes_the_type_asked_for_even_where_it_is_slow(device, dtype):
    config = resolved(attrs.evolve(device, fast_dtypes=frozenset({"float32"})), dtype=dtype)

    assert config.dtype == dtype
    assert f"dtype {dtype}: as asked" in config.notes


# Backends


def test_runs_natively_where_nothing_stands_in_the_way():
    assert resolved().attention_backend == "native"
    assert resolved(attention_backend="native").attention_backend == "native"
    assert resolved(attention_backend="torch").attention_backend == "torch"
    assert "backend torch: as asked" in resolved(attention_backend="torch").notes


@pytest.mark.parametrize(
    ("device", "dtype", "obstacle"),
    [
        (attrs.evolve(CPU, obstacles={"native": "Numba is out"}), "auto", "Numba is out"),
        (CPU, "float16", "not in float16"),
    ],
    ids=["obstacle", "float16"],
)
def test_an_obstacle_leads_to_torch_or_to_an_error_that_says_it(device, dtype, obstacle):
    config = resolved(device, dtype=dtype)

    assert config.attention_backend == "torch"
    assert any(note.startswith("backend torch") and obstacle in note for note in config.notes)
    assert resolved(device, dtype=dtype, attention_backend="torch").attention_backend == "torch"
    with pytest.raises(ConfigError, match=f"`attention_backend` is 'native' but .*{obstacle}"):
        resolved(device, dtype=dtype, attention_backend="native")


def test_a_gpu_runs_on_the_first_kernels_that_are_there():
    names = ["triton", "flash_attn", "varlen", "torch"]
    for count, name in enumerate(names):
        device = attrs.evolve(NEW_GPU, obstacles=dict.fromkeys(names[:count], "it is broken"))
        config = resolved(device)

        assert config.attention_backend == name
        (note,) = [note for note in config.notes if note.startswith(f"backend {name}")]
        assert note.count("it is broken") == count


@pytest.mark.parametrize("name", ["flash_attn", "varlen"])
def test_kernels_that_read_pages_of_256_get_such_blocks_or_are_refused(name):
    assert resolved(NEW_GPU, attention_backend=name).kvcache_block_size == 256
    assert resolved(NEW_GPU, attention_backend=name, kvcache_block_size=512)
    with pytest.raises(ConfigError, match="multiple of 256, not 64; use 'auto', 'triton', 'torch'"):
        resolved(NEW_GPU, attention_backend=name, kvcache_block_size=64)
    with pytest.raises(ConfigError, match="not in float32"):
        resolved(NEW_GPU, attention_backend=name, dtype="float32")


@pytest.mark.parametrize(
    ("device", "name", "why"),
    [(CPU, "triton", "it is for NVIDIA GPUs"), (NEW_GPU, "native", "it is for CPUs")],
    ids=["cpu", "gpu"],
)
def test_a_backend_of_another_device_is_refused_and_not_mentioned_otherwise(device, name, why):
    assert name not in " ".join(resolved(device).notes)
    with pytest.raises(ConfigError, match=why):
        resolved(device, attention_backend=name)


# CUDA graphs


@pytest.mark.parametrize("max_num_seqs", [1, 3, 12, 100, 200, 300, 513])
def test_there_is_a_graph_for_every_batch_that_there_can_be(max_num_seqs):
    sizes = resolved(NEW_GPU, max_num_seqs=max_num_seqs).graph_batch_sizes

    assert max(sizes) == max_num_seqs
    assert min(sizes) == 1


def test_a_step_holds_no_more_sequences_than_tokens_and_graphs_go_no_further():
    config = resolved(NEW_GPU, max_num_seqs=64, max_num_batched_tokens=10)

    assert max(config.graph_batch_sizes) == 10


def test_the_batch_sizes_asked_for_are_captured_and_the_largest_one_always():
    config = resolved(NEW_GPU, graph_batch_sizes=[8, 1], max_num_seqs=12)

    assert config.graph_batch_sizes == (1, 8, 12)
    with pytest.raises(ConfigError, match=r"`graph_batch_sizes` is .*at most 12 sequences"):
        resolved(NEW_GPU, graph_batch_sizes=[8, 16], max_num_seqs=12)


@pytest.mark.parametrize(
    ("device", "options"),
    [(CPU, {}), (GPU, {}), (NEW_GPU, {"enforce_eager": True}), (CPU, {"graph_batch_sizes": [4]})],
    ids=["cpu", "torch", "eager", "asked for on a cpu"],
)
def test_nothing_is_captured_where_steps_run_as_they_are(device, options):
    config = resolved(device, **options)

    assert config.graph_batch_sizes == config.graph_prompt_sizes == ()


def test_short_prompts_are_captured_where_the_kernels_allow_it():
    assert resolved(NEW_GPU).graph_prompt_sizes == PROMPT_SIZES
    assert resolved(NEW_GPU, max_num_batched_tokens=100).graph_prompt_sizes == (16, 32, 64, 96)
    assert resolved(NEW_GPU, graph_prompt_sizes=[64, 8, 64]).graph_prompt_sizes == (8, 64)
    assert resolved(NEW_GPU, graph_prompt_sizes=[]).graph_prompt_sizes == ()
    with pytest.raises(ConfigError, match=r"`graph_prompt_sizes` is .*at most 50 positions"):
        resolved(NEW_GPU, graph_prompt_sizes=[64], max_num_batched_tokens=50)


@pytest.mark.parametrize("activation_gib", [0, 3])
def test_room_for_steps_and_graphs_is_left_beside_the_cache(activation_gib):
    device = attrs.evolve(NEW_GPU, activation_bytes=activation_gib * GIB)
    unlimited = attrs.evolve(MODEL, max_position_embeddings=10**9)
    config = resolved(device, unlimited, gpu_memory_utilization=0.5)
    num_sizes = len(config.graph_batch_sizes) + len(config.graph_prompt_sizes)
    graphs = NUM_GRAPH_VARIANTS * GRAPH_BYTES * num_sizes
    left = 12 * GIB - 2 * GIB - activation_gib * GIB - graphs  # the share, the weights, steps
    assert left - MODEL.kv_values_per_token * 2 * 64 < config.kv_cache_bytes <= left


# All of it


@DEVICES
def test_what_was_asked_for_is_what_runs(device):
    asked = {
        "max_num_seqs": 5,
        "max_num_batched_tokens": 77,
        "max_prefill_chunk": 33,
        "kvcache_block_size": 24,
        "num_kvcache_blocks": 9,
        "max_model_len": 100,
        "enable_prefix_caching": False,
        "seed": -4,
    }

    config = resolved(device, **asked)

    assert {name: getattr(config, name) for name in asked} == asked
    assert config.device == device.device
    assert config.limits == SchedulerLimits(5, 77, 100, 33, MODEL.eos_token_ids)


@DEVICES
def test_defaults_are_sound_and_said_in_words(device):
    config = resolved(device)

    assert config.kvcache_block_size == BLOCK_SIZE
    assert 1 <= config.max_num_seqs <= config.max_num_batched_tokens
    assert config.max_prefill_chunk < config.max_num_batched_tokens
    for word in ("dtype", "K/V blocks", "backend"):
        assert sum(word in note for note in config.notes) == 1, word


@DEVICES
def test_is_pure(device):
    options = EngineConfig(dtype="float32"), MODEL, device
    kept = [attrs.asdict(option) for option in options]

    assert resolve(*options) == resolve(*options)
    assert [attrs.asdict(option) for option in options] == kept
