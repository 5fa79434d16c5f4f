"""Kernels with a fault put in: the source of a module with one piece of its text replaced."""

import importlib.util
import inspect


def with_fault(module, folder, *replacements):
    """Import a copy of a module, written to `folder`, in which each `(old, new)` is replaced."""
    text = inspect.getsource(module)
    for old, new in replacements:
        assert text.count(old) == 1, f"{module.__name__} has {text.count(old)} of {old!r}"
        text = text.replace(old, new)
    # A name of its own, as Python remembers the lines of a file.
    path = folder / f"faulty_{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
