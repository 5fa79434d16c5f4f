"""`StepTimes`: how long steps took, measured as they ran, to tell how long others will take."""

from collections import deque

import attrs
import numpy as np

NUM_KEPT = 128
"""Newest steps kept of each kind: enough for a fit, few enough to follow a machine that changes."""

OUTLIER_SPREADS = 4.0
"""Steps further from the fit than this many typical distances (the median one) are left out."""

EXACT_SHARE = 0.02
"""But none within this share of the median step."""

ROUNDING_S = 1e-12
"""What a slope of zero may come out as, below it."""


@attrs.frozen
class StepCost:
    """Seconds of a step as a function of what it computes: a straight line.

    Attributes:
        base_s: What every step takes.
        decode_s: What each sequence that decodes adds.
        prefill_s: What each prompt position adds.
    """

    base_s: float
    decode_s: float
    prefill_s: float

    def __call__(self, num_decode_tokens: int, num_prefill_tokens: int) -> float:
        """Seconds of such a step."""
        return self.base_s + self.decode_s * num_decode_tokens + self.prefill_s * num_prefill_tokens


class StepTimes:
    """The durations of the newest steps."""

    def __init__(self) -> None:
        """Start without any."""
        # Apart, so that a long answer does not push out what was seen of prompts.
        self._decodes: deque[tuple[int, int, float]] = deque(maxlen=NUM_KEPT)
        self._prefills: deque[tuple[int, int, float]] = deque(maxlen=NUM_KEPT)
        self._last_end_s = 0.0

    def note(
        self, num_decode_tokens: int, num_prefill_tokens: int, start_s: float, end_s: float
    ) -> None:
        """Take in a step. Of one that began before the last one ended, the time after that."""
        steps = self._prefills if num_prefill_tokens else self._decodes
        duration_s = end_s - max(start_s, self._last_end_s)
        self._last_end_s = end_s
        steps.append((num_decode_tokens, num_prefill_tokens, duration_s))

    def fit(self) -> StepCost | None:
        """The line through them by least squares, outliers left out; None before the first step.

        No step gets cheaper by doing more: a slope that would be negative is 0. A kind of work
        that was only ever seen in one size counts as free beside the base, except for prompts
        where there are decodes to take the base from.
        """
        steps = np.array([*tuple(self._decodes), *tuple(self._prefills)], dtype=np.float64)
        if not len(steps):
            return None
        cost = _fit(steps)
        distances = np.abs(steps[:, 2] - cost[0] - steps[:, :2] @ cost[1:])
        bound = max(
            OUTLIER_SPREADS * float(np.median(distances)),
            EXACT_SHARE * float(np.median(steps[:, 2])),
        )
        base_s, decode_s, prefill_s = _fit(steps[distances <= bound])
        return StepCost(float(base_s), float(decode_s), float(prefill_s))


def _fit(steps: "np.ndarray[tuple[int, int], np.dtype[np.float64]]") -> list[float]:
    """Base and slopes of the line with no negative part that fits best."""
    work, durations = steps[:, :2], steps[:, 2]
    for used in ([0, 1], [1], [0]):
        columns = np.column_stack([np.ones(len(steps)), work[:, used]])
        # What does not vary says nothing of its slope.
        if np.linalg.matrix_rank(columns) < columns.shape[1]:
            continue
        found = np.linalg.lstsq(columns, durations, rcond=None)[0]
        if found.min() >= -ROUNDING_S:
            slopes = [0.0, 0.0]
            for index, slope in zip(used, found[1:], strict=True):
                slopes[index] = max(float(slope), 0.0)
            return [max(float(found[0]), 0.0), *slopes]
    return [float(np.median(durations)), 0.0, 0.0]
