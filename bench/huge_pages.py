"""What huge pages under the weights do for a native step: two engines in one process, in turn.

python -m bench.huge_pages                # the built-in model in bfloat16
python -m bench.huge_pages --dtype int8
"""

import argparse
import functools
import statistics
import time
from unittest import mock

import numpy as np

from nanovllm import LLM, SamplingParams
from nanovllm.runtime.native import loading
from nanovllm.runtime.native.arena import Arena

BATCHES = (1, 8)


def make_engine(dtype: str, *, uses_huge_pages: bool) -> LLM:
    """The built-in model, its weights in such pages."""
    arena = functools.partial(Arena, uses_huge_pages=uses_huge_pages)
    with mock.patch.object(loading, "Arena", arena):
        return LLM("smollm2-135m", device="cpu", dtype=dtype, num_kvcache_blocks=200)


def token_ms(llm: LLM, batch: int, rng: np.random.Generator) -> float:
    """Median milliseconds between tokens."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    for prompt in rng.integers(17, 49152, (batch, 32)).tolist():
        llm.add_request(prompt, params)
    ends = []
    while llm.has_unfinished_requests():
        llm.step()
        ends.append(time.perf_counter())
    return statistics.median(np.diff(ends)) * 1e3


def main() -> None:
    """Measure, and print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "int8"])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    engines = {huge: make_engine(options.dtype, uses_huge_pages=huge) for huge in (False, True)}
    rng = np.random.default_rng(0)
    for batch in BATCHES:
        found: dict[bool, list[float]] = {huge: [] for huge in engines}
        for index in range(options.rounds):
            for huge in (False, True) if index % 2 else (True, False):
                found[huge].append(token_ms(engines[huge], batch, rng))
        ratio = statistics.median(
            huge / plain for plain, huge in zip(found[False], found[True], strict=True)
        )
        plain_ms, huge_ms = (statistics.median(found[huge]) for huge in (False, True))
        print(
            f"{options.dtype}, batch {batch}: {plain_ms:.2f} ms between tokens in pages as they "
            f"come, {huge_ms:.2f} in huge ones; median ratio {ratio:.3f}",
            flush=True,
        )
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()
