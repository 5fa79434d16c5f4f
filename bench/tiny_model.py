"""A small Llama with random weights, written to a folder: the same everywhere, no download."""

import json
from pathlib import Path

VOCAB_SIZE = 4096

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path) -> Path:
    """Write `config.json` and `model.safetensors`; there is no tokenizer."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.05

    embed, inner, heads, kv_heads = 256, 512, 4 * 64, 2 * 64
    tensors = {
        "model.embed_tokens.weight": random(VOCAB_SIZE, embed),
        "model.norm.weight": torch.ones(embed),
    }
    for layer in range(4):
        shapes = {
            "self_attn.q_proj": (heads, embed),
            "self_attn.k_proj": (kv_heads, embed),
            "self_attn.v_proj": (kv_heads, embed),
            "self_attn.o_proj": (embed, heads),
            "mlp.gate_proj": (inner, embed),
            "mlp.up_proj": (inner, embed),
            "mlp.down_proj": (embed, inner),
        }
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(embed)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
