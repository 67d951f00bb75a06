"""What the pod of each backend needs. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from ballast_api.inference_deployment import InferenceDeployment
from ballast_operator.kinds import Body


@dataclass(frozen=True, slots=True)
class Backend:
    """The process of a worker.

    Attributes:
        command: Program that reads a `WorkerConfig`.
        exit_seconds: Time that the process needs after draining until it exits.
        memory_gibibytes: Memory of the processes beside model and KV.
        memory_of_a_rank_gibibytes: Memory of the process of each GPU.
    """

    command: str
    exit_seconds: int
    memory_gibibytes: int = 0
    memory_of_a_rank_gibibytes: int = 0


BACKENDS = {
    "native": Backend("ballast-worker", exit_seconds=15),
    # Measured on CPU: 1.2 GiB for the API server and EngineCore, and 1.7 GiB for the process that computes.
    "vllm": Backend("ballast-vllm", exit_seconds=25, memory_gibibytes=2, memory_of_a_rank_gibibytes=2),
}


def backend_of(resource: InferenceDeployment) -> Backend:
    """Return the backend of the resource."""
    return BACKENDS[resource.spec.backend]


def num_ranks(resource: InferenceDeployment) -> int:
    """Return the number of processes that compute: one for each GPU."""
    return max(1, resource.spec.gpu.count)


def memory_request(resource: InferenceDeployment) -> str | None:
    """Return the memory request of a pod whose template names no memory, or None if it is unknown."""
    backend = backend_of(resource)
    gibibytes = backend.memory_gibibytes + num_ranks(resource) * backend.memory_of_a_rank_gibibytes
    if not gibibytes:
        return None
    kv = resource.spec.engine.kv_memory_mebibytes if resource.spec.gpu.count == 0 else None
    return f"{1024 * gibibytes + (kv or 0)}Mi"


def environment(resource: InferenceDeployment) -> list[Body]:
    """Return the variables of the backend."""
    if resource.spec.backend != "vllm":
        return []
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    ray = resource.spec.runtime.ray
    num_nodes = 1 if ray is None else ray.nodes
    if resource.spec.gpu.count * num_nodes > 1:
        variables["NCCL_DEBUG"] = "WARN"
        if num_nodes == 1:
            # The GPUs of a pod reach each other by NVLink, PCIe or shared memory. It may not register memory for RDMA.
            variables["NCCL_IB_DISABLE"] = "1"
    return [{"name": name, "value": value} for name, value in variables.items()]
