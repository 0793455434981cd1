"""Measures the CPU share of other processes, so that disturbed rounds can be repeated.

On a busy machine, a peer with many threads gets more CPU time than jax_ub's engine,
which has one thread per core. Interleaving does not correct for this.
"""

import os
import pathlib
import time
from collections.abc import Callable

# The kernel counts ticks of 10 ms per core, so shorter intervals are too coarse.
_LEAST_S = 0.1
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal


class BackgroundLoad:
    """Measures which share of the machine's CPU time other processes use.

    Each call of `share` ends one measurement interval and starts the next one.
    """

    def __init__(
        self,
        statistics: pathlib.Path = pathlib.Path("/proc/stat"),
        own_seconds: Callable[[], float] | None = None,
    ):
        """Starts the first measurement interval, which ends at the first `share`.

        Where the statistics cannot be read, the measured share is 0.

        Args:
            statistics: path of the kernel's CPU statistics.
            own_seconds: returns the CPU seconds of the benchmark so far, summed over
                cores. None reads those of this process.
        """
        self._statistics = statistics
        self._own_seconds = own_seconds or time.process_time
        self._last_share = 0.0
        self._start = self._now()

    def share(self) -> float:
        """Returns the share of all cores, 0 to 1, that other processes used.

        The interval starts at the last call. Calls that are less than 0.1 s apart
        share one interval.
        """
        now = self._now()
        elapsed, busy, own = (
            after - before for after, before in zip(now, self._start, strict=True)
        )
        if elapsed >= _LEAST_S:
            others = (busy - own) / (elapsed * (os.cpu_count() or 1))
            self._last_share = min(1.0, max(0.0, others))
            self._start = now
        return self._last_share

    def _now(self):
        own = self._own_seconds()
        return time.perf_counter(), self._busy_seconds(default=own), own

    def _busy_seconds(self, default):
        try:
            first_line = self._statistics.read_text().partition("\n")[0]
        except OSError:
            return default
        ticks = [int(field) for field in first_line.split()[1:]]
        return sum(ticks[i] for i in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
