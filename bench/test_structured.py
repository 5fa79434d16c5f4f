"""What structured output costs per token: `pytest bench/test_structured.py`.

A JSON answer of the built-in model's vocabulary (49,152 tokens) is walked along its schema. A row
is the whole walk; `extra_info` has microseconds per token.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from nanovllm.builtin_model import SMOLLM2_135M, cache_folder, cached_file
from nanovllm.hub import find_model
from nanovllm.runtime.sampler import SamplingRow, sample
from nanovllm.runtime.token_masks import keep_allowed
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.structured import StructureCompiler, TokenMatcher
from nanovllm.text.tokenizer import Tokenizer, load_tokenizer

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "city": {"enum": ["Berlin", "Paris", "London"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}
ANSWER = (
    '{"name": "Ada Lovelace", "age": 36, "city": "London", '
    '"tags": ["mathematics", "poetical science", "engines"]}'
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Rows this small are not worth a second thread, and waiting for one would be measured."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    if cached_file(SMOLLM2_135M, cache_folder()) is None:
        pytest.skip("the built-in model is not in the cache")
    return load_tokenizer(find_model("smollm2-135m"))


@pytest.fixture(scope="module")
def structures(tokenizer: Tokenizer) -> StructureCompiler:
    return StructureCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


@pytest.fixture(scope="module")
def template(structures: StructureCompiler) -> TokenMatcher:
    structure = SamplingParams(json_schema=SCHEMA).structure
    assert structure is not None
    return structures.compile(*structure)


@pytest.fixture(scope="module")
def token_ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.backend.encode(ANSWER, add_special_tokens=False).ids


def measure(
    benchmark: BenchmarkFixture, num_tokens: int, walk: Callable[[], None], rounds: int = 50
) -> None:
    benchmark.group = "structured output, a walk along JSON"
    benchmark.pedantic(walk, rounds=rounds, warmup_rounds=2)
    if benchmark.stats is not None:
        benchmark.extra_info["us_per_token"] = benchmark.stats["median"] / num_tokens * 1e6


def test_finding_and_following(
    benchmark: BenchmarkFixture, template: TokenMatcher, token_ids: list[int]
) -> None:
    """The matcher alone: which tokens may come, and on with the one that came."""

    def walk() -> None:
        matcher = template.fork([0])
        for end in range(1, len(token_ids) + 1):
            matcher.allowed_tokens()
            matcher.follow(token_ids[:end])
        assert matcher.is_complete

    measure(benchmark, len(token_ids), walk)


def test_masking_the_logits(
    benchmark: BenchmarkFixture, template: TokenMatcher, token_ids: list[int]
) -> None:
    """Clearing what may not come, in one row."""
    logits = torch.randn(49152, generator=torch.Generator().manual_seed(0))
    allowed = template.fork([0]).allowed_tokens()

    def walk() -> None:
        for _ in token_ids:
            keep_allowed(logits.clone(), allowed)

    measure(benchmark, len(token_ids), walk)


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sampling(
    benchmark: BenchmarkFixture,
    template: TokenMatcher,
    token_ids: list[int],
    temperature: float,
    structured: bool,
) -> None:
    """A row from logits to its token, without and with: the difference is what it costs."""
    logits = torch.randn(1, 49152, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=temperature, json_schema=SCHEMA if structured else None)

    def walk() -> None:
        matcher = template.fork([0])
        allowed_tokens = matcher.allowed_tokens if structured else None
        for end in range(1, len(token_ids) + 1):
            row = SamplingRow(params, seed=1, position=end, allowed_tokens=allowed_tokens)
            assert sample(logits, [row]).failures == {}
            if structured:
                matcher.follow(token_ids[:end])

    measure(benchmark, len(token_ids), walk)


def test_compiling_a_schema(benchmark: BenchmarkFixture, structures: StructureCompiler) -> None:
    """A schema that was not seen before, once the vocabulary is read."""
    benchmark.group = "structured output, compiling"
    numbers = iter(range(10**6))

    def compile_one() -> None:
        params = SamplingParams(json_schema={**SCHEMA, "title": f"schema {next(numbers)}"})
        assert params.structure is not None
        structures.compile(*params.structure)

    benchmark.pedantic(compile_one, rounds=20, warmup_rounds=1)


def test_reading_the_vocabulary(benchmark: BenchmarkFixture, tokenizer: Tokenizer) -> None:
    """What the first structured request of an engine waits for."""
    benchmark.group = "structured output, compiling"

    def first() -> None:
        StructureCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids).compile(
            "regex", "a"
        )

    benchmark.pedantic(first, rounds=3)
