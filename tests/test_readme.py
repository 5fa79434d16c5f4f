"""What the README shows works when it is pasted, and what it lists is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builtin import builtin_gguf_path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.S)
PRINTED = [("Paris", "length", " ms\n"), ("Paris",)]
"""What each of them prints, among other things."""


@pytest.mark.parametrize(("source", "expected"), list(zip(SNIPPETS, PRINTED, strict=True)))
def test_python_of_the_readme_runs_when_pasted(source, expected, capsys):
    builtin_gguf_path()  # or skip
    exec(compile(source, "README.md", "exec"), {})
    printed = capsys.readouterr().out

    for text in expected:
        assert text in printed


def test_the_reading_list_names_eight_files_that_exist():
    listed = re.findall(r"^\d\. `([^`]+)`", README, flags=re.M)

    assert len(listed) == 8
    assert all((ROOT / name).exists() for name in listed)


def test_every_make_target_and_module_that_it_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
    for module in re.findall(r"python -m ([\w.]+)", README):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module


@pytest.mark.parametrize("command", ["generate", "chat", "doctor"])
def test_every_command_explains_itself(command):
    run = subprocess.run(
        [sys.executable, "-m", "nanovllm", command, "--help"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )

    assert run.returncode == 0
    assert command in README
    assert "Usage" in run.stdout


NANO_VLLM_EXAMPLE = """
import os
from nanovllm import LLM, SamplingParams

llm = LLM(os.path.expanduser({model!r}), enforce_eager=True, tensor_parallel_size=1)
params = SamplingParams(temperature=0.6, max_tokens=16)
prompts = ["introduce yourself", "list all prime numbers within 100"]
outputs = llm.generate(prompts, params)
for prompt, output in zip(prompts, outputs):
    print(f"Prompt: {{prompt!r}}")
    print(f"Completion: {{output['text']!r}}")
"""

NANO_VLLM_BENCHMARK = """
from random import randint, seed
from nanovllm import LLM, SamplingParams

seed(0)
llm = LLM({model!r}, enforce_eager=False, max_model_len=4096)
prompts = [[randint(0, 10000) for _ in range(randint(10, 40))] for _ in range(8)]
params = [
    SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=randint(4, 9)) for _ in prompts
]
llm.generate(["Benchmark: "], SamplingParams())
llm.generate(prompts, params, use_tqdm=False)
print("Total:", sum(p.max_tokens for p in params))
"""


@pytest.mark.parametrize("script", [NANO_VLLM_EXAMPLE, NANO_VLLM_BENCHMARK])
def test_scripts_that_make_the_calls_of_nano_vllm_run(script, capsys):
    """The calls of its published example and benchmark, at a smaller size."""
    exec(script.format(model=str(builtin_gguf_path())), {})
    printed = capsys.readouterr().out

    assert printed.count("Completion:") == 2 or "Total:" in printed
