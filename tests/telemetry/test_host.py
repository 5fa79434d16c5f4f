"""The process and its machine."""

import errno
import gc
import os
import sys
from pathlib import Path

import psutil
import pytest

from telemetry.providers.base import SensorUnavailableError, Tier, read_all
from telemetry.providers.gc_watch import EVENT_NS, GcWatch
from telemetry.providers.host import Statm, open_host
from telemetry.providers.host_memory import find_memory_limit
from telemetry.providers.rapl import Rapl

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture
def gc_watch():
    watch = GcWatch()
    yield watch
    watch.close()


@pytest.fixture
def host(gc_watch):
    provider = open_host(gc_watch)
    yield provider
    provider.close()


def test_figures_agree_with_psutil(host):
    values = read_all(host, [Tier.FAST, Tier.SLOW])
    memory = psutil.virtual_memory()

    assert values["host.rss_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert values["host.threads_count"] == psutil.Process().num_threads()
    assert values["host.memory_limit_bytes"] <= memory.total
    assert 0 < values["host.memory_used_bytes"] <= values["host.memory_limit_bytes"]
    assert values["host.available_bytes"] == pytest.approx(memory.available, rel=0.5)


def test_counters_never_fall(host):
    first = read_all(host, [Tier.FAST, Tier.SLOW])
    sum(range(10**5))
    second = read_all(host, [Tier.FAST, Tier.SLOW])

    for sensor in host.sensors():
        if sensor.kind == "counter" and sensor.available:
            assert second[sensor.name] >= first[sensor.name], sensor.name
    assert second["host.cpu_ns"] > first["host.cpu_ns"]


def test_facts_say_what_the_machine_is(host):
    facts = host.facts()

    assert facts["pid"] == os.getpid()
    assert facts["num_cpus"] == os.cpu_count()


class TestStatm:
    @linux_only
    def test_memory_that_is_touched_shows(self):
        statm = Statm()
        read = statm.probe(psutil.Process()).read
        before = read()[0]
        block = bytearray(64 << 20)
        after = read()[0]
        statm.close()
        statm.close()

        assert after - before > len(block) // 2

    def test_psutil_stands_in_where_the_file_is_missing(self, tmp_path):
        probe = Statm(str(tmp_path / "none")).probe(psutil.Process())
        rss, shared = probe.read()

        assert rss == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
        assert shared is None
        assert "psutil" in probe.sensors[0].source


class TestGcWatch:
    def test_collections_are_counted_and_timed(self, gc_watch):
        gc.collect()

        assert gc_watch.num_collections >= 1
        assert gc_watch.pause_ns > 0

    def test_long_pauses_are_kept_with_their_generation(self, gc_watch):
        keep = [[] for _ in range(50_000)]  # work for the collector
        gc.collect()
        pauses = gc_watch.pauses.take(99)

        assert all(duration >= EVENT_NS for _, duration, _ in pauses)
        assert 2 in [generation for _, _, generation in pauses]
        assert len(keep) == 50_000

    def test_watches_no_more_once_it_is_closed(self, gc_watch):
        num_callbacks = len(gc.callbacks)
        gc_watch.close()
        gc_watch.close()

        assert len(gc.callbacks) == num_callbacks - 1


class TestMemoryLimit:
    """Control groups as the system lays them out, in a folder of our own."""

    def group(self, folder, **files):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("_", ".", 1)).write_text(text)

    def found(self, tmp_path, line):
        (tmp_path / "cgroup").write_text(line)
        return find_memory_limit(tmp_path / "cgroup", tmp_path / "fs")

    def test_version_2_gives_the_working_set(self, tmp_path):
        self.group(
            tmp_path / "fs" / "app",
            memory_max="1048576\n",
            memory_current="900000\n",
            memory_stat="anon 500\ninactive_file 300000\n",
        )
        limit = self.found(tmp_path, "0::/app\n")

        assert (limit.limit_bytes, limit.scope) == (1048576, "control group")
        assert limit.read_used() == 600000

    def test_version_1_likewise(self, tmp_path):
        folder = tmp_path / "fs" / "memory" / "app"
        folder.mkdir(parents=True)
        (folder / "memory.limit_in_bytes").write_text("2097152")
        (folder / "memory.usage_in_bytes").write_text("1000")
        (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 400\n")
        limit = self.found(tmp_path, "9:cpu:/x\n4:memory,hugetlb:/app\n0::/\n")

        assert limit.limit_bytes == 2097152
        assert limit.read_used() == 600

    def test_the_tightest_group_around_counts(self, tmp_path):
        self.group(tmp_path / "fs" / "pod", memory_max="5000")
        self.group(tmp_path / "fs" / "pod" / "app", memory_max="9000")

        assert self.found(tmp_path, "0::/pod/app\n").limit_bytes == 5000

    def test_a_path_of_the_host_falls_back_to_the_containers_own_group(self, tmp_path):
        self.group(tmp_path / "fs", memory_max="7000")

        assert self.found(tmp_path, "0::/not/here\n").limit_bytes == 7000

    @pytest.mark.parametrize("text", ["max", "9223372036854771712", str(1 << 59)])
    def test_no_limit_or_one_above_the_machine_is_the_machine(self, tmp_path, text):
        self.group(tmp_path / "fs", memory_max=text)
        limit = self.found(tmp_path, "0::/\n")

        assert limit.scope == "machine"
        assert limit.limit_bytes == psutil.virtual_memory().total
        assert 0 < limit.read_used() < limit.limit_bytes

    def test_another_system_than_linux_is_the_machine(self, tmp_path):
        assert find_memory_limit(tmp_path / "none", tmp_path).scope == "machine"


class TestRapl:
    def package(self, root, number, uj, range_uj=1000):
        zone = root / f"intel-rapl:{number}"
        zone.mkdir(exist_ok=True)
        (zone / "energy_uj").write_text(str(uj))
        (zone / "max_energy_range_uj").write_text(str(range_uj))
        return zone

    def test_sums_packages_and_leaves_out_their_parts(self, tmp_path):
        for number in (0, 1, "0:0"):
            self.package(tmp_path, number, 100)
        rapl = Rapl(tmp_path)
        assert rapl.read() == (0,)
        for number in (0, 1, "0:0"):
            self.package(tmp_path, number, 150)

        assert rapl.read() == (100,)

    def test_a_counter_that_starts_over_goes_on(self, tmp_path):
        self.package(tmp_path, 0, 990)
        rapl = Rapl(tmp_path)
        rapl.read()
        self.package(tmp_path, 0, 20)

        assert rapl.read() == (30,)

    def test_none_is_a_reason(self, tmp_path):
        with pytest.raises(SensorUnavailableError, match="RAPL"):
            Rapl(tmp_path).read()

    def test_no_right_to_read_is_a_reason(self, tmp_path, monkeypatch):
        zone = self.package(tmp_path, 0, 100)
        rapl = Rapl(tmp_path)
        rapl.read()

        def refuse(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_text", refuse)  # root may read everything
        with pytest.raises(SensorUnavailableError, match="root only") as error:
            rapl.read()
        assert str(zone) in str(error.value)
