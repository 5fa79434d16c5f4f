"""The plugin is in every pytest run of its environment, and must not be felt in most."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import checkpoint_folder
from tests.pytest_plugin.app_suite import CONFTEST, run_suite, write_suite

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent.parent


def test_a_run_that_uses_nothing_of_it_loads_no_torch(tmp_path):
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_other():\n"
        "    assert 'nanovllm.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'transformers', 'pynvml', 'numba'} & set(sys.modules)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p nanovllm.pytest_plugin\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", str(tmp_path)],
        env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "1 passed" in run.stdout, run.stdout + run.stderr
    assert "latency" not in run.stdout


def test_the_engine_is_there_without_pytest_benchmark(pytester):
    write_suite(
        pytester,
        "def test_app(app):\n    assert len(app([[1, 2]])[0].token_ids) == 5\n",
        CONFTEST,
    )

    run_suite(pytester, "-p", "no:benchmark", "--strict-markers").assert_outcomes(passed=1)


def test_disabled_benchmarks_run_once_and_gain_nothing(pytester):
    pytest.importorskip("pytest_benchmark")
    write_suite(pytester)

    result = run_suite(pytester, "--benchmark-disable")

    result.assert_outcomes(passed=1)
    assert "latency" not in result.stdout.str()


def test_xdist_runs_them_without_timing(pytester, monkeypatch):
    pytest.importorskip("pytest_benchmark")
    pytest.importorskip("xdist")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    write_suite(
        pytester,
        # Without an engine, since each worker would have to load torch.
        "def test_one(benchmark): benchmark(int)\ndef test_two(benchmark): benchmark(int)\n",
        "",
    )

    run_suite(pytester, "-n", "1").assert_outcomes(passed=2)


def test_other_peoples_llm_fixtures_are_left_alone(pytester):
    pytest.importorskip("pytest_benchmark")
    write_suite(
        pytester,
        """
import pytest
@pytest.fixture
def llm():
    return len
def test_app(benchmark, llm):
    benchmark.pedantic(llm, args=([1],), rounds=2)
""",
    )

    result = run_suite(pytester)

    result.assert_outcomes(passed=1)
    assert "latency" not in result.stdout.str()


def test_an_engine_without_a_model_says_how_to_name_one(pytester):
    pytester.makepyfile("def test_app(llm): pass")

    result = run_suite(pytester)

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*--llm-model MODEL*llm_model = MODEL*llm_config*"])


def test_the_model_and_its_options_come_from_the_command_line_before_the_ini_file(pytester):
    pytester.makeini(
        f"[pytest]\nllm_model = {checkpoint_folder('llama')}\n"
        "llm_options =\n    device=cpu\n    dtype=bfloat16\n    skip_tokenizer_init=True\n"
        "    num_kvcache_blocks=32\n    attention_backend=torch\n"
    )
    pytester.makepyfile(
        "def test_app(llm):\n"
        "    assert (llm.config.dtype, llm.config.num_kvcache_blocks) == ('float32', 32)\n"
        "    assert llm.tokenizer is None\n"
    )

    run_suite(pytester, "--llm-option", "dtype=float32").assert_outcomes(passed=1)


@pytest.mark.parametrize("option", ["dtype", "=float32", "two words=1"])
def test_an_option_that_is_not_one_is_refused(pytester, option):
    pytester.makepyfile("def test_app(llm_config): pass")

    result = run_suite(pytester, "--llm-option", option)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{option!r} is no option of an engine; write NAME=VALUE*"])


def test_an_unknown_telemetry_mode_in_the_ini_file_is_refused_at_once(pytester):
    pytester.makeini("[pytest]\nllm_telemetry = loud\n")
    pytester.makepyfile("def test_app(): pass")

    result = run_suite(pytester)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'loud'*off, edges, live*"])


def test_the_summary_says_what_differs_from_the_set_up_of_the_run_compared_with(pytester):
    pytest.importorskip("pytest_benchmark")
    write_suite(pytester)
    run_suite(pytester, "--benchmark-save=base").assert_outcomes(passed=1)
    (saved,) = pytester.path.glob(".benchmarks/*/0001_base.json")
    saved.write_text(saved.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))

    result = run_suite(pytester, "--benchmark-compare=0001")

    result.stdout.fnmatch_lines(["*another machine or set-up: dtype bfloat16 -> float32"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--llm-report", "/no/such/folder/report.html"], "--llm-report"),
        (["--llm-report", "."], "--llm-report"),
        (["--llm-option", "bogus"], "NAME=VALUE"),
    ],
)
def test_wrong_usage_is_said_before_any_test_runs(pytester, arguments, said):
    write_suite(pytester, "def test_app():\n    assert False, 'it ran'\n", "")

    result = run_suite(pytester, *arguments)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in result.stderr.str()
    assert "it ran" not in result.stdout.str()


@pytest.mark.parametrize("option", ["bogus=1", "max_num_seqs=0"])
def test_an_engine_that_can_not_be_made_is_a_line_and_no_traceback(pytester, option):
    folder = checkpoint_folder("llama")
    write_suite(pytester, "def test_app(llm):\n    pass\n", "")

    result = run_suite(pytester, "--llm-model", str(folder), "--llm-option", option)

    result.assert_outcomes(errors=1)
    assert "the `llm` fixture can't be made" in result.stdout.str()
    assert "Traceback" not in result.stdout.str()
