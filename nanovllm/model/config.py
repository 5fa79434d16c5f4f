"""`ModelConfig`: what a decoder looks like, as data. The families differ in these fields only."""

from collections.abc import Mapping
from typing import Any

import attrs

from nanovllm.errors import WeightsError
from nanovllm.model.rope import RopeConfig, read_rope_config


@attrs.frozen
class Family:
    """How one published architecture uses the common decoder.

    Attributes:
        qkv_bias: The query, key and value projections have a bias. None: `attention_bias` says.
        output_bias: So does the output projection. None: `attention_bias` says.
        qk_norm: Queries and keys are normalised per head before rope.
        window_switch: Config key that must be true for `sliding_window` to count; None: always.
    """

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    window_switch: str | None = None


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False, output_bias=False),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True, output_bias=False, window_switch="use_sliding_window"
    ),
    "Qwen3ForCausalLM": Family(qk_norm=True, window_switch="use_sliding_window"),
}
"""By the name under `architectures` in `config.json`."""


@attrs.frozen
class ModelConfig:
    """One decoder.

    Attributes:
        architecture: The name in `FAMILIES`.
        vocab_size: Rows of the embedding, `V`; may exceed the tokenizer's.
        hidden_size: Width of the residual stream, `E`.
        intermediate_size: Width of the feed-forward layer.
        num_layers: Decoder layers, `L`.
        num_heads: Query heads, `H`.
        num_kv_heads: Key and value heads, `K`; `H` is a multiple.
        head_dim: Size of a head, `D`; `H * D` need not be `E`.
        rms_norm_eps: Added to the mean square.
        max_position_embeddings: Positions that the model was trained for.
        sliding_window: Positions that a token attends to; None: all before it.
        tie_word_embeddings: The output projection is the embedding.
        qkv_bias: See `Family`.
        output_bias: See `Family`.
        mlp_bias: The feed-forward projections have biases.
        qk_norm: See `Family`.
        rope: Rotary position embedding.
        dtype: The type the checkpoint names, such as "bfloat16"; None if it names none.
        eos_token_ids: Ids that end a text, as the config gives them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    sliding_window: int | None
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    dtype: str | None
    eos_token_ids: frozenset[int]


def read_model_config(config: Mapping[str, Any], *, source: str) -> ModelConfig:
    """Read `config.json`.

    Raises:
        WeightsError: The architecture, or something it asks for, is not supported.
    """
    architecture, family = _find_family(config, source)
    if config.get("quantization_config") is not None:
        method = dict(config["quantization_config"]).get("quant_method", "an unnamed method")
        raise WeightsError(
            f"{source} is quantised with {method}, which is not supported; use the unquantised "
            "checkpoint or a .gguf file."
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise WeightsError(f"{source}: `hidden_act` is {activation!r}; only 'silu' is supported.")

    def integer(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise WeightsError(f"{source}: `{name}` is {value!r} but must be an integer >= 1.")
        return value

    hidden_size, num_heads = integer("hidden_size"), integer("num_attention_heads")
    num_kv_heads = integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise WeightsError(
            f"{source}: {num_heads} query heads can't share {num_kv_heads} key/value heads evenly."
        )
    head_dim = integer("head_dim", hidden_size // num_heads)
    max_positions = integer("max_position_embeddings", 2048)
    attention_bias = bool(config.get("attention_bias", False))
    has_window = family.window_switch is None or bool(config.get(family.window_switch, False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer("intermediate_size"),
        num_layers=integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=max_positions,
        sliding_window=config.get("sliding_window") if has_window else None,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        rope=read_rope_config(
            config, head_dim=head_dim, max_position_embeddings=max_positions, source=source
        ),
        dtype=_read_dtype(config),
        eos_token_ids=read_token_ids(config.get("eos_token_id")),
    )


def read_token_ids(value: Any) -> frozenset[int]:
    """Token ids of a config entry that may be absent, null, one id or a list of them."""
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def _find_family(config: Mapping[str, Any], source: str) -> tuple[str, Family]:
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    supported = ", ".join(FAMILIES)
    given = f"`architectures` is {names}" if names else "`architectures` is missing"
    raise WeightsError(f"{source}: {given}; supported are {supported}.")


def _read_dtype(config: Mapping[str, Any]) -> str | None:
    name = config.get("dtype") or config.get("torch_dtype")
    return None if name is None else str(name).removeprefix("torch.")
