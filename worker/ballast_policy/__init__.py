"""Decide who runs in the next engine step: `plan(snapshot) -> Plan`, and nothing else.

Law: pure. No clock, no I/O, no randomness, no tensors; everything a decision depends on is an argument, and a decision
is a value. An engine is an adapter to this package; the simulator is another.
"""
