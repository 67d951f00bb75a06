"""The status of an InferenceDeployment. What is unknown stays as it was reported. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ballast_api.conditions import ConditionType
from ballast_api.errors import InvalidConfig
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.metadata import Metadata
from ballast_api.names import HTTP_PORT, selector
from ballast_api.status import MOST_FORMER_QUEUES, ClassSlots, Condition, ScalingStatus, Status
from ballast_operator.conditions.given import Given, knows_versions
from ballast_operator.kinds import Body
from ballast_operator.poll_result import FRESH_SECONDS, PollResult
from ballast_operator.report import is_same_reason


def status(given: Given, reported: tuple[Condition, ...], scaling: ScalingStatus | None) -> Status:
    """Return the status to report. It equals the present status if nothing is new."""
    resource = given.resource
    metadata = resource.metadata
    return Status(
        observed_generation=metadata.generation,
        updated_replicas=resource.status.updated_replicas,
        selector=",".join(f"{name}={value}" for name, value in selector(metadata.name).items()),
        served_name=resource.spec.served_name,
        endpoint=_endpoint(resource),
        queue=resource.queue_name,
        former_queues=former_queues(resource, None if given.has_older_pods else given.poll),
        config_hash=given.plan.files.get(given.plan.version, ""),
        slots=_slots(given),
        scaling=_scaling(scaling, resource.status.scaling),
        conditions=reported,
    ).model_copy(update=counts(given))


def counts(given: Given) -> Mapping[str, object]:
    """Return the fields of the status that count workers, without those that are unknown."""
    ready = given.count("readyReplicas")
    found = {
        "replicas": given.count("replicas"),
        "ready_replicas": ready,
        "updated_replicas": given.count("updatedReplicas"),
        "workers": f"{ready}/{given.resource.spec.replicas}",
    }
    if not knows_versions(given):
        del found["updated_replicas"]
    return found


def read_counted(body: Body) -> InferenceDeployment:
    """Read the fields that `Ready` and the counts depend on, each if it is valid. The others have defaults."""
    bare: Body = {"metadata": {"name": "counted"}, "spec": {"model": {"uri": "file:///"}}}
    found = InferenceDeployment.read(bare, "counted")
    for name in ("replicas", "rollout", "runtime"):
        wider = bare | {"spec": bare["spec"] | {name: (body.get("spec") or {}).get(name)}}
        with suppress(InvalidConfig):
            found, bare = InferenceDeployment.read(wider, "counted"), wider
    return found.model_copy(update={"metadata": Metadata.model_validate(body["metadata"])})


def _endpoint(resource: InferenceDeployment) -> str:
    scheme = "http" if resource.spec.network.tls_secret is None else "https"
    return f"{scheme}://{resource.metadata.name}.{resource.metadata.namespace}.svc:{HTTP_PORT}"


def former_queues(resource: InferenceDeployment, poll: PollResult | None) -> tuple[str, ...]:
    """Return the queues that the resource left, without those that the poll found to be finished."""
    before = (*resource.status.former_queues, resource.status.queue)
    done = {queue.name for queue in poll.former if queue.is_over} if poll is not None else set()
    left = (name for name in dict.fromkeys(before) if name and name != resource.queue_name and name not in done)
    return tuple(left)[-MOST_FORMER_QUEUES:]


def _slots(given: Given) -> ClassSlots | None:
    """Return the configured slots of the workers. If none reports, the slots stay while workers may exist."""
    poll, spec, status = given.poll, given.resource.spec, given.resource.status
    if not poll.workers:
        has_polled = poll.problem is None and given.now - poll.at <= FRESH_SECONDS
        is_gone = given.count("readyReplicas") == 0 and (spec.replicas == 0 or has_polled)
        return None if is_gone else status.slots
    offline = sum(worker.offline_reserved for worker in poll.workers)
    return ClassSlots(online=max(0, sum(worker.slots for worker in poll.workers) - offline), offline=offline)


def awaits_poll(given: Given, wanted: Status) -> bool:
    """Return whether the resource becomes ready before a worker has reported its slots."""
    before = given.resource.status.condition(ConditionType.READY)
    after = wanted.condition(ConditionType.READY)
    becomes_ready = after is not None and after.status == "True" and (before is None or before.status != "True")
    has_workers = given.count("readyReplicas") > 0 and given.poll.problem is None
    return becomes_ready and has_workers and wanted.slots is None


def _scaling(wanted: ScalingStatus | None, reported: ScalingStatus | None) -> ScalingStatus | None:
    """Return the reported decision while its replicas and its reason stay the same: new figures are not reported."""
    if wanted is None or reported is None or wanted.replicas != reported.replicas:
        return wanted
    return reported if is_same_reason(wanted.because, reported.because) else wanted
