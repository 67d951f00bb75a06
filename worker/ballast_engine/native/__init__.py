"""Kernels in C for the CPU: compiled at first use with the machine's own compiler, kept in a cache, called by ctypes.

Law: each result is computed in one fixed order that depends on its own inputs alone, so a request's tokens do not
depend, bit for bit, on what shares its batch, on chunking or on the number of threads. torch computes the reference.
"""
