"""Decide which requests run in each engine step.

Law: pure. No clock, no I/O, no randomness, no tensors. Time and configuration are arguments, and each decision is a
value.

An engine reports its events to a `host.Host` and asks it for each plan. The simulator does the same.

- `step` plans one step from a snapshot.
- `learning` holds what an engine learns from its own steps.
- `fairness` divides service among tenants and defines the order of work.
- `jobs` chooses the jobs from which items are claimed.
"""
