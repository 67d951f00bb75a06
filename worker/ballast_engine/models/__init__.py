"""Decoder models: what `config.json` says, the weights it needs, and the computation.

Law: `decoder` is the plain torch computation and the reference; `native` computes the same with the compiled kernels
and is tested against it.
"""
