import importlib.util
import re
import sys
import threading

import attrs
import pytest
import torch

from nanovllm import LLM, ConfigError, SamplingParams, build
from nanovllm.build import find_device, read_device_facts, read_model_facts
from nanovllm.model.config import read_model_config
from nanovllm.text.fast_tokenizer import FastTokenizer
from tests.checkpoints import VOCAB_SIZE, checkpoint_folder
from tests.model_folder import EOS_ID, small_tokenizer, tiny_model_folder, write_model_folder

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 77,
    "dtype": "float16",
}
ON_CPU = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 64}


def model_config(**changes):
    return read_model_config(CONFIG | changes, source="test")


# Devices


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that there are so many GPUs."""

    def set_up(count, *, capability=(8, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (22, 24))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return set_up


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize(
    "name", ["foo", "mps", "mps:0", "meta", "xpu", "CPU", "Cuda", "cuda:", "cuda:-1", "cuda:x", " "]
)
def test_a_device_of_another_kind_is_refused_with_its_name(gpus, name, count):
    gpus(count)

    with pytest.raises(ConfigError, match=f"`device` is '{name}'.*'cpu'.*'cuda"):
        find_device(name)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("cuda", 0), ("cuda:0", 0), ("cuda:9", 0), ("cuda:2", 2), ("cuda:9", 2)),
        *((f"cuda:{index}", 2) for index in (127, 128, 255, 256, 257, 65536, 65537, 2**32, 10**30)),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_however_large_its_number(gpus, name, count):
    gpus(count)

    with pytest.raises(ConfigError, match=f"`device` is '{name}' but"):
        find_device(name)


def test_the_refusal_says_how_many_gpus_there_are_and_what_to_do(gpus):
    gpus(0)

    with pytest.raises(ConfigError, match="sees 0 CUDA devices; use 'cpu', or install a CUDA"):
        find_device("cuda:9")


@pytest.mark.parametrize(
    ("name", "count", "device"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
        ("cuda:10", 11, "cuda:10"),
    ],
)
def test_finds_a_device_that_is_there(gpus, name, count, device):
    gpus(count)

    assert find_device(name) == torch.device(device)


def test_memory_that_torch_keeps_of_tensors_that_are_gone_counts_as_free(gpus, monkeypatch):
    """An engine that was closed has left it so."""
    gpus(1)
    free = [5]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 24))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(free.pop() + 10))

    assert read_device_facts(torch.device("cuda", 0), model_config()).free_bytes == 15


def test_a_cpu_tells_its_memory_and_may_run_natively():
    facts = read_device_facts(torch.device("cpu"), model_config())

    assert (facts.device, facts.is_cpu) == ("cpu", True)
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert "float32" in facts.fast_dtypes


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_tells_its_memory_and_computes_in_bfloat16_from_ampere_on(gpus, capability, fast):
    gpus(2, capability=capability)

    facts = read_device_facts(torch.device("cuda:1"), model_config())

    assert (facts.device, facts.total_bytes, facts.free_bytes) == ("cuda:1", 24, 22)
    assert "native" not in facts.obstacles  # it is not for GPUs at all
    assert facts.fast_dtypes == {"float16", "float32", *(["bfloat16"] if fast else [])}


# Models


@attrs.frozen
class Checkpoint:
    generation_config: dict


EOS = pytest.mark.parametrize(
    "entry", [{}, {"eos_token_id": None}, {"eos_token_id": 5}, {"eos_token_id": [9, 5]}], ids=repr
)
ALSO = {"eos_token_id": 11}


def eos_ids(entry):
    value = entry.get("eos_token_id")
    return set() if value is None else {value} if isinstance(value, int) else set(value)


@EOS
@pytest.mark.parametrize("of_tokenizer", [None, frozenset(), frozenset({7})])
@pytest.mark.parametrize("in_config", [True, False])
def test_ids_that_end_a_text_are_those_of_config_generation_config_and_tokenizer(
    entry, of_tokenizer, in_config
):
    config, generation = (entry, ALSO) if in_config else (ALSO, entry)
    tokenizer = None
    if of_tokenizer is not None:
        tokenizer = FastTokenizer(small_tokenizer(), eos_token_ids=of_tokenizer)

    facts = read_model_facts(Checkpoint(generation), model_config(**config), tokenizer)

    assert facts.eos_token_ids == eos_ids(entry) | {11} | (of_tokenizer or set())


def test_a_model_may_have_nothing_that_ends_a_text():
    assert read_model_facts(Checkpoint({}), model_config(), None).eos_token_ids == frozenset()


def test_a_models_facts_are_those_of_its_config():
    facts = read_model_facts(Checkpoint({}), model_config(), None)

    assert facts.kv_values_per_token == 2 * 3 * 2 * 64  # K and V, layers, heads, size of a head
    assert facts.max_position_embeddings == 77
    assert facts.dtype == "float16"
    assert facts.sliding_window is None


def test_each_of_the_ids_ends_a_text_and_is_said_to_have(tmp_path):
    folder = write_model_folder(
        tmp_path / "model", config={"eos_token_id": 3}, generation={"eos_token_id": [5, 9]}
    )
    with LLM(folder, attention_backend="torch", **ON_CPU) as llm:
        assert llm.config.eos_token_ids == {EOS_ID, 3, 5, 9}
        for eos_id in (EOS_ID, 3, 5, 9):
            params = SamplingParams(temperature=0, max_tokens=4, logit_bias={eos_id: 1e4})
            (output,) = llm.generate([1, 2], params)
            assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", eos_id)
            assert output.token_ids == (eos_id,)

            (output,) = llm.generate([1, 2], attrs.evolve(params, ignore_eos=True))
            assert (output.finish_reason, output.token_ids) == ("length", (eos_id,) * 4)


# What runs


@pytest.fixture
def without_numba(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *args: None if name == "numba" else find_spec(name, *args),
    )


@pytest.fixture
def with_broken_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "nanovllm.runtime.native.program", None)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("without_numba", r"Numba is not installed \(pip install 'nanovllm\[cpu\]'\)"),
        ("with_broken_numba", r"Numba fails to load \(ModuleNotFoundError: .*\)"),
    ],
)
def test_where_numba_does_not_work_torch_does_and_a_note_says_why(request, state, said):
    request.getfixturevalue(state)

    with LLM(tiny_model_folder(), **ON_CPU) as llm:
        assert llm.config.attention_backend == "torch"
        assert len(llm.generate("walk", SamplingParams(max_tokens=3))) == 1
        (note,) = [note for note in llm.config.notes if note.startswith("backend ")]
        assert re.fullmatch(f"backend torch: the native one can't be used, {said}", note)
    with pytest.raises(ConfigError, match=f"`attention_backend` is 'native' but {said}; use"):
        LLM(tiny_model_folder(), attention_backend="native", **ON_CPU)


def test_a_shape_that_the_native_kernels_can_not_take_is_said():
    pytest.importorskip("numba")
    facts = read_device_facts(torch.device("cpu"), model_config(head_dim=20))

    assert "`head_dim` is 20" in facts.obstacles["native"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_len": 257}, "`max_model_len` is 257 .* 256"),
        ({"device": "cuda:99"}, "`device` is 'cuda:99'"),
        ({"tokenizer": "/no/such/folder"}, "`tokenizer` is '/no/such/folder'"),
        ({"dtype": "float16", "attention_backend": "native"}, "float16"),
    ],
)
def test_what_can_not_work_is_refused_before_any_weight_is_read(monkeypatch, options, said):
    def load(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(build, "load_decoder", load)
    with pytest.raises(ConfigError, match=said):
        LLM(tiny_model_folder(), **{**ON_CPU, **options})


def test_a_model_without_tokenizer_runs_on_ids_alone():
    with pytest.raises(ConfigError, match=r"holds no tokenizer .*`skip_tokenizer_init=True`"):
        LLM(checkpoint_folder("llama"), **ON_CPU)
    with LLM(checkpoint_folder("llama"), skip_tokenizer_init=True, **ON_CPU) as llm:
        assert llm.tokenizer is None
        (output,) = llm.generate([1, 2], SamplingParams(max_tokens=3))
    assert (output.text, len(output.token_ids)) == ("", 3)


@pytest.mark.parametrize("size", [{"kv_cache_bytes": 2**60}, {"num_kvcache_blocks": 2**45}])
def test_a_cache_beyond_any_memory_is_refused_by_name(size):
    options = {"device": "cpu", "dtype": "float32", "attention_backend": "torch"}

    with pytest.raises(ConfigError, match=next(iter(size))):
        LLM(tiny_model_folder(), **options, **size)


# What it says while it takes long


@pytest.mark.parametrize(("quiet_s", "says"), [(0.0, True), (1e6, False)])
def test_says_what_it_does_only_if_it_takes_long(monkeypatch, capsys, quiet_s, says):
    monkeypatch.setattr(build, "QUIET_S", quiet_s)
    threads = set(threading.enumerate())
    with build._said_if_slow("compiling"):
        if says:
            for thread in set(threading.enumerate()) - threads:
                thread.join()
    progress = build._LoadProgress("tiny")
    progress(1, 30)

    said = capsys.readouterr()
    assert said.err == ("compiling\nloading tiny: layer 1 of 30\n" if says else "")
    assert said.out == ""
