"""How the command line says that something went wrong: one line on standard error, and a code."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from nanovllm.errors import ConfigError, NanoVLLMError, RequestError


@contextmanager
def errors_as_lines(debug: bool) -> Iterator[None]:
    """Turn the package's own errors into one line and an exit code."""
    try:
        yield
    except NanoVLLMError as error:
        if debug:
            raise
        _fail(str(error), 2 if isinstance(error, ConfigError | RequestError) else 1)
    except KeyboardInterrupt:
        if debug:
            raise
        _fail("interrupted", 1)
    except (OSError, UnicodeEncodeError) as error:  # a full disk, a closed pipe, an old encoding
        if debug or isinstance(error, BrokenPipeError):
            raise
        _fail(f"the output can't be written: {error}", 1)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"nanovllm: {message}", err=True)
    raise typer.Exit(code)
