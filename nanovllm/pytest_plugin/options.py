"""Which engine the `llm` fixture makes: from the command line, the ini file, or the test suite."""

import ast
from pathlib import Path
from typing import Any

import pytest

TELEMETRY_MODES = ("off", "edges", "live")


def add_options(parser: pytest.Parser) -> None:
    """The plugin's command line and ini file."""
    group = parser.getgroup("llm", "latency of a language model (nanovllm)")
    group.addoption("--llm-model", metavar="MODEL", help="What the `llm` fixture loads.")
    group.addoption(
        "--llm-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="An option of the engine, such as dtype=float32. May be repeated.",
    )
    group.addoption(
        "--llm-telemetry",
        choices=TELEMETRY_MODES,
        help="Record device and host beside each test that uses `llm`: at its edges or all along.",
    )
    group.addoption(
        "--llm-report",
        type=Path,
        metavar="PATH",
        help="Write an HTML report of everything that the `llm` fixture's engine did.",
    )
    parser.addini("llm_model", "What the `llm` fixture loads.")
    parser.addini("llm_options", "Options of its engine, NAME=VALUE, one a line.", "linelist")
    parser.addini("llm_telemetry", "As --llm-telemetry.", default="off")


def engine_config(config: pytest.Config) -> dict[str, Any]:
    """Model and options as given: the command line counts more than the ini file.

    Raises:
        pytest.UsageError: An option is not NAME=VALUE.
    """
    chosen: dict[str, Any] = {}
    for line in [*config.getini("llm_options"), *config.getoption("--llm-option")]:
        name, equals, value = line.partition("=")
        if not equals or not name.strip().isidentifier():
            raise pytest.UsageError(f"{line!r} is no option of an engine; write NAME=VALUE.")
        chosen[name.strip()] = _value(value.strip())
    model = config.getoption("--llm-model") or config.getini("llm_model")
    return {"model": model, **chosen} if model else chosen


def telemetry_mode(config: pytest.Config) -> str:
    """One of `TELEMETRY_MODES`.

    Raises:
        pytest.UsageError: The ini file says something else.
    """
    mode = str(config.getoption("--llm-telemetry") or config.getini("llm_telemetry"))
    if mode not in TELEMETRY_MODES:
        raise pytest.UsageError(
            f"`llm_telemetry` is {mode!r} but must be one of {', '.join(TELEMETRY_MODES)}."
        )
    return mode


def report_path(config: pytest.Config) -> Path | None:
    """Where the HTML report goes.

    Raises:
        pytest.UsageError: It can't go there.
    """
    path: Path | None = config.getoption("--llm-report")
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise pytest.UsageError(
            f"`--llm-report` is {str(path)!r} but must be a file in a folder that exists."
        )
    return path


def _value(text: str) -> Any:
    """A Python literal, or else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
