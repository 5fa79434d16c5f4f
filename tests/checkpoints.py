"""Tiny random checkpoints of every family, made on the spot and kept for the session."""

import functools
import json
import tempfile
from pathlib import Path

import torch
import transformers

VOCAB_SIZE = 320

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

FAMILIES = {
    "llama": (transformers.LlamaConfig, {"head_dim": 64, "tie_word_embeddings": True}),
    "llama_biased": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_linear": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama3": (
        transformers.LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2_yarn": (
        transformers.Qwen2Config,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 64}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "num_key_value_heads": 1}),
}
"""Name -> (config class, what differs from the common part)."""

_FOLDERS = tempfile.TemporaryDirectory(prefix="nanovllm-checkpoints-")


@functools.cache
def reference_model(name):
    """The transformers model of a family, in float32, with norms and biases that show."""
    make_config, changes = FAMILIES[name]
    torch_state = torch.random.get_rng_state()
    torch.manual_seed(sum(map(ord, name)))
    config = make_config(**{**_COMMON, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif key.endswith("bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))
    torch.random.set_rng_state(torch_state)
    return model


@functools.cache
def checkpoint_folder(name, *, max_shard_size="5GB"):
    """The same model as a Hugging Face folder without a tokenizer."""
    folder = Path(_FOLDERS.name) / f"{name}-{max_shard_size}"
    reference_model(name).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def edit_json(path, **changes):
    """Change entries of a JSON file; None removes one."""
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content.pop(key, None)
        if value is not None:
            content[key] = value
    path.write_text(json.dumps(content))


def greedy_tokens(name, prompt, num_tokens):
    """What transformers' own `generate` makes of a prompt."""
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        generated = reference_model(name).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(generated[0, len(prompt) :].tolist())
