"""Spec to manifest, one builder per child.

Law: PURE. The same resource and surroundings give the same manifests, so that what was applied can be compared.
"""
