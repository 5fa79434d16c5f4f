"""Two versions of the code against each other, in one run on one machine.

    python -m bench.compare BASE             # a commit, or a folder with a checkout
    python -m bench.compare BASE --only "sampler, greedy" --launches 5

The head is this working tree. What is compared is the CPU time of the cases of `bench.cases`, on
one core: see `bench.compare_stats` for how, and for what the verdicts mean. Exit code 1 if there
is a regression.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.cases import CASES
from bench.compare_stats import Comparison, Launch, Verdict

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).resolve().with_name("compare_worker.py")

NUM_LAUNCHES = 3
NUM_BLOCKS = 24
BLOCK_S = 0.010
"""Short, so that all sides get their turn while the machine is in the same mood."""

MAX_RUNS = 40
WARMUP_RUNS = 3


class CaseError(Exception):
    """A side can't run a case."""


class Side:
    """A process on the code of one checkout."""

    def __init__(self, checkout: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": "0",  # the order of sets must not differ between sides
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(checkout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, case: str, num_runs: int) -> list[float]:
        """CPU seconds of each run of a block.

        Raises:
            CaseError: The code of this side can't run it.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"case": case, "num_runs": num_runs}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker ended with code {self._process.wait()}")
        answer: Any = json.loads(line)
        if isinstance(answer, dict):
            raise CaseError(answer["error"])
        return list(answer)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def compare(
    base: Path, head: Path, cases: Sequence[str], *, num_launches: int
) -> dict[str, Comparison | str]:
    """Compare two checkouts.

    Returns:
        By case, a comparison, or why there is none.
    """
    results: dict[str, Comparison | str] = {}
    for launch in range(2 * num_launches):
        # The second half is for those that the first has not settled.
        open_cases = [case for case in cases if _is_open(results.get(case), launch, num_launches)]
        if not open_cases:
            break
        with _sides(base, head) as sides:
            for case in open_cases:
                earlier = results.get(case)
                try:
                    measured = measure(sides, case, reverse=launch % 2 == 1)
                except CaseError as error:
                    results[case] = str(error)
                    continue
                launches = earlier.launches if isinstance(earlier, Comparison) else ()
                results[case] = Comparison(case, (*launches, measured))
    return results


def measure(sides: Sequence[Side], case: str, *, reverse: bool) -> Launch:
    """Blocks of a case on every side in turn: base, base again, head.

    Raises:
        CaseError: A side can't run it.
    """
    for side in sides:
        side.run(case, WARMUP_RUNS)
    once_s = min(min(side.run(case, WARMUP_RUNS)) for side in sides)
    num_runs = max(2, min(MAX_RUNS, int(BLOCK_S / max(once_s, 1e-6))))
    blocks: list[list[float]] = [[] for _ in sides]
    for block in range(NUM_BLOCKS):
        order = range(len(sides))
        # Forth and back, so that whoever comes first comes last the next time.
        for place in reversed(order) if (block % 2 == 1) != reverse else order:
            # The least of a block, as nothing makes code faster than it is.
            blocks[place].append(min(sides[place].run(case, num_runs)))
    return Launch(*blocks)


def table(results: dict[str, Comparison | str]) -> list[str]:
    """The comparison for people."""
    width = max(map(len, results))
    lines = [
        f"{'CPU time, least of all runs':{width}}      base       head   ratio  (launches)"
        "       noise  verdict"
    ]
    for case, one in results.items():
        if isinstance(one, str):
            lines.append(f"{case:{width}}  {Verdict.UNKNOWN.value}: {one}")
            continue
        estimates = [launch.estimate for launch in one.launches]
        spread = f"({min(estimates):.3f}-{max(estimates):.3f})"
        lines.append(
            f"{case:{width}}  {one.base_s * 1e6:8.1f}   {one.head_s * 1e6:8.1f} us  "
            f"{one.ratio:.3f}  {spread:15s}  {one.floor:5.1%}  {one.verdict.value}"
        )
    return lines


@contextmanager
def checkout_of(base: str) -> Iterator[Path]:
    """A folder with the code of a commit, gone afterwards; or the folder that was named."""
    if (Path(base) / "nanovllm" / "__init__.py").is_file():
        yield Path(base).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="nanovllm-base-") as folder:
        path = Path(folder) / "base"
        _git("worktree", "add", "--detach", "--quiet", str(path), base)
        try:
            yield path
        finally:
            _git("worktree", "remove", "--force", str(path))


def main() -> None:
    """Compare, print the table, and fail on a regression."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("base", help="a commit, or a folder with a checkout")
    parser.add_argument("--head", type=Path, default=ROOT, help="default: this working tree")
    parser.add_argument("--only", action="append", choices=list(CASES), metavar="CASE")
    parser.add_argument("--launches", type=int, default=NUM_LAUNCHES)
    options = parser.parse_args()
    with checkout_of(options.base) as base:
        results = compare(
            base, options.head.resolve(), options.only or list(CASES), num_launches=options.launches
        )
    print("\n".join(table(results)))
    verdicts = [one.verdict for one in results.values() if isinstance(one, Comparison)]
    sys.exit(1 if Verdict.REGRESSION in verdicts else 0)


@contextmanager
def _sides(base: Path, head: Path) -> Iterator[list[Side]]:
    with ExitStack() as stack:
        sides = [Side(base), Side(base), Side(head)]
        for side in sides:
            stack.callback(side.close)
        yield sides


def _is_open(result: Comparison | str | None, launch: int, num_launches: int) -> bool:
    if isinstance(result, str):
        return False
    return launch < num_launches or (result is not None and not result.is_settled)


def _git(*arguments: str) -> None:
    run = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    if run.returncode:
        sys.exit(f"git {' '.join(arguments)}: {run.stderr.strip()}")


if __name__ == "__main__":
    main()
