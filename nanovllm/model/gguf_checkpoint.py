"""A `.gguf` file as a `Checkpoint`: Hugging Face's tensor names and layouts over a mapped file."""

import math
import mmap
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize

from nanovllm.errors import WeightsError
from nanovllm.model.gguf_config import config_from_gguf
from nanovllm.model.gguf_file import GgufFile, TensorInfo, end_token_ids, read_gguf

_Type = gguf.GGMLQuantizationType

_BYTES: np.dtype[Any] = np.dtype(np.uint8)

_PLAIN: dict[Any, tuple[np.dtype[Any], torch.dtype]] = {
    _Type.F32: (np.dtype("<f4"), torch.float32),
    _Type.F16: (np.dtype("<f2"), torch.float16),
    # numpy has no bfloat16: the bits travel as integers.
    _Type.BF16: (np.dtype("<i2"), torch.bfloat16),
}
"""Types that torch has too: how numpy reads their bytes, and torch's type."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

_HARMLESS = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")
"""Tensors of old converters that repeat what the metadata says."""

_QUERY_OR_KEY = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(weight|bias)")


class GgufCheckpoint:
    """A model in one GGUF file. Implements `Checkpoint`.

    The file is mapped, not read: opening is quick, and a tensor stored in a type of torch's shares
    the mapping until it is copied or written to (writes never reach the file). Besides the
    parameters a file may hold `rope_freqs.weight`; see `gguf_config` for what it means.

    Args:
        path: The file.

    Raises:
        WeightsError: The file is missing, damaged, split in parts, or of an unsupported kind.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        file = read_gguf(path)
        self._file = file
        if file.metadata.get("split.count", 1) > 1:
            raise WeightsError(
                f"`{file.path}` is one of {file.metadata['split.count']} parts of a model, but one "
                "whole file is supported; join them with `llama-gguf-split --merge`."
            )
        self._types = _checked_types(file)
        # Copy-on-write, since torch takes no read-only memory.
        with file.path.open("rb") as opened:
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        self._data = np.frombuffer(self._map, np.uint8)
        self._tensors = {
            _hugging_face_name(name): info
            for name, info in file.tensors.items()
            if not _HARMLESS.fullmatch(name)
        }
        self._shapes = {name: info.shape for name, info in self._tensors.items()}
        self._config = config_from_gguf(file, shapes=self._shapes, dtype=self._main_dtype())
        # For llama the converter puts the two of a rotary pair side by side, where Hugging Face has
        # them half a head apart.
        self._interleaved = self._config["model_type"] == "llama"

    @property
    def source(self) -> str:
        """The file's path."""
        return str(self._file.path)

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's architecture, in the spelling of `config.json`."""
        return self._config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The ids that end a text, a turn or a message, as `eos_token_id`."""
        ids = end_token_ids(self._file.metadata)
        return {"eos_token_id": sorted(ids)} if ids else {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by Hugging Face's name, or by the file's own where it has none."""
        return self._shapes

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor: in its own type if torch has that, else dequantised to float32."""
        if name not in self._tensors:
            raise WeightsError(f"`{self.source}` has no tensor `{name}`; choose another file.")
        info = self._tensors[name]
        kind = self._types[info.type_id]
        stored, dtype = _PLAIN.get(kind, (_BYTES, None))
        values = self._data[info.offset : info.offset + _num_bytes(info, kind)].view(stored)
        # One row of the last axis after the other, quantised or not.
        values = values.reshape(*info.shape[:-1], -1)
        match = _QUERY_OR_KEY.fullmatch(name)
        if self._interleaved and match:
            heads = "num_attention_heads" if match[1] == "q" else "num_key_value_heads"
            values = _halves(values, self._config[heads], self._file.path)
        if dtype is None:
            dequantized = _dequantized(values, kind).reshape(info.shape)
            self._forget_pages(info.offset, _num_bytes(info, kind))
            return torch.from_numpy(dequantized)
        values = np.require(values, requirements=["A", "C"])
        return torch.from_numpy(values).view(dtype).reshape(info.shape)

    def _forget_pages(self, start: int, num_bytes: int) -> None:
        """Take what was read and copied out of this process's memory; the file still has it."""
        if sys.platform == "linux":  # elsewhere the system is left to find out
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, start + num_bytes - first)

    def _main_dtype(self) -> str:
        """The type of most weights; for quantised ones bfloat16, whose range suits every model."""
        counts: Counter[Any] = Counter()
        for info in self._tensors.values():
            counts[self._types[info.type_id]] += math.prod(info.shape)
        ((kind, _),) = counts.most_common(1) or [(_Type.BF16, 0)]
        return str(_PLAIN.get(kind, _PLAIN[_Type.BF16])[1]).removeprefix("torch.")


def _hugging_face_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    match = _BLOCK_NAME.fullmatch(name)
    if match and match[2] in _BLOCK:
        return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"
    return name


def _checked_types(file: GgufFile) -> dict[int, Any]:
    """The storage types in use, by number; each can be read, and every tensor lies in the file."""
    types: dict[int, Any] = {}
    for info in file.tensors.values():
        if info.type_id not in types:
            types[info.type_id] = _readable_type(file, info)
        kind = types[info.type_id]
        end = info.offset + _num_bytes(info, kind)
        if end > file.num_bytes:
            raise WeightsError(
                f"`{file.path}` is cut short: it has {file.num_bytes} bytes, but tensor "
                f"`{info.name}` ends at byte {end}; download it again."
            )
        if info.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            raise WeightsError(
                f"`{file.path}` is damaged: tensor `{info.name}` has rows of {info.shape[-1]} "
                f"values, which {kind.name} cannot store; download it again."
            )
    return types


def _readable_type(file: GgufFile, info: TensorInfo) -> Any:
    try:
        kind = _Type(info.type_id)
        if kind not in _PLAIN:
            # An empty row tells whether there is a method, without reading weights.
            block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
            dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except (ValueError, NotImplementedError) as error:
        raise WeightsError(
            f"`{file.path}` stores tensor `{info.name}` in a type ({error}) that the gguf package "
            "cannot read; choose a file of another quantisation, or a newer gguf package."
        ) from error
    return kind


def _num_bytes(info: TensorInfo, kind: Any) -> int:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # In Python's integers, where the sizes of a corrupt shape cannot wrap around.
    return math.prod(info.shape) // int(block_size) * int(block_bytes)


def _dequantized(values: npt.NDArray[Any], kind: Any) -> npt.NDArray[np.float32]:
    # The package works through 16 rows at a time, and blocks do not care for rows: rows of 256
    # blocks fill the caches best, and make it about twice as fast as the model's own short rows.
    block_bytes = int(gguf.GGML_QUANT_SIZES[kind][1])
    num_blocks = math.gcd(values.size // block_bytes, 256)
    regrouped = values.reshape(-1, num_blocks * block_bytes)
    return np.asarray(dequantize(regrouped, kind), dtype=np.float32)


def _halves(values: npt.NDArray[Any], num_heads: int, path: Any) -> npt.NDArray[Any]:
    """Reorder the rows of each head from (pair, half) to (half, pair)."""
    if len(values) % (2 * num_heads):
        raise WeightsError(
            f"`{path}` has a query or key projection of {len(values)} rows, which do not make "
            f"{num_heads} heads of an even size; choose another file."
        )
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
