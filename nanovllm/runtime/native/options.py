"""How kernels are compiled."""

from typing import Any

OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    # Nobody calls these from Python.
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}

INLINE: dict[str, Any] = {**OPTIONS, "inline": "always"}
"""For what is called from one place. Every compiled function is optimised once for itself and again
in each that calls it, and so on upwards: a deep tree of calls would compile for a minute."""
