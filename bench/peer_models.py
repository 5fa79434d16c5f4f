"""The built-in model's weights in the layouts that other engines read."""

import json
import os
from pathlib import Path

import numpy as np

# nanovllm is imported where it is needed: a peer's own environment has not got it.


def _cache_folder() -> Path:
    from nanovllm.builtin_model import cache_folder

    return cache_folder() / "bench"


def _source() -> Path:
    from nanovllm.hub import find_model

    return find_model("smollm2-135m").path


def gguf_file(kind: str) -> str:
    """A `.gguf` file with every matrix in one type; made once, in the cache folder."""
    target = _cache_folder() / f"smollm2-135m.{kind}.gguf"
    if target.exists():
        return str(target)
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    target.parent.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(_source())
    unfinished = target.with_suffix(".part")
    writer = GGUFWriter(unfinished, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            stored = GGMLQuantizationType[kind]
            writer.add_tensor(tensor.name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(unfinished.rename(target))


def hugging_face_folder() -> str:
    """A Hugging Face folder in bfloat16, without a tokenizer; made once, in the cache folder."""
    folder = _cache_folder() / "smollm2-135m"
    if (folder / "config.json").exists():
        return str(folder)
    import torch
    from safetensors.torch import save_file

    from nanovllm.model.gguf_checkpoint import GgufCheckpoint

    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = GgufCheckpoint(_source())
    tensors = {name: checkpoint.tensor(name).to(torch.bfloat16) for name in checkpoint.shapes()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(checkpoint.config), default=list))
    return str(folder)


def openvino_folder(weights: str) -> str:
    """A folder that OpenVINO's exporter has written: "fp16" or "int8"."""
    return str(Path(os.environ["NANOVLLM_OPENVINO"]) / weights)
