"""The errors of the engine: one small tree, so that a caller can catch as finely as it needs.

Every message says, in this order, what was given, what is allowed, and what to do.
"""


class NanoVLLMError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(NanoVLLMError, ValueError):
    """An engine option, or a combination of options, that cannot work. Raised at construction."""


class RequestError(NanoVLLMError, ValueError):
    """A request that cannot be served as given. Raised at admission; nothing was queued."""


class QueueFullError(RequestError):
    """A request that came while `max_queued_requests` were waiting: try again later."""


class WeightsError(NanoVLLMError, ValueError):
    """A checkpoint that cannot be loaded: missing, unexpected, truncated or unsupported parts."""


def list_some(names: list[str], limit: int = 8) -> str:
    """The first few of a list of names, and how many more there are: for messages."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
