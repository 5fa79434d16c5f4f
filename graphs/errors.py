"""The errors of this library. Each says what was given, what is allowed, and what to do."""


class GraphsError(Exception):
    """Base of every error that this package raises on purpose."""


class PlanError(GraphsError, ValueError):
    """Bucket sizes, a histogram or a budget that no plan can be made of."""


class LayoutError(GraphsError, ValueError):
    """Fields that cannot be laid out, or values that do not fit the layout."""


class StaticsError(GraphsError, ValueError):
    """A static buffer that a program cannot be captured over."""


class RingError(GraphsError, RuntimeError):
    """A staging slot used out of turn: its contents may still be on their way to the device."""


class SessionError(GraphsError, RuntimeError):
    """A capture session used out of order: after its end, or small buckets before large ones."""


class CaptureError(GraphsError, RuntimeError):
    """A program that cannot be captured."""
