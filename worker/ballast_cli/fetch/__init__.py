"""Bring the files of a model to a directory: `ballast fetch`, in an init container or on a laptop.

location -> source (hub, bucket) -> snapshot -> store. A source lists files and reads one from an offset; the store
resumes, verifies, and publishes a directory only once it is whole.
"""
