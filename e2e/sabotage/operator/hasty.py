"""Remove a pod in a rollout before its replacement is ready."""

from ballast_operator.children import pods

made = pods.deployment


def deployment(*args, **options):
    found = made(*args, **options)
    found["spec"]["strategy"]["rollingUpdate"] = {"maxSurge": 0, "maxUnavailable": 1}
    return found


pods.deployment = deployment
