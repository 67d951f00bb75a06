"""The operator: one process that makes the cluster match each custom resource.

Law: every event leads to the same `reconcile(key)`: read the caches -> plan (pure) -> apply -> report. Only `cluster`
writes to Kubernetes. A missing signal never counts as idle. A restart loses no state.
"""
