"""The connections of a resource: its Redis and who may use the queue, its clients and their keys, and Prometheus."""

from __future__ import annotations

from pydantic import Field

from ballast_api.base import ApiModel, keyed_by
from ballast_api.names import SUBMITTER_SUFFIX
from ballast_api.pods import Json, SecretKey, SecretName
from ballast_api.rules import Rule
from ballast_api.sections import Name


class RedisRef(ApiModel):
    """The Secret with the address of Redis or Valkey. A change of this section rolls the pods, a change of the
    Secret does not.
    """

    secret_name: SecretName
    """In the resource's namespace."""
    url_key: SecretKey = "url"
    """Key of the Secret that holds the URL: `redis://` or `rediss://` with host, port, user and database."""
    password_key: SecretKey | None = None
    """Key of the Secret that holds the password, if the URL does not contain it."""
    ca_key: SecretKey | None = None
    """Key of the Secret that holds the certificates (PEM) of authorities that workers and operator trust at a
    `rediss://` address, besides those of the image."""


class Submitter(ApiModel):
    """A user in Redis that may only add to an inbox of the queue."""

    rules = (
        Rule(
            f"self.secretName.endsWith('{SUBMITTER_SUFFIX}')",
            lambda submitter: submitter.secret_name.endswith(SUBMITTER_SUFFIX),
            f"secretName must end with {SUBMITTER_SUFFIX}, so that a resource takes no name of another Secret",
        ),
    )

    secret_name: SecretName
    """The Secret that the operator creates in the resource's namespace, with `url` and `password` of the user. Its name
    ends with `-ballast-submitter`, so that no condition shows whether another Secret exists."""
    tenant: Name | None = None
    """The tenant for which the user submits. It must be set if, and only if, `offline.tenants` declares tenants."""


class QueueAccess(ApiModel):
    """Who may use the queue besides the workers of this resource. It needs the Redis of the operator."""

    namespaces: tuple[SecretName, ...] = Field(default=(), max_length=64)
    """Other namespaces whose resources may name this queue in `offline.queue`. They can do everything in the queue. The
    grant counts only for a queue whose name begins with the namespace of this resource."""
    submitters: tuple[Submitter, ...] = Field(default=(), max_length=32, json_schema_extra=keyed_by("secretName"))
    """Users in Redis that the operator creates for programs that add items. See `submit from any language`."""


class ApiKeysRef(ApiModel):
    """The Secret with the API keys of clients. A change of this section rolls the pods, a change of the Secret does
    not.
    """

    secret_name: SecretName
    """In the resource's namespace."""
    key: SecretKey = "keys.yaml"
    """Key of the Secret that holds a YAML mapping from API key to tenant."""


class Monitoring(ApiModel):
    """Objects for Prometheus. The operator makes them if the kinds of the prometheus-operator exist."""

    service_monitor: bool = True
    """Make a ServiceMonitor."""
    prometheus_rule: bool = True
    """Make a PrometheusRule with the alerts of this resource."""
    scrape_seconds: int = Field(default=15, ge=1, le=60)
    """Scrape interval of the ServiceMonitor. With more than 60 s, alerts over 2 and 5 minutes would lack samples."""
    labels: dict[str, str] = Field(default={})
    """Labels to add to both objects, for a Prometheus that selects by label (e.g. `release: kube-prometheus-stack`)."""


class Network(ApiModel):
    """How clients connect to the workers, and which."""

    tls_secret: SecretName | None = None
    """Secret of type `kubernetes.io/tls` in the resource's namespace. With it, workers serve HTTPS only, on all ports.
    Its key `ca.crt` has the certificate of the authority: a ServiceMonitor without it does not scrape. A change of
    this field rolls the pods, a change of the Secret does not."""

    policy: bool = True
    """Make a NetworkPolicy that admits only port 8000, and port 8001 for the peers of `metricsFrom`."""
    ingress_from: tuple[Json, ...] = Field(default=(), max_length=64)
    """NetworkPolicy peers (`podSelector`, `namespaceSelector`, `ipBlock`) that may connect; by default all."""
    metrics_from: tuple[Json, ...] = Field(default=(), max_length=64)
    """NetworkPolicy peers that may scrape the metrics with tenants, e.g. Prometheus. With a peer, workers serve all
    metrics on port 8001, and the ServiceMonitor scrapes this port. By default no port shows tenants, and the
    ServiceMonitor scrapes port 8000. A change between none and some peers rolls the pods."""

    rules = (
        Rule(
            "self.policy || !has(self.ingressFrom) || size(self.ingressFrom) == 0",
            lambda network: network.policy or not network.ingress_from,
            "network.ingressFrom has no effect without the policy. Set network.policy to true, or remove the peers",
        ),
        Rule(
            "self.policy || !has(self.metricsFrom) || size(self.metricsFrom) == 0",
            lambda network: network.policy or not network.metrics_from,
            "network.metricsFrom needs the policy, which admits only these peers. Set network.policy to true, or "
            "remove the peers",
        ),
    )
