"""Kernels in C for the CPU: compiled at first use with the compiler of the machine, cached, and called by ctypes.

Law: the order of each computation depends only on its own inputs. The tokens of a request therefore do not depend, bit
for bit, on the rest of the batch, on chunking or on the number of threads. torch computes the reference.
"""
