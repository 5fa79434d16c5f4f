"""One side of a comparison: runs blocks of cases on the code of one checkout, as it is told.

    python bench/compare_worker.py CHECKOUT

Reads a JSON object per line, `{"case": name, "num_runs": n}`, and answers each with a line: the
CPU seconds of each run, or `{"error": ...}` where that code can't run the case. The cases
themselves come from the folder that this file is in, so that both sides do the same work.

CPU time of the process is measured, on one core: what a neighbour takes of the machine is not in
it, though what he leaves of the caches and of the memory bus is.
"""

import gc
import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

OUR_PACKAGES = ("nanovllm", "graphs", "telemetry")


def import_checkout(checkout: Path) -> None:
    """Import our packages from a checkout, and `bench` from where this file is."""
    sys.path[0] = str(checkout)  # in place of this file's folder
    for name in OUR_PACKAGES:
        if (checkout / name).is_dir():
            module = importlib.import_module(name)
            assert Path(str(module.__file__)).is_relative_to(checkout), (module, checkout)
    here = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        "bench", here / "__init__.py", submodule_search_locations=[str(here)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["bench"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def settle_down() -> None:
    """One core, one thread, no pauses."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.disable()


def run_block(case: Any, num_runs: int) -> list[float]:
    """CPU seconds of each run."""
    seconds = []
    for _ in range(num_runs):
        prepared = case.prepare()
        start_s = time.process_time()
        case.run(prepared)
        seconds.append(time.process_time() - start_s)
    return seconds


def main() -> None:
    """Answer until the input ends."""
    import_checkout(Path(sys.argv[1]).resolve())
    from bench.cases import CASES

    settle_down()
    answers = sys.stdout
    sys.stdout = sys.stderr  # nothing else may come between the answers
    cases: dict[str, Any] = {}
    for line in sys.stdin:
        question = json.loads(line)
        name = question["case"]
        answer: Any
        try:
            if name not in cases:
                cases.clear()  # only one at a time takes memory
                cases[name] = CASES[name]()
            answer = run_block(cases[name], question["num_runs"])
        except Exception as error:  # noqa: BLE001  # older code may lack anything that a case needs
            answer = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
