import functools
import os
import subprocess
import sys

import psutil
import pytest

from nanovllm.runtime import threads
from nanovllm.runtime.threads import usable_threads

CGROUP_QUOTA = threads._cgroup_quota


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Set up a machine: CPUs that are allowed, physical cores, and files of its control group."""

    def set_up(*, allowed=64, cores=64, files=()):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)), raising=False)
        monkeypatch.setattr(psutil, "cpu_count", lambda logical: allowed if logical else cores)
        root = tmp_path / "cgroup"
        for name, content in dict(files).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        monkeypatch.setattr(threads, "_cgroup_quota", functools.partial(CGROUP_QUOTA, root))

    return set_up


def version_1(quota, period="100000\n"):
    return {"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    ("allowed", "cores", "expected"),
    [
        (64, 64, 64),
        (64, 32, 32),  # two threads a core
        (3, 64, 3),  # most CPUs are another's
        (3, 2, 2),
        (1, 64, 1),
        (5, None, 5),  # the system does not tell its cores
    ],
)
def test_are_as_many_as_allowed_cpus_but_not_more_than_cores(machine, allowed, cores, expected):
    machine(allowed=allowed, cores=cores)

    assert usable_threads() == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("max 100000\n", 64),
        ("150000 100000\n", 2),  # one and a half: the second is idle half the time
        ("100000 100000\n", 1),
        ("100001 100000\n", 2),
        ("10000 100000\n", 1),
        ("6400000 50000", 64),  # more than there are
        ("25000 10000", 3),
    ],
)
def test_are_no_more_than_the_control_group_grants(machine, content, expected):
    machine(files={"cpu.max": content})

    assert usable_threads() == expected


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("-1\n", 64), ("150000\n", 2), ("100000", 1), ("1000\n", 1), ("800000\n", 8)],
)
def test_are_no_more_than_a_control_group_of_version_1_grants(machine, quota, expected):
    machine(files=version_1(quota))

    assert usable_threads() == expected


def test_a_grant_of_more_than_the_allowed_cpus_is_of_no_use(machine):
    machine(allowed=2, files={"cpu.max": "400000 100000"})

    assert usable_threads() == 2


def test_of_both_versions_the_newer_counts(machine):
    machine(files={"cpu.max": "200000 100000", **version_1("400000")})

    assert usable_threads() == 2


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"cpu.max": ""},
        {"cpu.max": "max"},
        {"cpu.max": "words words"},
        {"cpu.max": "100000 0"},
        {"cpu/cpu.cfs_quota_us": "100000"},
        version_1(""),
        version_1("100000", ""),
        version_1("100000", "0"),
        version_1("words"),
    ],
    ids=repr,
)
def test_files_that_are_absent_or_say_nothing_are_no_limit(machine, files):
    machine(allowed=5, files=files)

    assert usable_threads() == 5


def test_where_nobody_tells_which_cpus_are_allowed_all_are(machine, monkeypatch):
    machine()
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)

    for count, expected in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert usable_threads() == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds processes")
def test_a_process_that_is_bound_to_one_cpu_uses_one_thread():
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from nanovllm.runtime.threads import usable_threads; print(usable_threads())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )

    assert (done.stdout, done.stderr) == ("1\n", "")
