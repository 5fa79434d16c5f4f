import contextlib
import struct

import gguf
import numpy as np
import pytest

from nanovllm.errors import WeightsError
from nanovllm.model.gguf_file import end_token_ids, read_gguf
from tests.gguf_files import hf_weights, write_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    extra = {
        "tokenizer.ggml.tokens": ["a", "ü", "日本", ""],
        "tokenizer.ggml.scores": [0.5, -1.0, 2.0, 0.0],
        "tokenizer.ggml.token_type": [1, 3, 4, 6],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }
    return write_model(path, "qwen3", hf_weights("qwen3"), metadata=extra)


def test_reads_the_same_header_as_the_gguf_package(model_path):
    expected = gguf.GGUFReader(model_path)

    file = read_gguf(model_path)

    assert list(file.tensors) == [tensor.name for tensor in expected.tensors]
    for tensor in expected.tensors:
        info = file.tensors[tensor.name]
        assert info.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert (info.type_id, info.offset) == (tensor.tensor_type, tensor.data_offset)
    values = {key: field.contents() for key, field in expected.fields.items() if "GGUF." not in key}
    assert set(file.metadata) == set(values)
    for key, value in file.metadata.items():
        assert (list(value) if isinstance(value, tuple) else value) == pytest.approx(values[key])


def test_reads_a_float32_as_its_shortest_decimal(model_path):
    assert read_gguf(model_path).metadata["qwen3.attention.layer_norm_rms_epsilon"] == 1e-6


def test_knows_every_id_that_ends_a_text():
    prefix = "tokenizer.ggml."
    metadata = {prefix + "eos_token_id": 2, prefix + "eot_token_id": 7, prefix + "eom_token_id": 9}

    assert end_token_ids(metadata) == {2, 7, 9}
    assert end_token_ids({}) == frozenset()


def test_refuses_a_file_that_is_not_there(tmp_path):
    with pytest.raises(WeightsError, match=r"absent\.gguf. cannot be read"):
        read_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + bytes(60), b"GGUF"])
def test_refuses_what_is_no_gguf_file(tmp_path, content):
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)

    with pytest.raises(WeightsError, match=r"odd\.gguf"):
        read_gguf(path)


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_refuses_other_versions_and_byte_orders(tmp_path, version):
    path = tmp_path / "other.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))

    with pytest.raises(WeightsError, match=f"version {version}"):
        read_gguf(path)


def test_a_cut_anywhere_in_the_header_is_an_error_that_names_the_file(tmp_path, model_path):
    whole = model_path.read_bytes()
    header = min(info.offset for info in read_gguf(model_path).tensors.values())
    path = tmp_path / "cut.gguf"
    # The last bytes before the data are padding, whose loss the tensors' ends will tell.
    for end in range(0, header - gguf.GGUF_DEFAULT_ALIGNMENT, 7):
        path.write_bytes(whole[:end])

        with pytest.raises(WeightsError, match=r"cut\.gguf"):
            read_gguf(path)


def test_garbage_in_the_header_never_gives_another_error(tmp_path, model_path):
    whole = bytearray(model_path.read_bytes())
    header = min(info.offset for info in read_gguf(model_path).tensors.values())
    rng = np.random.default_rng(0)
    path = tmp_path / "garbage.gguf"
    for _ in range(300):
        damaged = bytearray(whole)
        for place in rng.integers(4, header, size=3):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(WeightsError):
            read_gguf(path)
