"""Golden reports: what the report says of runs that are kept, figure by figure.

`cpu.jsonl` was recorded once: smollm2-135m on two cores, eight prompts in two windows. The run on
a GPU is simulated. Write the reports anew with `python -m tests.telemetry.report.golden_reports`,
and read the difference.
"""

import json
import math
from pathlib import Path

from telemetry import read_run
from telemetry.report import build_report
from telemetry.report.data import to_data
from tests.telemetry.report.simulated import simulated_run

FOLDER = Path(__file__).parent / "golden"


def runs():
    """Name of a golden report -> its run."""
    return {
        "cpu": read_run(FOLDER / "cpu.jsonl"),
        "gpu": simulated_run(seconds=6.0, load=12.0),
    }


def report_data(run):
    """A report as it is compared: floats to the digits that every machine agrees on."""
    return _rounded(to_data(build_report(run)))


def _rounded(value):
    match value:
        case float() if math.isfinite(value):
            return float(f"{value:.9g}")
        case dict():
            return {key: _rounded(item) for key, item in value.items()}
        case list() | tuple():
            return [_rounded(item) for item in value]
    return value


def main():
    for name, run in runs().items():
        text = json.dumps(report_data(run), indent=1, ensure_ascii=False)
        (FOLDER / f"{name}.report.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
