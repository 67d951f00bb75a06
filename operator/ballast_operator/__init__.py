"""The operator: one process that makes the cluster what each InferenceDeployment says, and keeps it so.

Law: every event calls the same `reconcile(name)`: observe (caches) -> plan (pure) -> apply -> report. Only `cluster`
writes to Kubernetes. A signal that is missing never reads as idle. Nothing here holds state that a restart would lose.
"""
