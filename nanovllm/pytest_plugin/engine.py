"""The engine of a session: made, warmed up, described, and reported on at the end."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from nanovllm.errors import NanoVLLMError
from nanovllm.llm import LLM
from nanovllm.pytest_plugin.device_record import recorder_for
from nanovllm.sampling_params import SamplingParams
from nanovllm.workloads.disturbances import settled_heap
from nanovllm.workloads.machine import gpu_facts, machine_facts


@contextmanager
def session_engine(
    config: dict[str, Any], *, report: Path | None
) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """An engine and the facts of where it runs; at the end its report, if one is asked for.

    Raises:
        pytest.UsageError: No model was named.
    """
    options = dict(config)
    model = options.pop("model", None)
    if model is None:
        raise pytest.UsageError(
            "the `llm` fixture needs a model: give `--llm-model MODEL`, or `llm_model = MODEL` in "
            "the ini file, or a session fixture `llm_config` that returns {'model': MODEL, ...}."
        )
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(LLM(model, **options))
        except (NanoVLLMError, TypeError) as error:  # TypeError: an option that does not exist
            pytest.fail(f"the `llm` fixture can't be made: {error}", pytrace=False)
        # Whatever is loaded or compiled at first use is so now.
        engine.generate([[0]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        engine.reset_prefix_cache()
        stack.enter_context(settled_heap())
        if report is not None:
            # Left in reverse order: the recorder ends, then its report is written.
            recorder = recorder_for(engine, mode="live")
            stack.callback(lambda: recorder.report().to_html(report))
            stack.enter_context(recorder)
        yield engine, engine_facts(engine)


def engine_facts(engine: LLM) -> dict[str, Any]:
    """What a saved run says of the engine and its machine."""
    told = engine.describe()
    device, config = told["device"], told["config"]
    is_gpu = device["type"] == "cuda"
    return {
        "model": told["model"]["name"],
        "architecture": told["model"].get("architecture"),
        "dtype": config["dtype"],
        "attention_backend": config["attention_backend"],
        "device": device["name"],
        "buckets": [
            capture["bucket"]
            for capture in told["graphs"]["captures"]
            if capture["counts"] == "rows"
        ],
        "num_threads": _num_threads(),
        **machine_facts(),
        **(gpu_facts(device["uuid"]) if is_gpu else {}),
    }


def _num_threads() -> int:
    import torch  # delayed; whoever has an engine has loaded it

    return torch.get_num_threads()
