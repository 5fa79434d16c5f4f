"""The kernels on CPUs without AVX-512: LLVM is told to compile for one, in a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="the native backend needs Numba")

SCRIPT = """
from nanovllm.runtime.native import kinds
assert not (kinds.HAS_BF16_DOT or kinds.HAS_INT16_DOT or kinds.HAS_32_REGISTERS)
from tests.engines import greedy, random_prompts, tiny_llm
from tests.checkpoints import greedy_tokens
prompts = random_prompts(5)
with tiny_llm("qwen3", attention_backend="native") as llm:
    outputs = llm.generate(prompts, greedy(6))
assert [o.token_ids for o in outputs] == [greedy_tokens("qwen3", p, 6) for p in prompts]
for dtype in ("bfloat16", "int8"):
    with tiny_llm("qwen3", attention_backend="native", dtype=dtype) as llm:
        outputs = llm.generate(prompts, greedy(6))
    assert all(len(o.token_ids) == 6 and o.error is None for o in outputs)
print("fine")
"""

CPUS = {
    "a CPU with AVX2": ("haswell", "+avx2,+fma,-avx512f"),
    "a CPU with SSE only": ("core2", "-avx,-avx2,-fma,-avx512f"),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64 CPUs")
@pytest.mark.parametrize("cpu", CPUS)
def test_tokens_are_right_on(cpu, tmp_path):
    name, features = CPUS[cpu]
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )

    assert run.stdout.strip() == "fine", run.stderr[-2000:]
