"""Engines to compare, each as a function from prompts to the arrival times of its tokens."""

import importlib
import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import peer_models

Prompts = list[list[int]]
Times = list[list[float]]
Generate = Callable[[Prompts, int], Times]
"""From prompts and a number of tokens to the arrival time of each token of each prompt."""


def ours(threads: int, weights: str, dtype: str = "bfloat16") -> Generate:
    """This engine, its host work included."""
    del threads, weights  # as many as the machine allows; it knows its model by name
    from nanovllm import LLM, SamplingParams

    llm = LLM("smollm2-135m", device="cpu", dtype=dtype, enable_prefix_caching=False)

    def generate(prompts: Prompts, num_tokens: int) -> Times:
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        rows = {llm.add_request(prompt, params): row for row, prompt in enumerate(prompts)}
        times: Times = [[] for _ in prompts]
        while llm.has_unfinished_requests():
            outputs = llm.step()
            now = time.perf_counter()
            for output in outputs:
                mine = times[rows[output.request_id]]
                mine += [now] * (len(output.token_ids) - len(mine))
        return times

    return generate


def transformers(threads: int, weights: str) -> Generate:
    """Hugging Face transformers, `generate` in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation import StoppingCriteria, StoppingCriteriaList

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16).eval()
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=2)

    class Clock(StoppingCriteria):  # type: ignore[misc]  # transformers is not type-checked here
        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def generate(prompts: Prompts, num_tokens: int) -> Times:
        clock = Clock()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        return [clock.times] * len(prompts)

    return generate


def llama_cpp(threads: int, weights: str) -> Generate:
    """llama.cpp through llama-cpp-python, over a `.gguf` file."""
    import llama_cpp as lib

    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(weights.encode(), lib.llama_model_default_params())
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def generate(prompts: Prompts, num_tokens: int) -> Times:
        length = len(prompts[0])
        params = lib.llama_context_default_params()
        params.n_ctx = -(-(length + num_tokens) // 256) * 256 * len(prompts)
        params.n_batch, params.n_ubatch, params.n_seq_max = 4096, 512, len(prompts)
        params.n_threads = params.n_threads_batch = threads
        context = lib.llama_init_from_model(model, params)
        batch = lib.llama_batch_init(4096, 0, 1)
        times: Times = [[] for _ in prompts]

        def decode(rows: list[tuple[int, int, int, bool]]) -> None:
            batch.n_tokens = len(rows)
            for place, (token, position, row, wanted) in enumerate(rows):
                batch.token[place], batch.pos[place] = token, position
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
                batch.logits[place] = wanted
            assert lib.llama_decode(context, batch) == 0

        def best(place: int) -> int:
            logits = lib.llama_get_logits_ith(context, place)
            return int(np.ctypeslib.as_array(logits, shape=(vocab_size,)).argmax())

        rows = [
            (token, position, row, position == length - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        start = time.perf_counter()
        decode(rows)
        tokens = [best(place) for place, (*_, wanted) in enumerate(rows) if wanted]
        for step in range(1, num_tokens + 1):
            now = time.perf_counter()
            for mine in times:
                mine.append(now)
            if step < num_tokens:
                decode([(t, length + step - 1, row, True) for row, t in enumerate(tokens)])
                tokens = [best(row) for row in range(len(prompts))]
        lib.llama_free(context)
        generate.start = start  # type: ignore[attr-defined]  # the context is not part of a request
        return times

    generate.quiet = quiet  # type: ignore[attr-defined]  # the library goes on calling it
    return generate


def openvino(threads: int, weights: str) -> Generate:
    """OpenVINO GenAI's continuous batching, over a folder that `optimum-cli` has exported."""
    # Untyped, and in an environment of its own.
    ov: Any = importlib.import_module("openvino")
    lib: Any = importlib.import_module("openvino_genai")

    config = lib.GenerationConfig()
    config.ignore_eos, config.eos_token_id, config.do_sample = True, -1, False
    scheduler = lib.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens = 1, 2048
    scheduler.enable_prefix_caching = False
    pipeline = lib.ContinuousBatchingPipeline(
        weights, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
    )
    numbers = itertools.count()

    def generate(prompts: Prompts, num_tokens: int) -> Times:
        config.max_new_tokens = num_tokens
        handles = [
            pipeline.add_request(next(numbers), ov.Tensor(np.array([prompt], np.int64)), config)
            for prompt in prompts
        ]
        times: Times = [[] for _ in prompts]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter()
            for mine, handle in zip(times, handles, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        mine.extend([now] * len(output.generated_ids))
        return times

    return generate


def vllm(threads: int, weights: str) -> Generate:
    """The CPU build of vLLM in this process, compiled by torch as is its default."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    # Untyped, and in an environment of its own.
    lib: Any = importlib.import_module("vllm")

    llm = lib.LLM(
        model=weights,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    engine, numbers = llm.llm_engine, itertools.count()

    def generate(prompts: Prompts, num_tokens: int) -> Times:
        params = lib.SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        times: Times = [[] for _ in prompts]
        rows = {}
        for row, prompt in enumerate(prompts):
            name = str(next(numbers))
            # Some versions give a request another name, and return it.
            rows[name] = row
            rows[engine.add_request(name, {"prompt_token_ids": prompt}, params)] = row
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                mine = times[rows[output.request_id]]
                mine += [now] * (len(output.outputs[0].token_ids) - len(mine))
        return times

    return generate


def vllm_environment(python: str) -> dict[str, str]:
    """What vLLM's guide for CPUs asks for: one process, its own OpenMP, and tcmalloc if there."""
    libraries = [
        Path(python).parent.parent / "lib" / "libiomp5.so",
        Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"),
    ]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "LD_PRELOAD": ":".join(str(library) for library in libraries if library.exists()),
    }


class Engine(NamedTuple):
    """One to compare.

    Attributes:
        module: What has to be importable.
        make: From a number of threads and the weights.
        weights: Makes or finds the weights; the name of a file or folder.
        environment: Variables that its process starts with, from the name of its interpreter.
    """

    module: str
    make: Callable[[int, str], Generate]
    weights: Callable[[], str]
    environment: Callable[[str], dict[str, str]] = lambda _: {}


ENGINES = {
    "nanovllm": Engine("nanovllm", ours, str),
    "transformers": Engine("transformers", transformers, peer_models.hugging_face_folder),
    "llama.cpp": Engine("llama_cpp", llama_cpp, partial(peer_models.gguf_file, "BF16")),
    "openvino": Engine("openvino_genai", openvino, partial(peer_models.openvino_folder, "fp16")),
    "vllm": Engine("vllm", vllm, peer_models.hugging_face_folder, vllm_environment),
    "nanovllm-int8": Engine("nanovllm", partial(ours, dtype="int8"), str),
    "llama.cpp-q8": Engine("llama_cpp", llama_cpp, partial(peer_models.gguf_file, "Q8_0")),
    "openvino-int8": Engine(
        "openvino_genai", openvino, partial(peer_models.openvino_folder, "int8")
    ),
}
"""By name; first those of 16 bits."""
