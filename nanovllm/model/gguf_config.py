"""GGUF metadata in the spelling of Hugging Face's `config.json`. A pure function of the header."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nanovllm.errors import WeightsError
from nanovllm.model.gguf_file import GgufFile

ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""GGUF's architecture name: Hugging Face's class name and `model_type`. Mistral files say llama."""

ROPE_FACTORS = "rope_freqs.weight"
"""`[D / 2]` tensor of a Llama 3 file: inverse frequencies are divided by it, element by element."""

# Defaults of llama.cpp, for keys that old files leave out.
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_BETA_FAST, _DEFAULT_BETA_SLOW = 32.0, 1.0


def config_from_gguf(
    file: GgufFile, *, shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> dict[str, Any]:
    """Describe the model as `config.json` would.

    A file with Llama 3's frequency scaling carries the result of its formula and not the formula's
    numbers: the tensor `ROPE_FACTORS`. It is told by `rope_parameters["rope_type"] == "factors"`,
    and asks for `inv_freq / factors` and nothing else.

    Args:
        file: The header.
        shapes: Shapes by Hugging Face's tensor names.
        dtype: The type to compute in, as torch spells it.

    Raises:
        WeightsError: The architecture is not supported, or a key is missing or out of range.
    """
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise WeightsError(
            f"`{file.path}` holds a model of architecture {name!r}, but the architectures "
            f"{', '.join(ARCHITECTURES)} are supported in GGUF files; choose another model."
        )
    keys = _Keys(file.path, file.metadata, name)
    if keys.get("expert_count", 0):
        raise WeightsError(
            f"`{file.path}` holds a mixture of experts, but dense models are supported; "
            "choose another model."
        )
    class_name, model_type = ARCHITECTURES[name]
    num_heads, hidden_size = keys.count("attention.head_count"), keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", default=hidden_size // num_heads)
    keys.must_be("attention.value_length", head_dim)
    keys.must_be("rope.dimension_count", head_dim)
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        # Not `vocab_size` of the metadata: the matrix may have padding rows.
        "vocab_size": shapes.get("model.embed_tokens.weight", (0,))[0],
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(keys, has_factors=ROPE_FACTORS in shapes),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in shapes,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    window = keys.get("attention.sliding_window", 0)
    if window:
        config |= {"sliding_window": window, "use_sliding_window": True}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{ours}_token_id"] = file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
    return config


class _Keys:
    """The metadata keys of one architecture, checked as they are read."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str) -> None:
        self._path = path
        self._metadata = metadata
        self._architecture = architecture

    def get(self, key: str, default: Any) -> Any:
        return self._metadata.get(f"{self._architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        return float(self._checked(key, value, lambda: value > 0, "a number > 0"))

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        # Some models list a value for each layer; the supported ones have one for all.
        if isinstance(value, tuple) and len(set(value)) == 1:
            value = value[0]
        return int(self._checked(key, value, lambda: isinstance(value, int) and value > 0, "> 0"))

    def must_be(self, key: str, expected: int) -> None:
        value = self.get(key, expected)
        self._checked(key, value, lambda: value == expected, str(expected))

    def one_of(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.get(key, default)
        return str(self._checked(key, value, lambda: value in allowed, " or ".join(allowed)))

    def _checked(self, key: str, value: Any, holds: Callable[[], bool], allowed: str) -> Any:
        try:
            if holds():
                return value
        except TypeError:
            pass  # not even comparable
        shown = "missing" if value is None else repr(value)
        raise WeightsError(
            f"`{self._architecture}.{key}` is {shown} in `{self._path}` but must be {allowed}; "
            "choose another file."
        )


def _rope_parameters(keys: _Keys, *, has_factors: bool) -> dict[str, Any]:
    # Files older than the `type` key say only by how much positions are divided.
    factor = keys.get("rope.scaling.factor", 0) or keys.get("rope.scale_linear", 0) or 1.0
    kinds = ("none", "linear", "yarn")
    kind = keys.one_of("rope.scaling.type", kinds, default="none" if factor == 1.0 else "linear")
    if has_factors:
        # Both together would scale twice.
        kind = keys.one_of("rope.scaling.type", ("none",), default=kind)
    rope = {
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base", _DEFAULT_ROPE_THETA),
    }
    if has_factors:
        rope["rope_type"] = "factors"
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, **_yarn(keys)}
    return rope


def _yarn(keys: _Keys) -> dict[str, Any]:
    # Corrections that `config.json` cannot spell; ordinary files leave them out or at these values.
    for key, neutral in (
        ("attn_factor", 1),
        ("yarn_attn_factor", 1),
        ("yarn_ext_factor", 1),
        ("yarn_log_multiplier", 0),
    ):
        keys.must_be(f"rope.scaling.{key}", neutral)
    return {
        "original_max_position_embeddings": keys.count(
            "rope.scaling.original_context_length", default=keys.count("context_length")
        ),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", _DEFAULT_BETA_FAST),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", _DEFAULT_BETA_SLOW),
    }
