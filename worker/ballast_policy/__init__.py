"""Decide which requests run in each engine step.

Law: pure. No clock, no I/O, no randomness, no tensors. Time and configuration are arguments, and each decision is a
value. An engine or the simulator reports its events to a `host.Host` and asks it for each plan.

Each tuning constant names the command that supports it. A setting in brackets is one of `benchmarks/policy_change.py`,
run with `--quick`: its row without reservation, or with a cap and a fitted cost model (sparse-2s, sparse-2s-arxiv).
"""
