"""One run on one GPU that says whether captured decode steps are right there, and how fast.

    python -m bench.gpu_check                      # at most 8 minutes; random Qwen3-0.6B weights
    python -m bench.gpu_check --device cpu         # the same code, small, in under a minute

Needs torch, Triton and this package, no network. Every stage has its own time and may fail by
itself: the others still run. Results are written to a file line by line as they come (`--json`), a
table follows at the end, and the exit code is the verdict of parity: 0 if every token of a
captured step was that of the same step run eagerly, and every kernel agrees with its reference.
"""

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import attrs
import torch

from bench.gpu_kernels import kernels
from bench.gpu_latency import first_tokens, latency
from bench.gpu_stages import capture, parity, probes
from bench.gpu_world import World, make_world
from nanovllm.facts import package_version

Stage = Callable[[World, float], Iterator[dict[str, Any]]]
"""Yields results; the number is the time on the clock at which it should be done."""

BUDGET_S = 480.0

STAGES: dict[str, tuple[float, Stage]] = {
    "probes": (15, probes),
    "kernels": (60, kernels),
    "capture": (60, capture),
    "parity": (90, parity),
    "latency": (150, latency),
    "first_tokens": (30, first_tokens),
}
"""With the seconds that each is given."""

VERDICT = ("kernels", "parity")
"""Stages that decide on the exit code."""


@attrs.define
class Log:
    """Writes results as JSON lines, at once, and keeps them."""

    file: TextIO | None
    rows: list[dict[str, Any]] = attrs.field(factory=list)

    def __call__(self, **row: Any) -> None:
        """Write one."""
        self.rows.append(row)
        line = json.dumps(row, default=str)
        print(line, flush=True)
        if self.file is not None:
            self.file.write(line + "\n")
            self.file.flush()


def environment(device: torch.device) -> dict[str, Any]:
    """What this machine is."""
    facts: dict[str, Any] = {
        "nanovllm": package_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "free_gib": round(free_bytes / 2**30, 1),
            "total_gib": round(total_bytes / 2**30, 1),
        }
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError as error:
        facts["triton"] = f"none ({error})"
    return facts


def run(device: torch.device, log: Log, only: list[str] | None) -> bool:
    """Every stage; returns whether all that decides was right."""
    began_s = time.perf_counter()
    log(stage="environment", **environment(device))
    start_s = time.perf_counter()
    world = make_world(device)
    log(stage="build", seconds=time.perf_counter() - start_s, **world.facts())
    failed: set[str] = set()
    for name, (seconds, stage) in STAGES.items():
        if only and name not in only:
            continue
        start_s = time.perf_counter()
        left_s = BUDGET_S - (start_s - began_s)
        if left_s <= 0:
            log(stage=name, skipped="no time left")
            failed.add(name)
            continue
        try:
            for row in stage(world, start_s + min(seconds, left_s)):
                log(stage=name, **row)
                if row.get("ok") is False:
                    failed.add(name)
        except Exception as error:  # noqa: BLE001  # the other stages still say something
            failed.add(name)
            log(stage=name, ok=False, error=f"{type(error).__name__}: {error}")
            traceback.print_exc(file=sys.stderr)
        log(stage=name, seconds=round(time.perf_counter() - start_s, 2))
    right = not failed.intersection(VERDICT)
    log(stage="verdict", ok=right, failed=sorted(failed))
    return right


def table(rows: list[dict[str, Any]]) -> str:
    """What came out, a line for each result."""
    lines = []
    for row in rows:
        facts = {key: value for key, value in row.items() if key != "stage"}
        shown = ", ".join(f"{key} {_short(value)}" for key, value in facts.items())
        lines.append(f"{row['stage']:12s} {shown}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="a file for the results, line by line")
    parser.add_argument("--only", action="append", choices=list(STAGES), help="these stages only")
    args = parser.parse_args()
    file = None if args.json is None else args.json.open("w", encoding="utf-8")
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    log = Log(file)
    right = run(device, log, args.only)
    print("\n" + table(log.rows))
    if file is not None:
        file.close()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
