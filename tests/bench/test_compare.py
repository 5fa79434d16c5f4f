import shutil
import subprocess
from pathlib import Path

import pytest

from bench import compare
from bench.cases import CASES
from bench.compare import CaseError, Side, checkout_of, table
from bench.compare_stats import Comparison, Launch

ROOT = Path(__file__).parent.parent.parent
CORE_CASES = ("host step, 64 sequences", "admission, 16 prompts", "prefix hit, 16 prompts")


def git(folder, *arguments):
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_side_runs_the_code_of_its_checkout_and_says_what_that_can_not_run(tmp_path):
    checkout = tmp_path / "older"
    for package in ("nanovllm", "graphs", "telemetry"):
        shutil.copytree(
            ROOT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    batch = checkout / "nanovllm/core/batch.py"
    batch.write_text(
        batch.read_text() + "\n\ndef build_batch(plan):\n    raise RuntimeError('mine')\n"
    )
    sides = [Side(ROOT), Side(checkout)]
    try:
        times = sides[0].run("admission, 16 prompts", 3)
        with pytest.raises(CaseError, match="RuntimeError: mine"):
            sides[1].run("admission, 16 prompts", 1)
        assert len(sides[1].run("sampler, greedy", 2)) == 2  # it goes on
    finally:
        for side in sides:
            side.close()

    assert len(times) == 3
    assert all(time_s > 0 for time_s in times)


@pytest.mark.parametrize("name", CORE_CASES)
def test_a_case_does_the_same_work_again_and_again(name):
    case = CASES[name]()

    for _ in range(2):
        case.run(case.prepare())


def test_a_commit_is_checked_out_beside_and_gone_afterwards(tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    (repository / "nanovllm").mkdir(parents=True)
    git(repository, "init", "--quiet")
    for text in ("old", "new"):
        (repository / "nanovllm/__init__.py").write_text(text)
        git(repository, "add", ".")
        git(repository, "commit", "--quiet", "-m", text)
    monkeypatch.setattr(compare, "ROOT", repository)

    with checkout_of("HEAD~1") as path:
        assert (path / "nanovllm/__init__.py").read_text() == "old"
        assert len(git(repository, "worktree", "list").splitlines()) == 2

    assert not path.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert (repository / "nanovllm/__init__.py").read_text() == "new"
    with pytest.raises(SystemExit, match="worktree add"), checkout_of("no-such-commit"):
        pass


def test_a_folder_with_the_code_is_used_as_it_is():
    with checkout_of(str(ROOT)) as path:
        assert path == ROOT


def test_the_table_says_the_verdict_of_each_case():
    slower = Comparison("sampler", (Launch([1e-3] * 24, [1e-3] * 24, [1.2e-3] * 24),))

    _, first, second = table({"sampler": slower, "new case": "ImportError: no"})

    assert first.split() == [
        *("sampler", "1000.0", "1200.0", "us", "1.200", "(1.200-1.200)", "4.0%", "regression"),
    ]
    assert second == "new case  can't be compared: ImportError: no"
