"""From a checkpoint to a `Decoder`: every tensor that is needed, none that is not, right shapes."""

from collections.abc import Callable, Iterator

import torch

from nanovllm.errors import WeightsError, list_some
from nanovllm.model.checkpoint import Checkpoint
from nanovllm.model.config import ModelConfig
from nanovllm.model.decoder import Decoder, Layer
from nanovllm.model.linear import Linear, MakeLinear, make_packed
from nanovllm.model.rope import inverse_frequencies

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
ROPE_FACTORS = "rope_freqs.weight"

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.bfloat16,
}
"""Types that a model can run in, by name. In int8 only matrices are: this is what the rest is."""

MakeEmbedding = Callable[[torch.Tensor, Linear | None], torch.Tensor]
"""From the embedding `[V, E]` and the output projection, if that has the same weight."""

_IGNORED_ENDINGS = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
"""Buffers that older checkpoints carry along and that follow from the config."""


def keep_embedding(embedding: torch.Tensor, tied: Linear | None) -> torch.Tensor:
    """The embedding as torch looks it up: `[V, E]`."""
    del tied
    return embedding


def load_decoder(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    make_linear: MakeLinear = make_packed,
    make_embedding: MakeEmbedding = keep_embedding,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Decoder:
    """Load every weight.

    Args:
        checkpoint: Where the tensors are.
        config: The model's shape.
        dtype: Type of the weights in memory.
        device: Where they go.
        make_linear: Makes the linear layers.
        make_embedding: Makes what the decoder keeps as its embedding.
        progress: Called with the number of layers loaded, and of all layers.

    Raises:
        WeightsError: Tensors are missing, unexpected, of another shape, or unreadable.
    """
    _check_names(checkpoint, config)

    def get(name: str) -> torch.Tensor:
        try:
            tensor = checkpoint.tensor(name)
        except Exception as error:
            raise WeightsError(
                f"{checkpoint.source}: tensor {name} can't be read ({error}); fetch it again."
            ) from error
        # Norms and biases stay in memory: as copies they do not keep a mapped file there with them.
        return tensor.to(device=device, dtype=dtype, copy=tensor.ndim == 1)

    def maybe(name: str, wanted: bool) -> torch.Tensor | None:
        return get(name) if wanted else None

    def joined(names: list[str], wanted: bool = True) -> torch.Tensor | None:
        return torch.cat([get(name) for name in names]) if wanted else None

    # First, as it is the largest: what it takes on the way is free again for the others.
    plain_embedding = get(EMBEDDING)
    tied = config.tie_word_embeddings
    lm_head = make_linear(plain_embedding if tied else get(LM_HEAD), None)
    embedding = make_embedding(plain_embedding, lm_head if tied else None)
    del plain_embedding
    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        qkv = [f"{prefix}self_attn.{letter}_proj" for letter in "qkv"]
        gate_up = [f"{prefix}mlp.{which}_proj" for which in ("gate", "up")]
        qkv_weight = joined([f"{name}.weight" for name in qkv])
        gate_up_weight = joined([f"{name}.weight" for name in gate_up])
        assert qkv_weight is not None
        assert gate_up_weight is not None
        layers.append(
            Layer(
                input_norm=get(f"{prefix}input_layernorm.weight"),
                qkv=make_linear(
                    qkv_weight, joined([f"{name}.bias" for name in qkv], config.qkv_bias)
                ),
                query_norm=maybe(f"{prefix}self_attn.q_norm.weight", config.qk_norm),
                key_norm=maybe(f"{prefix}self_attn.k_norm.weight", config.qk_norm),
                output=make_linear(
                    get(f"{prefix}self_attn.o_proj.weight"),
                    maybe(f"{prefix}self_attn.o_proj.bias", config.output_bias),
                ),
                post_norm=get(f"{prefix}post_attention_layernorm.weight"),
                gate_up=make_linear(
                    gate_up_weight, joined([f"{name}.bias" for name in gate_up], config.mlp_bias)
                ),
                down=make_linear(
                    get(f"{prefix}mlp.down_proj.weight"),
                    maybe(f"{prefix}mlp.down_proj.bias", config.mlp_bias),
                ),
            )
        )
        progress(index + 1, config.num_layers)
    factors = None
    if config.rope.rope_type == "factors":
        factors = checkpoint.tensor(ROPE_FACTORS)
    return Decoder(
        config=config,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=get(FINAL_NORM),
        lm_head=lm_head,
        frequencies=inverse_frequencies(config.rope, factors).to(device),
    )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this config needs."""
    return dict(_expected_shapes(config))


def _expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    sizes = {
        "self_attn.q_proj": (config.num_heads * head_dim, hidden, config.qkv_bias),
        "self_attn.k_proj": (config.num_kv_heads * head_dim, hidden, config.qkv_bias),
        "self_attn.v_proj": (config.num_kv_heads * head_dim, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, config.num_heads * head_dim, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    yield EMBEDDING, (config.vocab_size, hidden)
    yield FINAL_NORM, (hidden,)
    if not config.tie_word_embeddings:
        yield LM_HEAD, (config.vocab_size, hidden)
    if config.rope.rope_type == "factors":
        yield ROPE_FACTORS, (head_dim // 2,)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        if config.qk_norm:
            yield f"{prefix}self_attn.q_norm.weight", (head_dim,)
            yield f"{prefix}self_attn.k_norm.weight", (head_dim,)
        for name, (num_out, num_in, has_bias) in sizes.items():
            yield f"{prefix}{name}.weight", (num_out, num_in)
            if has_bias:
                yield f"{prefix}{name}.bias", (num_out,)


def _check_names(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Compare what is there with what is needed, before anything is read."""
    expected, found = expected_shapes(config), checkpoint.shapes()
    problems = []
    missing = sorted(expected.keys() - found.keys())
    if missing:
        problems.append(f"missing {list_some(missing)}")
    surplus = found.keys() - expected.keys()
    if config.tie_word_embeddings:
        surplus = surplus - {LM_HEAD}  # a copy of the embedding that some exporters write
    unexpected = sorted(name for name in surplus if not name.endswith(_IGNORED_ENDINGS))
    if unexpected:
        problems.append(f"unexpected {list_some(unexpected)}")
    wrong = [
        f"{name} is {found[name]}, not {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if wrong:
        problems.append(f"wrong shape: {list_some(wrong)}")
    if problems:
        raise WeightsError(
            f"{checkpoint.source} does not hold the weights of a {config.architecture} as its "
            f"config describes it: {'; '.join(problems)}. Fetch the checkpoint again."
        )
