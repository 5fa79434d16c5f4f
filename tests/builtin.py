"""The built-in model's file for tests, which never download: from the cache, or skip."""

from pathlib import Path

import pytest

from nanovllm.builtin_model import SMOLLM2_135M, cache_folder, cached_file


def builtin_gguf_path() -> Path:
    path = cached_file(SMOLLM2_135M, cache_folder())
    if path is None:
        pytest.skip(
            f"{SMOLLM2_135M.file_name} is not in {cache_folder()}; "
            "run python -c \"from nanovllm.hub import find_model; find_model('smollm2-135m')\""
        )
    return path
