import os

import gguf
import numpy as np
import pytest
import torch

from nanovllm.errors import WeightsError
from nanovllm.model.gguf_checkpoint import GgufCheckpoint
from tests.builtin import builtin_gguf_path
from tests.gguf_files import (
    converted,
    encoded,
    hf_weights,
    write_model,
)

Type = gguf.GGMLQuantizationType
ARCHITECTURES = ["llama", "qwen2", "qwen3"]


def write(folder, architecture="llama", weights=None, **options):
    weights = hf_weights(architecture) if weights is None else weights
    return GgufCheckpoint(write_model(folder / "tiny.gguf", architecture, weights, **options))


# Tensors


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Type.F32, torch.float32), (Type.F16, torch.float16), (Type.BF16, torch.bfloat16)],
)
def test_gives_hugging_face_tensors_in_the_type_they_are_stored_in(
    tmp_path, architecture, kind, dtype
):
    weights = hf_weights(architecture, biases=("q_proj", "k_proj"))

    checkpoint = write(tmp_path, architecture, weights, kind=kind)

    assert set(checkpoint.shapes()) == set(weights)
    for name, values in weights.items():
        tensor = checkpoint.tensor(name)
        assert tensor.dtype == (torch.float32 if values.ndim == 1 else dtype)
        assert tuple(tensor.shape) == checkpoint.shapes()[name] == values.shape
        torch.testing.assert_close(tensor, torch.from_numpy(values).to(tensor.dtype))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_dequantises_to_float32_and_undoes_the_row_order(tmp_path, architecture, kind):
    weights = hf_weights(architecture)

    checkpoint = write(tmp_path, architecture, weights, kind=kind)

    for name, values in weights.items():
        data, raw = encoded(values, kind)
        # Quantising works along rows, so it does not matter whether rows are moved before or after.
        expected = gguf.quants.dequantize(data, raw)
        torch.testing.assert_close(
            checkpoint.tensor(name), torch.from_numpy(expected), rtol=0, atol=0
        )


def test_moves_rows_for_llama_only(tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"
    moved = converted("llama", name, hf_weights("llama")[name])

    assert not np.array_equal(moved, hf_weights("llama")[name])
    assert np.array_equal(converted("qwen3", name, moved), moved)


@pytest.mark.parametrize("kind", [Type.Q2_K, Type.Q4_K, Type.Q6_K, Type.IQ4_XS, Type.TQ1_0])
def test_reads_every_type_that_the_package_can_dequantise(tmp_path, kind):
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 60, (6, 2 * block_bytes), dtype=np.uint8)
    checkpoint = write(tmp_path, weights={}, extra_tensors={"blk.0.ffn_up.weight": (data, kind)})

    tensor = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")

    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    assert tensor.shape == (6, 2 * block_size)
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)


def test_writing_to_a_tensor_does_not_reach_the_file(tmp_path):
    checkpoint = write(tmp_path)
    before = (tmp_path / "tiny.gguf").read_bytes()

    checkpoint.tensor("model.norm.weight").zero_()

    assert (tmp_path / "tiny.gguf").read_bytes() == before


def test_shows_unknown_tensors_under_their_own_names_and_drops_known_clutter(tmp_path):
    extra = {
        "blk.0.mystery.weight": np.ones(4, np.float32),
        "v.patch_embd.weight": np.ones(4, np.float32),
        "blk.0.attn_rot_embd.weight": np.ones(4, np.float32),
    }

    names = set(write(tmp_path, extra_tensors=extra).shapes())

    assert names - set(hf_weights("llama")) == {"blk.0.mystery.weight", "v.patch_embd.weight"}


def test_asking_for_a_tensor_that_is_not_there_names_it_and_the_file(tmp_path):
    with pytest.raises(WeightsError, match=r"tiny\.gguf. has no tensor .nonsense"):
        write(tmp_path).tensor("nonsense")


# Refusals


def test_refuses_a_part_of_a_split_model(tmp_path):
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(WeightsError, match="one of 3 parts"):
        GgufCheckpoint(path)


def test_refuses_a_file_that_is_cut_short_and_names_the_tensor(tmp_path):
    write(tmp_path)
    path = tmp_path / "tiny.gguf"
    os.truncate(path, path.stat().st_size - 100)

    with pytest.raises(WeightsError, match=r"cut short.*tensor .blk\.1\."):
        GgufCheckpoint(path)


def test_refuses_storage_types_that_it_cannot_read(tmp_path):
    write(tmp_path)
    path = tmp_path / "tiny.gguf"
    whole = path.read_bytes()
    place = whole.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    for type_id in (255, Type.I32):
        path.write_bytes(whole[:place] + bytes([type_id]) + whole[place + 1 :])

        with pytest.raises(WeightsError, match=r"output_norm\.weight. in a type"):
            GgufCheckpoint(path)


def test_refuses_rows_that_are_no_whole_blocks(tmp_path):
    write(tmp_path)
    path = tmp_path / "tiny.gguf"
    whole = path.read_bytes()
    place = whole.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    path.write_bytes(whole[:place] + bytes([Type.Q4_K]) + whole[place + 1 :])

    with pytest.raises(WeightsError, match="rows of 64 values, which Q4_K cannot store"):
        GgufCheckpoint(path)


# The built-in model


@pytest.mark.model
def test_opens_the_built_in_model():
    checkpoint = GgufCheckpoint(builtin_gguf_path())

    assert checkpoint.config["num_hidden_layers"] == 30
    assert checkpoint.config["rms_norm_eps"] == 1e-5
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.shapes()["model.embed_tokens.weight"] == (49152, 576)
    assert len(checkpoint.shapes()) == 2 + 30 * 9
    weight = checkpoint.tensor("model.layers.29.mlp.down_proj.weight")
    assert weight.shape == (576, 1536)
    assert 0.01 < weight.std() < 1
