"""Metric families from rows of labels and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from ballast_worker.histogram import Histogram

Rows = Iterable[tuple[tuple[str, ...], float]]


def gauge(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    """Return a gauge with its rows."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    """Return a counter with its rows."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def histogram(name: str, text: str, labels: tuple[str, ...], rows: Mapping[tuple[str, ...], Histogram]) -> Metric:
    """Return a histogram for each row of labels."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, found in rows.items():
        family.add_metric(values, found.buckets(), found.total)
    return family
