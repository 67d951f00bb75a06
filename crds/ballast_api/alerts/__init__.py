"""Alert rules of one resource, from its `slo` and `offline`, for a PrometheusRule or a rules file.

Law: each module contains every name, window and threshold of its alerts. `series` contains every selector.
"""
