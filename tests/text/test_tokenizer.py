import pytest

from nanovllm.errors import ConfigError
from nanovllm.hub import FilesKind, ModelFiles
from nanovllm.text.tokenizer import load_tokenizer
from tests.gguf_files import hf_weights, write_model
from tests.tokenizer_files import (
    SMOLLM,
    byte_level_json,
    config_json,
    gguf_metadata,
    texts,
    write_folder,
)


@pytest.fixture(scope="module")
def content():
    return byte_level_json(SMOLLM)


def load(path, **options):
    return load_tokenizer(ModelFiles(FilesKind.FOLDER, path, path.name), **options)


def test_another_tokenizer_can_be_given(tmp_path, content):
    model = tmp_path / "model"
    model.mkdir()
    other = write_folder(tmp_path / "other", content, config=config_json(content))
    (other / "config.json").unlink()

    assert load(model, tokenizer=str(other)).encode("a") == load(other).encode("a")


def test_a_gguf_file_brings_its_own(tmp_path, content):
    path = write_model(
        tmp_path / "tiny.gguf",
        "qwen3",
        hf_weights("qwen3"),
        metadata=gguf_metadata(content, "smollm"),
    )
    files = ModelFiles(FilesKind.GGUF, path, "tiny")
    folder = load(write_folder(tmp_path / "folder", content, config=config_json(content)))

    tokenizer = load_tokenizer(files)

    for text in texts(10):
        assert tokenizer.encode(text) == folder.encode(text)
    assert load(tmp_path, tokenizer=str(path)).encode("a") == folder.encode("a")


def test_a_folder_without_tokenizer_says_how_to_go_on(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(ConfigError, match=r"holds no tokenizer .*`skip_tokenizer_init=True`"):
        load(tmp_path)
