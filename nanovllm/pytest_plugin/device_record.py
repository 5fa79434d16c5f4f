"""What a `telemetry` recorder adds to a test's figures: energy, and time that was held back."""

from typing import TYPE_CHECKING, Any, Literal, cast

from nanovllm.llm import LLM

if TYPE_CHECKING:
    from telemetry import Recorder


def recorder_for(engine: LLM, *, mode: str) -> "Recorder":
    """A recorder that keeps its run in memory; it begins when it is entered."""
    from telemetry import Recorder  # delayed: only for those who record

    return Recorder(engine, mode=cast(Literal["off", "edges", "live"], mode))


def device_data(recorder: "Recorder") -> dict[str, Any]:
    """Figures of a run that has ended; None, and the reason beside it, where there is none."""
    figures = recorder.report().figures
    data: dict[str, Any] = {"telemetry_mode": recorder.mode}
    for name, key in {
        "joules": "energy_j",
        "joules_per_token": "energy_j_per_token",
        "throttled_s": "throttled_s",
    }.items():
        value: Any = figures[key].value
        if isinstance(value, int | float):
            data[name] = value
        else:
            data[name] = None
            data[f"{name}_missing"] = value.reason
    return data


def device_warnings(data: dict[str, Any]) -> list[str]:
    """What a reader of the figures should know."""
    if data.get("throttled_s"):
        return [f"throttled: the device was held back for {data['throttled_s']:.3f} s"]
    return []
