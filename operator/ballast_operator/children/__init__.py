"""The manifests of the children of a resource, one builder per child.

Law: PURE. Equal arguments give equal manifests, so that the operator can compare them with the applied ones.
"""
