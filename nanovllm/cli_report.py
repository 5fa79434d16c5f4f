"""The command line's part about runs: `nanovllm report`, `top`, and `generate --telemetry`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanovllm.cli_errors import errors_as_lines
from nanovllm.errors import NanoVLLMError, RequestError
from nanovllm.llm import LLM

if TYPE_CHECKING:
    from telemetry import Run

RunPath = Annotated[Path, typer.Argument(help="A run, as `generate --telemetry` writes it.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def report(
    run: RunPath,
    html: Annotated[Path | None, typer.Option(help="Write a page here.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures here, for gates.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write a trace for ui.perfetto.dev here.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Say where the bytes, the milliseconds and the joules of a run went."""
    with errors_as_lines(debug):
        # Delayed: only this command needs it.
        from telemetry.report import build_report
        from telemetry.sinks.perfetto import write_trace

        recorded_run = _read(run)
        with _values_as_written(run):
            whole = build_report(recorded_run)
            if html is None and json is None and perfetto is None:
                whole.to_terminal()
            if html is not None:
                whole.to_html(html)
                typer.echo(f"wrote {html}", err=True)
            if json is not None:
                whole.to_json(json)
                typer.echo(f"wrote {json}", err=True)
            if perfetto is not None:
                trace = write_trace(recorded_run, perfetto)
                cut = f"; {trace.num_cut:,} more were cut" if trace.num_cut else ""
                typer.echo(f"wrote {perfetto}, {trace.num_events:,} events{cut}", err=True)


def top(
    run: RunPath,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    debug: Debug = False,
) -> None:
    """Watch the last minute of a run that goes on. Ctrl-C ends it."""
    with errors_as_lines(debug):
        # Delayed: only this command needs it.
        from rich.console import Console

        from telemetry import TelemetryError
        from telemetry.report.live import Tail, frame, render, watch

        tail = Tail(run)
        try:
            if once:
                Console().print(render(frame(tail.run())))
            else:
                watch(tail.run)
        except (OSError, TelemetryError) as error:
            raise _unreadable(run, error) from error
        except KeyboardInterrupt:
            return  # how one stops watching


def check_run_path(path: Path | None) -> None:
    """Refuse a path that no run can be written to, before a model is loaded.

    Raises:
        RequestError: Its folder is not there, or it is a folder itself.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise RequestError(
            f"`--telemetry` is {str(path)!r}; it must be a file in a folder that exists."
        )


@contextmanager
def recorded(llm: LLM, path: Path | None) -> Iterator[None]:
    """Record what runs inside to a file; nothing without a path."""
    if path is None:
        yield
        return
    # Delayed: only for those who record.
    from telemetry import Recorder, TelemetryError

    try:
        with Recorder(llm, path=path):
            yield
    except TelemetryError as error:
        raise NanoVLLMError(f"The run can't be recorded: {error}") from error


def _read(path: Path) -> "Run":
    # Delayed: only for those who report.
    from telemetry import TelemetryError, read_run

    try:
        with _values_as_written(path):
            return read_run(path)
    except (OSError, TelemetryError) as error:
        raise _unreadable(path, error) from error


@contextmanager
def _values_as_written(path: Path) -> Iterator[None]:
    """A file whose lines are those of a run, but hold values that none has, is a wrong file."""
    # Delayed: only for those who report.
    from telemetry import TelemetryError

    try:
        yield
    except TelemetryError:
        raise  # it says what is wrong
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise RequestError(
            f"{str(path)!r} holds values that no recorded run has ({type(error).__name__}: "
            f"{error}); it was changed since it was recorded."
        ) from error


def _unreadable(path: Path, error: Exception) -> RequestError:
    if isinstance(error, OSError):
        return RequestError(f"{str(path)!r} can't be read: {error.strerror or error}.")
    return RequestError(str(error))
