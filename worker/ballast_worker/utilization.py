"""The shares of the device that prefill and decode use: MFU and MBU."""

from __future__ import annotations

from ballast_engine.footprint import PHASES, Footprint
from ballast_engine.stats import EngineStats
from ballast_worker.status import SMOOTHING_SECONDS


class Utilization:
    """Operations and bytes as a share of the device's peak, smoothed like rates. Idle time counts."""

    def __init__(self, footprint: Footprint) -> None:
        self.flops = dict.fromkeys(PHASES, 0.0)
        """By phase, as a share of the peak, like `bandwidth`."""
        self.bandwidth = dict.fromkeys(PHASES, 0.0)
        self._footprint = footprint
        self._at: float | None = None
        self._before: dict[str, tuple[float, float]] = {}

    def sample(self, stats: EngineStats, now: float) -> None:
        """Read the counters. One thread calls it about once a second."""
        footprint = self._footprint
        done = {phase: (footprint.flops(work), footprint.bytes(work)) for phase, work in stats.work.items()}
        if self._at is not None and now > self._at:
            elapsed = now - self._at
            keep = 0.5 ** (elapsed / SMOOTHING_SECONDS)
            peaks = ((self.flops, footprint.peak_flops), (self.bandwidth, footprint.peak_bandwidth))
            for phase, now_done in done.items():
                for after, before, (shares, peak) in zip(now_done, self._before[phase], peaks, strict=True):
                    share = max(0.0, after - before) / elapsed / peak
                    shares[phase] += (share - shares[phase]) * (1 - keep)
        self._at, self._before = now, done
