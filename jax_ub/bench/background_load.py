"""How much of the machine other processes take, which no interleaving makes up for.

Peers with many threads get more of a busy machine than an engine with one a core, so a
round that was disturbed says little, and is repeated.
"""

import os
import pathlib
import time
from collections.abc import Callable

# The kernel counts in ticks of 10 ms on each core: a shorter time says nothing.
_LEAST_S = 0.1
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal


class BackgroundLoad:
    """Measures, from one `share` to the next, what ran on the cores besides this."""

    def __init__(
        self,
        statistics: pathlib.Path = pathlib.Path("/proc/stat"),
        own_seconds: Callable[[], float] | None = None,
    ):
        """Starts to measure; without Linux's statistics, nothing runs elsewhere.

        Args:
            statistics: the kernel's.
            own_seconds: the time that this has had on all cores; None is that of this
                process.
        """
        self._statistics = statistics
        self._own_seconds = own_seconds or time.process_time
        self._last_share = 0.0
        self._start = self._now()

    def share(self) -> float:
        """The part of all cores, 0 to 1, that others had since the last call.

        Calls that follow each other within a tenth of a second are measured together.
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
