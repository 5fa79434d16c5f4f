"""`nanovllm doctor`: what is on this machine, and what the engine makes of it."""

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

import attrs
import psutil
import torch

from nanovllm.build import find_device, open_checkpoint, read_device_facts
from nanovllm.builtin_model import SMOLLM2_135M, cache_folder, cached_file
from nanovllm.config import EngineConfig, ModelFacts
from nanovllm.errors import ConfigError
from nanovllm.hub import find_model
from nanovllm.model.config import ModelConfig, read_model_config
from nanovllm.resolve import resolve
from nanovllm.runtime.threads import usable_threads
from nanovllm.runtime.verify_graphs import verify_decode
from nanovllm.runtime.verify_model import random_decoder, small_config
from nanovllm.runtime.verify_worlds import Geometry

SMOLLM2_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""What the built-in model's config says, so that it need not be fetched for this."""

PACKAGES = ("torch", "transformers", "tokenizers", "numba", "triton", "flash-attn", "nvidia-ml-py")


@attrs.frozen
class Finding:
    """One thing that was looked at, and what was found."""

    what: str
    found: str


def examine() -> list[Finding]:
    """Look at everything. Nothing here can fail: what is not there is a finding."""
    return list(_examine())


def examine_graphs(model: str | None) -> tuple[list[Finding], bool]:
    """Prove, on the CPU, that the decode step of a model may be replayed as a CUDA graph.

    It is run with random weights on a small model of the same make, as what could go wrong lies in
    the operations of the step and not in its weights: no weights are read.

    Args:
        model: As for `LLM`. None: the built-in model, which need not be fetched for this.

    Returns:
        What was run and what was found, and whether nothing is wrong.
    """
    config, geometry = _graphs_config(model), Geometry()
    small = small_config(config)
    report = verify_decode(random_decoder(small), geometry=geometry)
    findings = [
        Finding("model", f"{model or SMOLLM2_135M.name}: {_in_words(config)}"),
        Finding(
            "made small",
            f"{small.num_layers} layers of random weights, {small.hidden_size} wide, "
            f"{small.vocab_size} tokens, in float32 on the CPU",
        ),
        Finding(
            "tried",
            f"{report.num_steps} decode steps that choose greedily or draw, in batches of "
            f"{', '.join(map(str, geometry.sizes))}, over blocks of {geometry.block_size} "
            "positions that change owners",
        ),
    ]
    wrong = [str(one) for one in (*report.findings, *report.mismatches)]
    findings += [Finding("wrong", one) for one in wrong]
    findings.append(Finding("decode step", f"{len(wrong)} faults" if wrong else "safe to replay"))
    return findings, report.ok


def _graphs_config(model: str | None) -> ModelConfig:
    if model is None or model == SMOLLM2_135M.name:
        return read_model_config(SMOLLM2_SHAPE, source=SMOLLM2_135M.name)
    checkpoint = open_checkpoint(find_model(model))
    return read_model_config(checkpoint.config, source=checkpoint.source)


def _in_words(config: ModelConfig) -> str:
    extras = {
        "biases": config.qkv_bias or config.output_bias or config.mlp_bias,
        "norms of queries and keys": config.qk_norm,
        f"{config.rope.rope_type} rope": config.rope.rope_type != "default",
    }
    said = f"{config.architecture}, {config.num_heads} query heads on {config.num_kv_heads} of K/V"
    return ", ".join(
        [f"{said}, {config.head_dim} wide", *(name for name, on in extras.items() if on)]
    )


def _examine() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} on {sys.platform} {platform.machine()}")
    for package in PACKAGES:
        yield Finding(package, _version(package))
    memory = psutil.virtual_memory()
    yield Finding("memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} free")
    yield Finding(
        "cpu",
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, "
        f"oneDNN {'there' if torch.backends.mkldnn.is_available() else 'not there'}",
    )
    yield Finding("cuda", _cuda())
    yield Finding("built-in model", _builtin())
    yield from _choices()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    if not torch.cuda.is_available():
        return f"torch is built for CUDA {torch.version.cuda} but finds no device or driver"
    try:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except RuntimeError as error:  # such as a GPU that another process has to itself
        return f"CUDA {torch.version.cuda}: {error}"
    return f"CUDA {torch.version.cuda}: {', '.join(names)}"


def _builtin() -> str:
    path = cached_file(SMOLLM2_135M, cache_folder())
    return f"not fetched yet; it will go to {cache_folder()}" if path is None else str(path)


def _choices() -> Iterator[Finding]:
    """What the engine would decide here for the built-in model's shape."""
    config = read_model_config(SMOLLM2_SHAPE, source="smollm2-135m")
    facts = ModelFacts(
        max_position_embeddings=config.max_position_embeddings,
        sliding_window=None,
        kv_values_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim,
        dtype=config.dtype,
        eos_token_ids=frozenset(),
    )
    device = find_device("auto")
    try:
        resolved = resolve(EngineConfig(), facts, read_device_facts(device, config))
    except (ConfigError, RuntimeError) as error:  # the second from a GPU that does not answer
        yield Finding("smollm2-135m", str(error))
        return
    yield Finding("device", f"{resolved.device}: the first that is there of cuda and cpu")
    yield Finding("threads", f"{usable_threads()}: by affinity, control group and cores")
    for note in resolved.notes:
        yield Finding("smollm2-135m", note)
