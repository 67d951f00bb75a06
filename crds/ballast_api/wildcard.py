"""The address on which a server in a pod listens. PURE."""

from __future__ import annotations

ANY = "0.0.0.0"  # noqa: S104 - the kubelet, Services and Prometheus call a pod from outside
"""All IPv4 addresses: the default of a pod."""
ANY_OF_BOTH_FAMILIES = "::"
"""All IPv6 addresses, and all IPv4 addresses too if the socket is dual-stack."""
WILDCARDS = frozenset({ANY, ANY_OF_BOTH_FAMILIES})


def listening_host(host: str, pod_ip: str) -> str:
    """Return the address to listen on.

    Kubernetes probes a pod at its first address. If this is an IPv6 address, a server on all IPv4 addresses would
    refuse every probe. A kernel without IPv6 cannot listen on `::`, so other pods keep the address.

    Args:
        host: The configured address.
        pod_ip: The first address of the pod; empty outside of a pod.
    """
    return ANY_OF_BOTH_FAMILIES if host == ANY and ":" in pod_ip else host
