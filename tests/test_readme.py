"""What the README shows works when it is pasted, and what it lists is there."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm import AsyncLLM
from tests.builtin import builtin_gguf_path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.S)
PRINTED = {
    "What is 2 + 2?": ("Paris", "length", " ms\n"),
    "async def main": ("Paris",),
    "messages = []": ("Paris", "Rome"),
    "async def app": (),
    "kv_cache_bytes": ("first token expected in ", "Paris", "length", "blocks"),
    "Recorder": ("8 tokens for 1 request",),
    "benchmark.pedantic": (),
}
"""By a part of each of them, what it prints, among other things."""


@pytest.fixture
def paste(monkeypatch, tmp_path):
    """Runs the one snippet that has a part in it, in an empty folder; returns its names."""
    builtin_gguf_path()  # or skip
    monkeypatch.chdir(tmp_path)

    def run(part):
        (source,) = (snippet for snippet in SNIPPETS if part in snippet)
        names = {}
        exec(compile(source, "README.md", "exec"), names)
        return names

    return run


@pytest.mark.parametrize("part", PRINTED)
def test_python_of_the_readme_runs_when_pasted(part, paste, capsys):
    names = paste(part)
    if isinstance(names.get("llm"), AsyncLLM):
        names["llm"].close()
    printed = capsys.readouterr().out

    for text in PRINTED[part]:
        assert text in printed


def test_every_snippet_of_the_readme_is_one_of_these():
    assert len(SNIPPETS) == len(PRINTED)


class Client:
    """The other side of an ASGI app, by hand; it leaves after some messages."""

    def __init__(self, prompt, leaves_after=None):
        self.incoming = [{"type": "http.request", "body": prompt.encode(), "more_body": False}]
        self.leaves_after = leaves_after
        self.sent = []
        self.left = asyncio.Event()

    async def receive(self):
        if self.incoming:
            return self.incoming.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)
        if len(self.sent) == self.leaves_after:
            self.left.set()


def test_the_web_handler_streams_and_ends_the_request_of_whoever_disconnects(paste):
    names = paste("async def app")
    app, llm = names["app"], names["llm"]

    async def main():
        stays, leaves = Client("The capital of France is"), Client("Once", leaves_after=3)
        await asyncio.gather(
            app({"type": "http"}, stays.receive, stays.send),
            app({"type": "http"}, leaves.receive, leaves.send),
        )
        while llm.state.num_unfinished:
            await asyncio.sleep(0.01)
        return stays.sent, leaves.sent

    stayed, left = asyncio.run(main())
    num_generated = llm.stats().num_generated_tokens
    llm.close()

    start, *bodies = stayed
    assert start == {"type": "http.response.start", "status": 200}
    assert bodies[-1] == {"type": "http.response.body"}
    assert len(bodies) > 3 and len(b"".join(body.get("body", b"") for body in bodies)) > 100
    assert 3 <= len(left) < 20
    assert num_generated < 2 * 200, "the one that left was not computed to its end"


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
