import gguf
import numpy as np
import pytest
import torch

from nanovllm.errors import WeightsError
from nanovllm.model.gguf_checkpoint import GgufCheckpoint
from tests.gguf_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    VOCAB,
    hf_weights,
    write_model,
)

Type = gguf.GGMLQuantizationType


def write(folder, architecture="llama", weights=None, **options):
    weights = hf_weights(architecture) if weights is None else weights
    return GgufCheckpoint(write_model(folder / "tiny.gguf", architecture, weights, **options))


@pytest.mark.parametrize(
    ("architecture", "class_name"),
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_describes_the_model_as_config_json_does(tmp_path, architecture, class_name):
    ids = {"bos": 1, "eos": 2, "padding": 3}
    metadata = {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in ids.items()}

    checkpoint = write(tmp_path, architecture, metadata=metadata)

    assert checkpoint.source == str(tmp_path / "tiny.gguf")
    assert checkpoint.generation_config == {"eos_token_id": [2]}
    assert checkpoint.config == {
        "architectures": [class_name],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": False,
        "attention_bias": architecture == "qwen2",
        "mlp_bias": False,
        "dtype": "float32",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Type.F16, "float16"), (Type.BF16, "bfloat16"), (Type.Q8_0, "bfloat16")],
)
def test_the_type_to_compute_in_is_that_of_most_weights(tmp_path, kind, dtype):
    assert write(tmp_path, kind=kind).config["dtype"] == dtype


def test_a_file_without_output_matrix_ties_it_to_the_embedding(tmp_path):
    weights = hf_weights("llama", tied=True)

    assert write(tmp_path, weights=weights).config["tie_word_embeddings"] is True


def test_keys_that_old_files_leave_out_have_defaults(tmp_path):
    leave_out = {
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
    }

    config = write(tmp_path, metadata={"embedding_length": 128}, leave_out=leave_out).config

    assert config["num_key_value_heads"] == HEADS
    assert config["head_dim"] == 128 // HEADS
    assert config["rope_parameters"]["rope_theta"] == 10_000.0
    assert config["eos_token_id"] is None
    assert "sliding_window" not in config


def test_a_sliding_window_is_in_the_config(tmp_path):
    config = write(tmp_path, metadata={"attention.sliding_window": 16}).config

    assert config["sliding_window"] == 16
    assert config["use_sliding_window"] is True


def test_one_value_for_each_layer_is_one_value_if_they_are_equal(tmp_path):
    same = write(tmp_path, metadata={"attention.head_count_kv": [KV_HEADS, KV_HEADS]})

    assert same.config["num_key_value_heads"] == KV_HEADS
    with pytest.raises(WeightsError, match=r"head_count_kv. is \(1, 2\)"):
        write(tmp_path, metadata={"attention.head_count_kv": [1, 2]})


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
    ],
)
def test_position_scaling_is_spelled_as_hugging_face_spells_it(tmp_path, metadata, expected):
    config = write(tmp_path, metadata=metadata).config

    assert config["rope_parameters"] == {"rope_theta": 1_000_000.0, **expected}


def test_llama_3_scaling_comes_as_a_tensor_of_divisors(tmp_path):
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)

    checkpoint = write(tmp_path, extra_tensors={"rope_freqs.weight": factors})

    assert checkpoint.config["rope_parameters"]["rope_type"] == "factors"
    assert checkpoint.shapes()["rope_freqs.weight"] == (HEAD_DIM // 2,)
    torch.testing.assert_close(checkpoint.tensor("rope_freqs.weight"), torch.from_numpy(factors))
    with pytest.raises(WeightsError, match=r"rope\.scaling\.type. is 'yarn'"):
        write(
            tmp_path,
            extra_tensors={"rope_freqs.weight": factors},
            metadata={"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0},
        )


# Refusals


def test_refuses_other_architectures_and_lists_the_supported(tmp_path):
    path = write_model(tmp_path / "tiny.gguf", "gemma3", hf_weights("llama"))

    with pytest.raises(WeightsError, match="'gemma3', but the architectures llama, qwen2, qwen3"):
        GgufCheckpoint(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope.dimension_count": 16}, r"rope\.dimension_count. is 16 .* must be 32"),
        ({"attention.value_length": 16}, r"value_length. is 16 .* must be 32"),
        ({"rope.scaling.type": "longrope"}, r"'longrope' .* none or linear or yarn"),
        ({"block_count": 0}, r"block_count. is 0 .* must be > 0"),
        ({"block_count": "two"}, r"block_count. is 'two'"),
    ],
)
def test_refuses_what_it_would_get_wrong(tmp_path, metadata, message):
    with pytest.raises(WeightsError, match=message):
        write(tmp_path, metadata=metadata)


def test_a_missing_key_is_named(tmp_path):
    with pytest.raises(WeightsError, match=r"llama\.feed_forward_length. is missing"):
        write(tmp_path, leave_out={"feed_forward_length"})
