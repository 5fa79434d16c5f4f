"""The built-in model's weights in 16 bits, in the layouts that other engines read."""

import json
from pathlib import Path

import numpy as np

from nanovllm.builtin_model import cache_folder
from nanovllm.hub import find_model


def bf16_gguf() -> Path:
    """A `.gguf` file with every matrix in bfloat16; made once, in the cache folder."""
    target = cache_folder() / "bench" / "smollm2-135m.bf16.gguf"
    if target.exists():
        return target
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    target.parent.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(find_model("smollm2-135m").path)
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
            bf16 = GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(values, bf16), raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(target)


def hugging_face_folder() -> Path:
    """A Hugging Face folder in bfloat16, without a tokenizer; made once, in the cache folder."""
    folder = cache_folder() / "bench" / "smollm2-135m"
    if (folder / "config.json").exists():
        return folder
    import torch
    from safetensors.torch import save_file

    from nanovllm.model.gguf_checkpoint import GgufCheckpoint

    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = GgufCheckpoint(find_model("smollm2-135m").path)
    tensors = {name: checkpoint.tensor(name).to(torch.bfloat16) for name in checkpoint.shapes()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(checkpoint.config), default=list))
    return folder
