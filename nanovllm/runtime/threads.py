"""How many threads this process may keep busy: its affinity, its cgroup, and whole cores."""

import math
import os
from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_threads() -> int:
    """Threads that may run at once: allowed CPUs, no more than cores, no more than the quota."""
    allowed = _allowed_cpus()
    # Two threads of one core share its arithmetic, and decode is bound by memory anyway.
    cores = psutil.cpu_count(logical=False) or allowed
    quota = _cgroup_quota()
    return max(1, min(allowed, cores, allowed if quota is None else math.ceil(quota)))


def _allowed_cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1


def _cgroup_quota(root: Path = _CGROUP_ROOT) -> float | None:
    """CPUs that the control group grants, None without a limit. Versions 2 and 1 of cgroups."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota in ("max", "-1"):
        return None
    try:
        return int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # some sandboxes have the files but nothing in them
        return None
