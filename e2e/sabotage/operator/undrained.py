"""Let Ray end a node at SIGTERM at once, without stopping its replica."""

from ballast_operator import inference_deployment
from ballast_operator.children import ray

made = ray.ray_service


def ray_service(*args, **options):
    found = made(*args, **options)
    for group in found["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        for container in group["template"]["spec"]["containers"]:
            for variable in container["env"]:
                if variable["name"] == ray.NODE_DRAIN:
                    variable["value"] = "0"
    return found


ray.ray_service = inference_deployment.ray_service = ray_service
