"""Attention over paged KV: one interface, several backends, one conformance suite.

Law: a backend owns the layout of its pages; all other modules know only block ids. Blocks are the first dimension after
the layer, so that a block can be copied without knowing the rest.
"""
