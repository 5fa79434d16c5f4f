"""What this library raises for what a user can get wrong or has to know."""


class TelemetryError(ValueError):
    """Base of every error of `telemetry`."""


class RunFileError(TelemetryError):
    """A file is not a run, or is broken before its last line."""


class SchemaVersionError(RunFileError):
    """A run was written in another version of the format."""


class DeviceLostError(TelemetryError):
    """The device fell off the bus or needs a reset; nothing was measured since."""
