"""What measuring changes, measured."""

import math
from collections.abc import Callable, Sequence

from telemetry.errors import TelemetryError
from telemetry.recorder import Recorder
from telemetry.records import ObserverEffect


def measure_observer_effect(
    run_block: Callable[[], Sequence[float]],
    rec_factory: Callable[[], Recorder],
    *,
    blocks: int = 10,
) -> ObserverEffect:
    """Run one workload in blocks with the recorder paused and live in turn, and compare.

    Blocks come in the order off, live, live, off and so on, so that a machine that slowly heats up
    or cools down favours neither. One more block before them warms up. The result is written into
    the recorder's run as well.

    Args:
        run_block: Runs a block, always the same, and gives its latencies in seconds, such as the
            gaps between tokens.
        rec_factory: Makes the recorder, in mode "live" and not yet started.
        blocks: Blocks in total, an even number.

    Raises:
        TelemetryError: `blocks` is not usable, or a block gave no latencies.
    """
    if blocks < 2 or blocks % 2:
        raise TelemetryError(f"`blocks` is {blocks}; give an even number, of 2 or more.")
    latencies: dict[bool, list[float]] = {False: [], True: []}
    in_call_ns = 0
    with rec_factory() as recorder:
        if recorder.mode != "live":
            raise TelemetryError(
                f"The recorder's mode is {recorder.mode!r}; the effect of mode 'live' is measured."
            )
        recorder.pause()
        run_block()
        for block in range(blocks):
            is_live = block % 4 in (1, 2)
            before = recorder.overhead().in_call_ns
            if is_live:
                recorder.resume()
            found = run_block()
            if is_live:
                recorder.pause()
            in_call_ns += recorder.overhead().in_call_ns - before
            if not found:
                raise TelemetryError(f"`run_block` gave no latencies in block {block}.")
            latencies[is_live] += found
        recorder.resume()
        off, live = (sorted(round(s * 1e9) for s in latencies[key]) for key in (False, True))
        effect = ObserverEffect(
            num_blocks=blocks,
            num_off=len(off),
            num_live=len(live),
            p50_off_ns=_rank(off, 0.5),
            p50_live_ns=_rank(live, 0.5),
            p99_off_ns=_rank(off, 0.99),
            p99_live_ns=_rank(live, 0.99),
            max_off_ns=off[-1],
            max_live_ns=live[-1],
            in_call_ns=in_call_ns,
            worst_tick_ns=recorder.overhead().worst_tick_ns,
        )
        recorder.record_observer_effect(effect)
    return effect


def _rank(ordered: Sequence[int], share: float) -> int:
    """The smallest value that at least this share of all does not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]
