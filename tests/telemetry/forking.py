"""Runs something in a forked child."""

import os
import sys
import warnings

import pytest

needs_fork = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork")


def is_true_in_a_child(check):
    """Whether `check()` is true in a child that is forked here."""
    with warnings.catch_warnings():
        # Python 3.12 and later warn of forks beside threads: these are what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        passed = False
        try:
            passed = bool(check())
        finally:
            os._exit(0 if passed else 1)
    return os.waitpid(child, 0)[1] == 0
