"""A small LLM inference engine with a pure functional core.

    from nanovllm import LLM, SamplingParams

    with LLM("smollm2-135m") as llm:
        print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].text)

Importing this package loads neither torch nor transformers; making an `LLM` does.
"""

from nanovllm.async_llm import AsyncLLM
from nanovllm.config import EngineConfig
from nanovllm.errors import (
    ConfigError,
    NanoVLLMError,
    QueueFullError,
    RequestError,
    WeightsError,
)
from nanovllm.llm import LLM
from nanovllm.outputs import CompletionOutput, RequestOutput, TokenDelta
from nanovllm.preview import Preview
from nanovllm.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "NanoVLLMError",
    "Preview",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TokenDelta",
    "WeightsError",
]
