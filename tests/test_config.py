import math
import pickle
from pathlib import Path

import attrs
import pytest

from nanovllm import LLM, ConfigError, EngineConfig, NanoVLLMError

NOT_COUNTS = (0, -1, 1.0, 2.5, math.nan, math.inf, "1", True, [1])
NOT_FLAGS = (None, 0, 1, "yes", "", 1.0)

GOOD = {
    "tokenizer": (None, "a/b", "~/tokenizers/other"),
    "device": ("auto", "cpu", "cuda", "cuda:1"),
    "dtype": ("auto", "float32", "bfloat16", "float16", "int8"),
    "max_model_len": (None, 1, 2**40),
    "max_num_seqs": (None, 1, 1000),
    "max_num_batched_tokens": (None, 1, 2**20),
    "max_prefill_chunk": (None, 1, 2**20),
    "kvcache_block_size": (None, 1, 7, 256),
    "num_kvcache_blocks": (None, 1, 2**40),
    "kv_cache_bytes": (None, 1, 2**40),
    "gpu_memory_utilization": (0.9, 1e-6, 1, 1.0),
    "enforce_eager": (True, False),
    "graph_batch_sizes": (None, (1,), (8, 2, 300)),
    "graph_prompt_sizes": (None, (), (16, 300)),
    "enable_prefix_caching": (True, False),
    "attention_backend": ("auto", "native", "triton", "flash_attn", "varlen", "torch"),
    "tensor_parallel_size": (1,),
    "seed": (0, -1, 2**70),
    "skip_tokenizer_init": (True, False),
    "max_queued_requests": (None, 1, 10**6),
    "freeze_gc": (True, False),
}
"""Values at both ends of each range and inside."""

BAD = {
    "tokenizer": (5, True, b"a/b", ["a/b"]),
    "device": ("", None, 0, True, ["cpu"]),
    "dtype": ("", "int4", "fp16", "Float32", "torch.float32", None, 16, ["float32"]),
    **dict.fromkeys(
        (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_prefill_chunk",
            "kvcache_block_size",
            "num_kvcache_blocks",
            "kv_cache_bytes",
            "max_queued_requests",
        ),
        NOT_COUNTS,
    ),
    "gpu_memory_utilization": (0, -0.5, 1.01, 90, math.nan, math.inf, "0.9", None, True, 10**400),
    "enforce_eager": NOT_FLAGS,
    "graph_batch_sizes": ([], (), (0,), (1, -1), (1.0,), (True,), "1", 4, {1: 2}),
    "graph_prompt_sizes": ((0,), (1, -1), (1.0,), (True,), "1", 4, {1: 2}),
    "enable_prefix_caching": NOT_FLAGS,
    "attention_backend": ("", "flash", "Native", None, 1, True),
    "tensor_parallel_size": (0, 2, -1, 1.0, True, None, "1"),
    "seed": (None, 1.0, math.nan, "0", True),
    "skip_tokenizer_init": NOT_FLAGS,
    "freeze_gc": NOT_FLAGS,
}
"""Values just out of range, and of every type that may come along instead of the right one."""


def cases(table):
    pairs = [(name, value) for name, values in table.items() for value in values]
    return pytest.mark.parametrize(("name", "value"), pairs, ids=lambda value: repr(value)[:30])


def test_the_tables_above_cover_every_option():
    names = [field.name for field in attrs.fields(EngineConfig)]

    assert list(GOOD) == names
    assert sorted(BAD) == sorted(names)


# One option at a time


@cases(GOOD)
def test_takes_every_value_in_range_as_it_is(name, value):
    assert getattr(EngineConfig(**{name: value}), name) == value


@cases(BAD)
def test_refuses_what_is_out_of_range_or_of_another_type_and_names_option_and_value(name, value):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})

    shown = tuple(value) if isinstance(value, list) and name.startswith("graph_") else value
    message = str(caught.value)
    assert message.startswith(f"`{name}` is {shown!r} but must be ")
    assert message.endswith(".")


@pytest.mark.parametrize(
    "name", ["max_num_seq", "gpu_memory_utilisation", "block_size", "quantization", "on_steps"]
)
def test_a_misspelt_option_is_a_type_error_that_names_it(name):
    with pytest.raises(TypeError, match=name):
        EngineConfig(**{name: 1})
    with pytest.raises(TypeError, match=name):
        LLM("no such model", **{name: 1})


def test_options_are_given_by_name_only():
    with pytest.raises(TypeError, match="positional"):
        EngineConfig("cpu")


def test_the_engine_says_what_is_wrong_with_an_option_before_it_looks_for_the_model():
    with pytest.raises(ConfigError, match="`max_num_seqs` is 0 but must be an integer >= 1"):
        LLM("no such model", max_num_seqs=0)


def test_the_error_is_a_value_error_of_this_package():
    with pytest.raises(ValueError, match="`seed`") as caught:
        EngineConfig(seed="x")

    assert isinstance(caught.value, NanoVLLMError)


def test_a_folder_may_be_given_as_a_path_for_the_tokenizer_as_for_the_model():
    assert EngineConfig(tokenizer=Path("other")).tokenizer == Path("other")


# Options together


def test_the_size_of_the_cache_is_given_in_one_unit_only():
    with pytest.raises(ConfigError, match="`num_kvcache_blocks` is 5 and `kv_cache_bytes` is 4096"):
        EngineConfig(num_kvcache_blocks=5, kv_cache_bytes=4096)


# As a value


def test_changing_the_list_that_was_passed_afterwards_changes_nothing():
    sizes = [1, 2, 4]
    config = EngineConfig(graph_batch_sizes=sizes)

    sizes.append(8)

    assert config.graph_batch_sizes == (1, 2, 4)


@pytest.mark.parametrize("name", GOOD)
def test_no_option_can_be_set_later(name):
    config = EngineConfig()

    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(config, name, GOOD[name][0])


@pytest.mark.parametrize("name", [name for name, values in GOOD.items() if len(values) > 1])
def test_is_equal_only_if_every_option_is(name):
    one, other = (EngineConfig(**{name: value}) for value in (GOOD[name][0], GOOD[name][-1]))

    assert one != other
    assert one == EngineConfig(**{name: GOOD[name][0]})
    assert hash(one) == hash(EngineConfig(**{name: GOOD[name][0]}))


def test_survives_pickling_and_is_checked_again_when_evolved():
    config = EngineConfig(device="cuda:1", graph_batch_sizes=[1, 8], kv_cache_bytes=4096)

    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ConfigError, match="`num_kvcache_blocks` is 5"):
        attrs.evolve(config, num_kvcache_blocks=5)
