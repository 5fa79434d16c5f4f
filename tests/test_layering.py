"""Who may import whom: every file's imports against the table of the design."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import checkpoint_folder

ROOT = Path(__file__).parent.parent

# What each folder may import besides the standard library and itself; the longest prefix counts.
ALLOWED = {
    "nanovllm/core": {"attrs", "xxhash", "numpy", "nanovllm.errors", "nanovllm.sampling_params"},
    "nanovllm/model": {"torch", "numpy", "attrs", "safetensors", "gguf", "nanovllm.errors"},
    "nanovllm/text": {
        "attrs",
        "jinja2",
        "llguidance",
        "numpy",
        "tokenizers",
        "transformers",
        "nanovllm.errors",
        "nanovllm.hub",
        "nanovllm.model.gguf_file",
    },
    "nanovllm/kernels": {"torch", "attrs", "nanovllm.errors"},
    "nanovllm/kernels/triton": {"torch", "attrs", "triton", "nanovllm.kernels"},
    "nanovllm/runtime": {
        "torch",
        "numpy",
        "attrs",
        "psutil",
        "nanovllm.core",
        "nanovllm.kernels",
        "nanovllm.model",
        "nanovllm.outputs",
        "nanovllm.sampling_params",
        "graphs",
    },
    "nanovllm/runtime/native": {
        "torch",
        "numpy",
        "numba",
        "llvmlite",
        "xxhash",
        "nanovllm.core",
        "nanovllm.model",
        "nanovllm.runtime",
    },
    "nanovllm/workloads": {
        "torch",
        "attrs",
        "psutil",
        "pynvml",
        "nanovllm.errors",
        "nanovllm.llm",
        "nanovllm.records",
        "nanovllm.sampling_params",
        "telemetry",
    },
    "nanovllm/pytest_plugin": {
        "torch",
        "attrs",
        "psutil",
        "pytest",
        "pytest_benchmark",
        "telemetry",
        "nanovllm.errors",
        "nanovllm.llm",
        "nanovllm.records",
        "nanovllm.sampling_params",
        "nanovllm.workloads",
    },
    "graphs": {"torch", "numpy", "attrs"},
    "telemetry": {"attrs", "numpy", "psutil"},
    "telemetry/providers": {"attrs", "psutil", "pynvml", "telemetry"},
    "telemetry/report": {"attrs", "jinja2", "markupsafe", "numpy", "rich", "telemetry"},
    "telemetry/sinks": {"attrs", "prometheus_client", "telemetry"},
}

# Packages that `import nanovllm` must not load, and those that must never stand at a module's top
# outside the one folder that is imported late.
HEAVY = ("torch", "transformers", "triton", "flash_attn", "pynvml", "numba", "tokenizers", "gguf")
LATE = {
    "triton",
    "flash_attn",
    "pynvml",
    "numba",
    "llguidance",
    "llvmlite",
    "transformers",
    "prometheus_client",
}

# Folders that are imported late as a whole.
LATE_FOLDERS = ("nanovllm/runtime/native/", "nanovllm/kernels/triton/")


def imports(path):
    """(module, whether at the top level) of every import in a file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        top = node in tree.body
        if isinstance(node, ast.Import):
            yield from ((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module, top


def files():
    return [
        path.relative_to(ROOT)
        for folder in ("nanovllm", "graphs", "telemetry")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def folder_rule(path):
    rules = [folder for folder in ALLOWED if path.as_posix().startswith(folder + "/")]
    return max(rules, key=len, default=None)


@pytest.mark.parametrize("path", files(), ids=str)
def test_imports_only_what_its_folder_may(path):
    rule = folder_rule(path)
    own = str(path.parent).replace("/", ".")
    for module, _ in imports(ROOT / path):
        root = module.split(".")[0]
        if root in sys.stdlib_module_names or rule is None or module.startswith(own):
            continue
        allowed = ALLOWED[rule]
        own_rule = rule.replace("/", ".")
        assert module.startswith(own_rule) or any(
            module == name or module.startswith(name + ".") for name in allowed
        ), f"{path} may not import {module}"


@pytest.mark.parametrize("path", files(), ids=str)
def test_optional_packages_are_imported_late(path):
    if path.as_posix().startswith(LATE_FOLDERS):
        return
    late_modules = [folder.strip("/").replace("/", ".") for folder in LATE_FOLDERS]
    for module, top in imports(ROOT / path):
        is_late = module.split(".")[0] in LATE or any(map(module.startswith, late_modules))
        assert not (top and is_late), f"{path} imports {module} at its top"


def test_leaf_libraries_do_not_know_nanovllm():
    for path in files():
        if path.parts[0] in ("graphs", "telemetry"):
            assert not any(name.startswith("nanovllm") for name, _ in imports(ROOT / path))


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )


@pytest.mark.parametrize("package", ["nanovllm", "nanovllm.core", "graphs", "telemetry"])
def test_importing_loads_nothing_heavy(package):
    run = run_python(f"import sys, {package}; print([m for m in {HEAVY} if m in sys.modules])")

    assert run.stdout.strip() == "[]", run.stderr


def test_the_core_works_where_torch_can_not_be_imported():
    run = run_python(
        "import sys; sys.modules['torch'] = None\n"
        "from nanovllm.core import *\n"
        "from nanovllm.core import EngineState, Sequence, SchedulerLimits, admit, schedule\n"
        "limits = SchedulerLimits(1, 8, 64)\n"
        "state = admit(EngineState.create(64, 4), Sequence.create(0, [1, 2, 3]), limits)\n"
        "print(schedule(state, limits)[1].num_tokens)"
    )

    assert run.stdout.strip() == "3", run.stderr


@pytest.mark.parametrize("broken", ["ImportError('no')", "OSError('wrong ABI')"])
def test_broken_optional_packages_do_not_keep_the_engine_from_running(broken, tmp_path):
    """Packages that are installed and fail to import, as after an upgrade of the system."""
    for name in ("numba", "triton", "flash_attn"):
        (tmp_path / f"{name}.py").write_text(f"raise {broken}")
    run = run_python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from nanovllm import LLM, SamplingParams\n"
        f"model = {str(checkpoint_folder('llama'))!r}\n"
        "with LLM(model, device='cpu', skip_tokenizer_init=True, num_kvcache_blocks=64) as llm:\n"
        "    output = llm.generate([1, 2], SamplingParams(max_tokens=3))[0]\n"
        "    print(llm.config.attention_backend, len(output.token_ids))\n"
        "    print([note for note in llm.config.notes if 'Numba' in note])"
    )

    assert run.stdout.startswith("torch 3\n"), run.stderr
    assert "Numba fails to load" in run.stdout
