"""The kernels on CPUs without AVX-512: LLVM is told to compile for one, in a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="the native backend needs Numba")

SCRIPT = """
import sys
from nanovllm.runtime.native import kinds
assert not (kinds.HAS_BF16_DOT or kinds.HAS_INT16_DOT or kinds.HAS_32_REGISTERS)
from tests.engines import greedy, random_prompts, tiny_llm
from tests.checkpoints import greedy_tokens
prompts = random_prompts(5)
expected = [greedy_tokens("qwen3", p, 6) for p in prompts]
with tiny_llm("qwen3", attention_backend="native") as llm:
    outputs = llm.generate(prompts, greedy(6))
assert [o.token_ids for o in outputs] == expected
with tiny_llm("qwen3", attention_backend="native", dtype=sys.argv[1]) as llm:
    outputs = llm.generate(prompts, greedy(6))
# A rounded model may come to another token, and to others from there on.
agreed = sum(o.token_ids[0] == tokens[0] for o, tokens in zip(outputs, expected, strict=True))
assert agreed >= 4, agreed
print("fine")
"""

CPUS = {
    "a CPU with AVX2": ("haswell", "+avx2,+fma,-avx512f", "int8"),
    "a CPU with SSE only": ("core2", "-avx,-avx2,-fma,-avx512f", "bfloat16"),
}
"""Name -> (LLVM's name, its features, the type that is tried beside float32)."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64 CPUs")
@pytest.mark.parametrize("cpu", CPUS)
def test_tokens_are_right_on(cpu, tmp_path):
    name, features, dtype = CPUS[cpu]
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", SCRIPT, dtype]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert run.stdout.strip() == "fine", run.stderr[-2000:]
