"""Numbers as people read them: three significant digits and a unit that fits."""

import math

from telemetry.report.values import NotAvailable, Quantity, Unit, Value

_TIMES = ((60.0, "min", 1 / 60), (1.0, "s", 1.0), (1e-3, "ms", 1e3), (1e-6, "µs", 1e6))
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_PLAIN = {"W": "W", "MHz": "MHz", "celsius": "°C", "tokens/s": "tokens/s"}


def human(value: Value, unit: Unit) -> str:
    """Show a value with its unit; what is not available as "n/a (reason)"."""
    match value:
        case NotAvailable(reason):
            return f"n/a ({reason})"
        case str():
            return value
        case Quantity(amount, own_unit):
            return human(amount, own_unit)
    number, name = scaled(value, unit)
    return f"{number} {name}" if name else number


def short(value: Value, unit: Unit) -> str:
    """As `human`, with the reason of what is not available left out."""
    return "n/a" if isinstance(value, NotAvailable) else human(value, unit)


def tick(value: float, unit: Unit) -> str:
    """A round value on an axis, without the zeros that only claim precision."""
    number, name = scaled(value, unit)
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return f"{number} {name}" if name else number


def scaled(value: float, unit: Unit) -> tuple[str, str]:
    """A number and its unit, apart, so that they can be set apart."""
    match unit:
        case "s":
            return _time(value)
        case "bytes":
            return _size(value)
        case "ratio":
            return _percent(value), "%"
        case "J" | "J/token":
            if 0 < abs(value) < 1:
                return significant(value * 1e3), f"m{unit}"
            return significant(value), unit
        case "" | "count":
            return counted(value), ""
        case "tokens":
            return counted(value), "tokens"
    return significant(value), _PLAIN[unit]


def counted(value: float) -> str:
    """Every digit of a whole number, and three of another, with thousands set apart."""
    return f"{int(value):,}" if value == int(value) else significant(value)


def significant(value: float) -> str:
    """Three significant digits, or all before the point, with thousands set apart."""
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(_rounded(value)))
    decimals = max(0, 2 - magnitude)
    return f"{value:.2e}" if decimals > 8 else f"{value:,.{decimals}f}"


def _rounded(value: float) -> float:
    """What is left to the digits shown, which decide on the unit: 9.996 is 10.0, not 10.00."""
    return abs(float(f"{value:.2e}"))


def _percent(value: float) -> str:
    percent = value * 100
    if percent != 0 and abs(percent) < 0.01:
        return f"{percent:.1g}" if abs(percent) >= 0.001 else "<0.001" if percent > 0 else ">-0.001"
    if percent in (0, 100):
        return str(int(percent))
    return f"{percent:.{1 if abs(percent) >= 10 else 2}f}"


def time_unit(longest_s: float) -> tuple[str, float]:
    """The unit for an axis up to `longest_s`: its name and its length in seconds."""
    for smallest, name, factor in _TIMES:
        if longest_s >= (smallest if name != "min" else 600):
            return name, 1 / factor
    return "s", 1.0


def _time(value: float) -> tuple[str, str]:
    if value == 0:
        return "0", "s"
    for smallest, name, factor in _TIMES:
        # 600 s is easier to compare as minutes, 90 s as it is.
        if _rounded(value) >= (smallest if name != "min" else 600):
            return significant(value * factor), name
    return significant(value * 1e9), "ns"


def _size(value: float) -> tuple[str, str]:
    for size, name in _SIZES:
        if _rounded(value / size) >= 1:
            return significant(value / size), name
    return counted(value), "B"
