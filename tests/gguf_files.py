"""Tiny `.gguf` files with random weights, written as llama.cpp's converter writes them."""

from pathlib import Path

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, LAYERS = 64, 4, 2, 32, 96, 320, 2

_HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def hf_weights(architecture, *, tied=False, biases=(), seed=0):
    """Random float32 tensors under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    if architecture == "qwen2":
        biases = ("q_proj", "k_proj", "v_proj")
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        shapes |= {
            block + "input_layernorm.weight": (HIDDEN,),
            block + "post_attention_layernorm.weight": (HIDDEN,),
            block + "self_attn.q_proj.weight": (q, HIDDEN),
            block + "self_attn.k_proj.weight": (kv, HIDDEN),
            block + "self_attn.v_proj.weight": (kv, HIDDEN),
            block + "self_attn.o_proj.weight": (HIDDEN, q),
            block + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            block + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            block + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
        for name in biases:
            shapes[block + f"self_attn.{name}.bias"] = (q if name == "q_proj" else kv,)
        if architecture == "qwen3":
            shapes[block + "self_attn.q_norm.weight"] = (HEAD_DIM,)
            shapes[block + "self_attn.k_norm.weight"] = (HEAD_DIM,)
    return {name: rng.standard_normal(size, dtype=np.float32) for name, size in shapes.items()}


def gguf_name(name):
    stem, suffix = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_HF_TO_GGUF[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_HF_TO_GGUF[part]}.{suffix}"


def converted(architecture, name, values):
    """A tensor as the converter writes it: llama's rotary pairs lie side by side."""
    if architecture != "llama" or not ("q_proj" in name or "k_proj" in name):
        return values
    heads = HEADS if "q_proj" in name else KV_HEADS
    rows = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def encoded(values, kind):
    """The bytes of a tensor; rows of one number stay as they are, as in real files."""
    if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        return values, gguf.GGMLQuantizationType.F32
    if kind == gguf.GGMLQuantizationType.F16:
        return values.astype(np.float16), kind
    return gguf.quants.quantize(values, kind), kind


def write_model(
    path: Path,
    architecture,
    weights,
    *,
    kind=gguf.GGMLQuantizationType.F32,
    metadata=(),
    extra_tensors=(),
    leave_out=(),
):
    """Write a model.

    `metadata` adds or replaces values, by key without the architecture. `extra_tensors` are arrays
    by the file's names, or pairs of bytes and their type.
    """
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INTERMEDIATE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": HEAD_DIM,
        "rope.freq_base": 1_000_000.0,
        **dict(metadata),
    }
    for key, value in values.items():
        if key not in leave_out:
            add(writer, key if key.startswith("tokenizer.") else f"{architecture}.{key}", value)
    for name, tensor in weights.items():
        data, raw = encoded(converted(architecture, name, tensor), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=raw)
    for name, tensor in dict(extra_tensors).items():
        data, raw = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer, key, value):
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, list(value))
