"""Decide which requests run in each engine step.

Law: pure. No clock, no I/O, no randomness, no tensors. Time and configuration are arguments, and each decision is a
value. An engine or the simulator reports its events to a `host.Host` and asks it for each plan.

Each tuning constant names the command that supports it: with a workload in brackets, or without another name, it is
`benchmarks/constants.py`, which halves and doubles each. Points are of attainment. Half a point there is chance.
"""
