"""Bad inputs end in the same typed errors where `python -O` leaves asserts out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model_folder import tiny_model_folder

ROOT = Path(__file__).parents[1]

SCRIPT = """
import math, sys
from nanovllm import LLM, EngineConfig, SamplingParams

folder = sys.argv[1]
options = {"device": "cpu", "dtype": "float32", "attention_backend": "torch"}
llm = LLM(folder, max_model_len=16, kvcache_block_size=4, num_kvcache_blocks=3, **options)

CASES = {
    "no model": lambda: LLM("/no/such/model"),
    "no hub id": lambda: LLM("~/no/such/model.gguf"),
    "no weights": lambda: LLM(sys.argv[2]),
    "no device": lambda: LLM(folder, device="cuda:99"),
    "option": lambda: LLM(folder, max_num_seqs=0),
    "misspelt option": lambda: LLM(folder, max_seqs=1),
    "two sizes": lambda: EngineConfig(num_kvcache_blocks=1, kv_cache_bytes=1),
    "longer than trained": lambda: LLM(folder, max_model_len=10**6, **options),
    "temperature": lambda: SamplingParams(temperature=math.nan),
    "misspelt field": lambda: SamplingParams(temprature=1),
    "tokens": lambda: SamplingParams(min_tokens=9, max_tokens=8),
    "stop without text": lambda: SamplingParams(stop="x", detokenize=False),
    "empty text": lambda: llm.generate(""),
    "empty list": lambda: llm.generate([[1, 2], []]),
    "vocabulary": lambda: llm.generate([320]),
    "negative id": lambda: llm.generate([-1]),
    "huge id": lambda: llm.generate([2**40]),
    "bool id": lambda: llm.generate([True]),
    "float id": lambda: llm.generate([1.0]),
    "no prompt": lambda: llm.generate(None),
    "parameters": lambda: llm.generate([[1], [2], [3]], [SamplingParams()] * 2),
    "stop id": lambda: llm.generate([1], SamplingParams(stop_token_ids=[325])),
    "bias id": lambda: llm.generate([1], SamplingParams(logit_bias={320: 1})),
    "length": lambda: llm.generate([1] * 16),
    "cache": lambda: llm.generate([1] * 10, SamplingParams(max_tokens=5)),
    "messages": lambda: llm.chat("walk"),
    "role": lambda: llm.chat([{"content": "walk"}]),
    "request id": lambda: [llm.add_request([1], request_id="same") for _ in range(2)],
}
for name, call in CASES.items():
    try:
        result = call()
    except Exception as error:
        print(name, type(error).__name__, str(error).replace(chr(10), " "), sep=": ")
    else:
        print(name, "no error", result, sep=": ")
print("and then", *(len(o.token_ids) for o in llm.generate([[1]], SamplingParams(max_tokens=3))))
llm.close()
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What the script prints, run as it is and with `-O`, one line for each bad input."""
    empty = tmp_path_factory.mktemp("empty")
    (empty / "config.json").write_text("{}")
    running = [
        subprocess.Popen(
            [sys.executable, *flags, "-W", "error", "-c", SCRIPT, tiny_model_folder(), empty],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for flags in ([], ["-O"])
    ]
    done = [process.communicate(timeout=120) for process in running]
    assert [stderr for _, stderr in done] == ["", ""]
    return [stdout.splitlines() for stdout, _ in done]


def test_every_bad_input_is_a_typed_error_with_a_message(reports):
    *lines, last = reports[0]

    assert len(lines) == 28
    for line in lines:
        name, error, message = line.split(": ", 2)
        expected = {"misspelt option": ["TypeError"], "misspelt field": ["TypeError"]}.get(
            name, ["ConfigError", "RequestError", "WeightsError"]
        )
        assert error in expected, line
        assert len(message) > 20, line
    assert last == "and then 3"


def test_they_are_the_same_without_asserts(reports):
    plain, optimised = reports

    assert optimised == plain
