"""Kernels in C for the CPU, called by ctypes.

An image has prebuilt kernels for several instruction sets, and no compiler. Elsewhere, the kernels are compiled at
first use with the compiler of the machine, and cached.

Law: the order of each computation depends only on its own inputs. The tokens of a request therefore do not depend, bit
for bit, on the rest of the batch, on chunking or on the number of threads. torch computes the reference.
"""
