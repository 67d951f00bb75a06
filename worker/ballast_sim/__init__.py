"""Replay traffic against a model of the hardware in virtual time, running `ballast_policy` itself.

Law: deterministic. Time is the simulated clock, randomness comes from a seed, and what is measured is what the real
policy decided; a replica executes plans exactly as an engine does and asserts that each one keeps the contract.
"""
