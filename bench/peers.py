"""Tokens beside other engines, on the same work, in turn.

    python -m bench.peers                                      # ours, and what is installed here
    python -m bench.peers --python llama.cpp=VENV/bin/python   # a peer in its own environment

Every engine gets seeded random prompts of token ids, generates exactly as many tokens as asked,
greedily and past the end of the text, with prefix caching off. Each run is a process of its own,
the runs of all engines alternate, and what is printed are medians over the rounds and their ratio
to ours. All run the built-in model's weights in 16 bits.
"""

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.peer_models import bf16_gguf, hugging_face_folder

CASES = ((1, 32, 64), (2, 32, 64), (4, 128, 64), (8, 128, 64), (1, 128, 8), (1, 512, 8))
"""(batch, prompt tokens, new tokens)."""

RUNS = 3  # timed, in each process, after one to warm up
FIRST_ID, END_ID = 17, 49152  # the ids below are special tokens

Prompts = list[list[int]]
Times = list[list[float]]
Generate = Callable[[Prompts, int], Times]
"""From prompts and a number of tokens to the arrival time of each token of each prompt."""


def ours(threads: int) -> Generate:
    """This engine, its host work included."""
    from nanovllm import LLM, SamplingParams

    llm = LLM("smollm2-135m", device="cpu", dtype="bfloat16", enable_prefix_caching=False)

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


def transformers(threads: int) -> Generate:
    """Hugging Face transformers, `generate` in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation import StoppingCriteria, StoppingCriteriaList

    torch.set_num_threads(threads)
    folder = hugging_face_folder()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
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


def llama_cpp(threads: int) -> Generate:
    """llama.cpp through llama-cpp-python, weights in bfloat16."""
    import llama_cpp as lib

    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(
        str(bf16_gguf()).encode(), lib.llama_model_default_params()
    )
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

    return generate


ENGINES: dict[str, tuple[str, Callable[[int], Generate]]] = {
    "nanovllm": ("nanovllm", ours),
    "transformers": ("transformers", transformers),
    "llama.cpp": ("llama_cpp", llama_cpp),
}
"""Name -> (the module that has to be there, how to make it)."""


def run_case(generate: Generate, case: tuple[int, int, int]) -> dict[str, float]:
    """Milliseconds to the first token (median over the prompts) and between tokens (median)."""
    batch, length, num_tokens = case
    rng = np.random.default_rng(0)
    firsts, gaps = [], []
    for run in range(1 + RUNS):
        prompts = rng.integers(FIRST_ID, END_ID, (batch, length)).tolist()
        start = time.perf_counter()
        times = generate(prompts, num_tokens)
        start = max(start, getattr(generate, "start", start))
        assert all(len(mine) == num_tokens for mine in times), [len(mine) for mine in times]
        if run == 0:
            continue
        firsts.append(statistics.median(mine[0] - start for mine in times))
        gaps += [b - a for mine in times for a, b in itertools.pairwise(mine)]
    return {"ttft": statistics.median(firsts) * 1e3, "itl": statistics.median(gaps) * 1e3}


def _measure_in_own_process(
    python: str, engine: str, case: tuple[int, int, int], threads: int
) -> dict[str, float]:
    command = [python, "-m", "bench.peers", "--one", engine, "--threads", str(threads)]
    command += ["--case", json.dumps(case)]
    with tempfile.TemporaryFile("w+") as errors:
        run = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        )
        if run.returncode:
            errors.seek(0)
            sys.exit(f"{engine} failed:\n{errors.read()[-2000:]}")
    result: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure every engine on every case in turn; print medians and ratios to ours."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), metavar="N")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        generate = ENGINES[options.one][1](options.threads)
        print(json.dumps(run_case(generate, tuple(options.case))))
        return
    pythons = dict(one.split("=", 1) for one in options.python)
    engines = [
        name
        for name, (module, _) in ENGINES.items()
        if name in pythons or importlib.util.find_spec(module) is not None
    ]
    print(f"engines: {', '.join(engines)}; {options.threads} threads, {options.rounds} rounds")
    for case in (CASES[place] for place in options.cases):
        results: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for _ in range(options.rounds):
            for name in engines:
                python = pythons.get(name, sys.executable)
                results[name].append(_measure_in_own_process(python, name, case, options.threads))
        print("batch {}, {} prompt tokens, {} new tokens".format(*case))
        for what, unit in (("itl", "ms between tokens"), ("ttft", "ms to the first token")):
            base = statistics.median(one[what] for one in results["nanovllm"])
            for name in engines:
                values = sorted(one[what] for one in results[name])
                middle = statistics.median(values)
                spread = f"{values[0]:.1f} to {values[-1]:.1f}"
                print(
                    f"  {name:13s} {middle:8.2f} {unit} ({spread}); ours / it {base / middle:.2f}"
                )


if __name__ == "__main__":
    main()
