"""How much memory the process may use: its control group's limit or the machine's memory."""

from collections.abc import Callable
from pathlib import Path

import attrs
import psutil

# Version 1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT = 1 << 60


@attrs.frozen
class MemoryLimit:
    """The memory that the process shares.

    Attributes:
        limit_bytes: All of it.
        scope: "control group" or "machine".
        source: Where the limit is written.
        read_used: Bytes of it that can not be reclaimed, as of now.
        used_source: Where these come from.
    """

    limit_bytes: int
    scope: str
    source: str
    read_used: Callable[[], int]
    used_source: str


def find_memory_limit(
    proc_cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> MemoryLimit:
    """The tightest limit that is written, if it is below the machine's memory."""
    total = psutil.virtual_memory().total
    found = _tightest(proc_cgroup, root)
    if found is None or found[0] >= total:
        return MemoryLimit(
            total,
            "machine",
            "psutil.virtual_memory().total",
            _machine_used,
            "psutil.virtual_memory(): total - available",
        )
    limit, folder, is_v2 = found
    name = "memory.max" if is_v2 else "memory.limit_in_bytes"
    current = folder / ("memory.current" if is_v2 else "memory.usage_in_bytes")
    key = "inactive_file" if is_v2 else "total_inactive_file"
    return MemoryLimit(
        limit,
        "control group",
        str(folder / name),
        lambda: _group_used(current, folder / "memory.stat", key),
        f"{current} - {key} of memory.stat",
    )


def _machine_used() -> int:
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def _group_used(current: Path, stat: Path, key: str) -> int:
    """What the group holds less its file pages that were not used lately."""
    reclaimable = 0
    for line in stat.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            reclaimable = int(value)
    return max(0, int(current.read_text()) - reclaimable)


def _tightest(proc_cgroup: Path, root: Path) -> tuple[int, Path, bool] | None:
    """(limit, folder of its group, whether of version 2) of the tightest group around us."""
    limits = [
        (limit, folder, is_v2)
        for folder, is_v2 in _groups(proc_cgroup, root)
        if (limit := _limit(folder, is_v2)) is not None
    ]
    return min(limits, default=None, key=lambda found: found[0])


def _groups(proc_cgroup: Path, root: Path) -> list[tuple[Path, bool]]:
    """Folders of the process's memory group and of those around it, by version."""
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:
        return []  # not Linux
    groups = []
    for line in lines:
        # "0::/path" is version 2, "4:memory:/path" version 1.
        _, controllers, path = line.split(":", 2)
        is_v2 = controllers == ""
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        top = root if is_v2 else root / "memory"
        group = top / path.lstrip("/")
        # A limit counts for all groups below it. In a container the path may be one of the host,
        # which is not there: then the top is the container's own group.
        groups += [(folder, is_v2) for folder in (group, *group.parents) if _inside(folder, top)]
    return groups


def _inside(folder: Path, top: Path) -> bool:
    return folder == top or top in folder.parents


def _limit(folder: Path, is_v2: bool) -> int | None:
    try:
        text = (folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).read_text().strip()
    except OSError:
        return None
    if text == "max" or int(text) >= _NO_LIMIT:
        return None
    return int(text)
