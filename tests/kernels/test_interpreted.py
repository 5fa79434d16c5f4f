"""The kernels' numbers without a GPU: the checks beside this file, on Triton's interpreter.

Triton chooses between compiler and interpreter when it is first imported, so that they run in a
process of their own, a file each. To run one by hand:
`TRITON_INTERPRET=1 python -m pytest tests/kernels/check_attention.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed", exc_type=ImportError)

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("path", sorted(FOLDER.glob("check_*.py")), ids=lambda path: path.stem)
def test_interpreted_kernels(path):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=FOLDER.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
