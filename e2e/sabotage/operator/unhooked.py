"""End the pods of workers on Ray without draining their replicas."""

from ballast_operator import inference_deployment
from ballast_operator.children import ray

made = ray.ray_service


def ray_service(*args, **options):
    found = made(*args, **options)
    for group in found["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        for container in group["template"]["spec"]["containers"]:
            del container["lifecycle"]
    return found


ray.ray_service = inference_deployment.ray_service = ray_service
