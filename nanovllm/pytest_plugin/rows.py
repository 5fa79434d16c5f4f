"""Rows of our own in pytest-benchmark's session, so that its tables, files and gates have them.

There is no public way to add one. What is used here of its inside has been the same since 5.1; if
it is not there any more, `RowsUnavailableError` says so, and the figures are in `extra_info` only.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

ADDED_BY = "nanovllm"


class RowsUnavailableError(Exception):
    """This version of pytest-benchmark is another inside."""


@attrs.frozen
class _Source:
    """Stands where pytest-benchmark has the fixture that a row comes from."""

    name: str
    fullname: str
    group: str
    param: str | None
    params: dict[str, Any] | None
    extra_info: dict[str, Any]
    cprofile_stats: None = None
    has_error: bool = False


def num_rounds_of(benchmark: Any) -> int | None:
    """Rounds that a benchmark ran; None if it ran none, as with `--benchmark-disable`.

    Raises:
        RowsUnavailableError: It does not tell.
    """
    try:
        return None if benchmark.stats is None else int(benchmark.stats.stats.rounds)
    except AttributeError as error:
        raise RowsUnavailableError(str(error)) from error


def num_iterations_of(benchmark: Any) -> int:
    """Calls per round, of a benchmark that ran.

    Raises:
        RowsUnavailableError: It does not tell.
    """
    try:
        return int(benchmark.stats.iterations)
    except AttributeError as error:
        raise RowsUnavailableError(str(error)) from error


def add_row(
    config: pytest.Config,
    benchmark: Any,
    suffix: str,
    seconds: Sequence[float],
    extra_info: dict[str, Any],
) -> None:
    """Add a row `<test>:<suffix>` beside a test's own.

    Args:
        config: Of the run.
        benchmark: The test's fixture.
        suffix: Names the row. It is the row's group too, so that rows of one kind are compared
            with each other; behind the test's own group, if it has one.
        seconds: The row's samples; one at least.
        extra_info: Of the row.

    Raises:
        RowsUnavailableError: This version has no place for it.
    """
    try:
        from pytest_benchmark.stats import Metadata  # delayed: an extra

        sessions_rows: Any = config._benchmarksession.benchmarks  # type: ignore[attr-defined]
        row: Any = Metadata(
            _Source(
                name=f"{benchmark.name}:{suffix}",
                fullname=f"{benchmark.fullname}:{suffix}",
                group=f"{benchmark.group} {suffix}" if benchmark.group else suffix,
                param=benchmark.param,
                params=benchmark.params,
                extra_info=extra_info,
            ),
            iterations=1,
            options={"timer": "perf_counter", "added_by": ADDED_BY},
        )
        for value in seconds:
            row.update(value)
        row.as_dict(include_data=False, flat=True)["median"]  # what tables and gates will read
        sessions_rows.append(row)
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise RowsUnavailableError(f"{type(error).__name__}: {error}") from error
