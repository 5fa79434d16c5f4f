"""Interrupts at any line, as Ctrl-C comes at any time."""

import sys


def interrupted_at(number, call, is_counted):
    """Call, and raise KeyboardInterrupt at a line of it; returns whether it came to that line.

    Args:
        number: Which one of the lines that count, from 1.
        call: What to interrupt.
        is_counted: From a code object, whether its lines count.
    """
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not is_counted(frame.f_code):
            return None
        if event == "line":
            count += 1
            if count == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
