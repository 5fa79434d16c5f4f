"""`python -m nanovllm.kernels.report`: what each kernel takes of a device it needs not have."""

import argparse
import sys
from collections.abc import Iterator, Sequence

TARGETS = (80, 89, 90, 100, 120)
"""Compute capabilities that the kernels are built for."""


def report_lines(targets: Sequence[int] = TARGETS) -> Iterator[str]:
    """A table of what each kernel of a step of eight rows takes, one line per target."""
    from nanovllm.kernels.triton import aot
    from nanovllm.kernels.triton.shapes import SHAPES, step_launches

    yield (
        f"{'model':14} {'kernel':20} {'programs':>9} {'target':>7} {'registers':>9} "
        f"{'spilled':>8} {'shared':>8}"
    )
    for shape in SHAPES:
        for launch in step_launches(shape):
            programs = "x".join(map(str, launch.grid))
            for target in targets:
                taken = aot.resources(aot.compile_for(launch, target))
                yield (
                    f"{shape.name:14} {launch.kernel.name:20} {programs:>9} {f'sm_{target}':>7} "
                    f"{taken.num_registers:9} {taken.stack_bytes:6} B {taken.shared_bytes:6} B"
                )


def main() -> None:
    """Print the table for the targets that the command line names, or all."""
    parser = argparse.ArgumentParser(prog="python -m nanovllm.kernels.report", description=__doc__)
    parser.add_argument("targets", type=int, nargs="*", help="compute capabilities, such as 90")
    for line in report_lines(parser.parse_args().targets or TARGETS):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
