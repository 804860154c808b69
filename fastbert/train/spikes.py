"""Sudden rises of the training loss, which a run should not hide in its log."""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 32  # reports that "usual" is taken from
FEWEST = 16  # before which nothing is usual
DEVIATIONS = 8.0  # of the losses in the window: 6 called 1 of 100,000 reports of normal noise a spike, 8 none
LEAST_RISE = 0.02  # of the usual loss: on a plateau the deviation is next to nothing
NORMAL_MAD = 1.4826  # standard deviation of normal noise over its median absolute deviation


class SpikeWatch:
    """Tells a spike from noise: a loss far above the median of the reports before it.

    Deviations are from the median absolute deviation, which a spike in the window does not move. A spike is
    told once, however long it lasts; a loss that stays high becomes the usual one.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._high = False

    def add(self, loss: float | None) -> float | None:
        """Take the loss of a report; returns the usual loss if a spike begins here, else None.

        A loss that is not finite (None in a row that was read back) says nothing here: the trainer counts it.
        """
        if loss is None or not math.isfinite(loss):
            return None
        usual, was_high, self._high = None, self._high, False
        if len(self._losses) >= FEWEST:
            usual = statistics.median(self._losses)
            deviation = NORMAL_MAD * statistics.median(abs(other - usual) for other in self._losses)
            self._high = loss > usual + max(DEVIATIONS * deviation, LEAST_RISE * abs(usual))
        self._losses.append(loss)
        return usual if self._high and not was_high else None
