"""The definition of one kind of custom resource that the operator reconciles. PURE.

To add a kind, define its `ResourceType`, and add it to the types of `process.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

from ballast_api.conditions import ConditionReason, ConditionType
from ballast_api.errors import InvalidConfig
from ballast_api.metadata import Metadata
from ballast_api.replicas import Scaling
from ballast_api.status import Condition, ResourceStatus, ScalingStatus
from ballast_operator.context import OperatorContext
from ballast_operator.errors import Unplannable
from ballast_operator.kinds import DEPLOYMENT, RAY_SERVICE, Body, Key, Kind
from ballast_operator.plan import ChildrenPlan, ClusterSnapshot, is_live
from ballast_operator.poll_result import PollResult, Problem, QueueSource
from ballast_operator.ray_status import as_deployment
from ballast_operator.sharing import Sharing
from ballast_queue.rights import RedisUser

MOST_CHARACTERS = 1000


class Resource(Protocol):
    """The parts that every resource has."""

    @property
    def metadata(self) -> Metadata: ...
    @property
    def status(self) -> ResourceStatus: ...


R = TypeVar("R", bound=Resource)
P = ParamSpec("P")
T = TypeVar("T")


class ConditionValue(NamedTuple):
    """Status, reason and message of a condition."""

    status: Literal["True", "False", "Unknown"]
    reason: ConditionReason
    message: str


def on_hold(reason: ConditionReason, message: str) -> ConditionValue:
    """Return the value of `Degraded` of a resource that must change first. `message` has no full stop."""
    text = f"{message}. Until then, the children of this resource do not change"
    return ConditionValue("True", reason, text[:MOST_CHARACTERS])


@dataclass(frozen=True, slots=True)
class ConditionInput(Generic[R]):
    """Everything that the conditions of a resource depend on."""

    resource: R
    snapshot: ClusterSnapshot
    """The children and pods after the writes of this reconciliation."""
    plan: ChildrenPlan
    poll: PollResult | None
    """None: this type has no workers, or the first poll has not begun."""
    now: float
    refused: Problem | None = None
    """The first child that the API server refused."""
    is_held: bool = False
    """The resource is not reconciled, so its children stay as they are."""
    unchanged: float = 0.0
    """Seconds without a change of its `progress`, as far as this process knows; 0 if no progress is expected."""

    @property
    def live(self) -> tuple[Body, ...]:
        """Return the pods that run or will run."""
        return tuple(pod for pod in self.snapshot.pods if is_live(pod))

    @property
    def ray_service(self) -> Body | None:
        """Return the RayService that is named like the resource."""
        return self.snapshot.child(RAY_SERVICE, self.resource.metadata)

    @property
    def deployment(self) -> Body | None:
        """Return the Deployment that is named like the resource; for workers on Ray, the same figures of their pods."""
        found, ray = self.snapshot.child(DEPLOYMENT, self.resource.metadata), self.ray_service
        if ray is None:
            return found
        statuses = self.poll.by_pod(self.live) if self.poll is not None else {}
        return as_deployment(ray, self.live, statuses, self.plan.files.get(self.plan.version, ""))

    def count(self, name: str) -> int:
        """Return a figure of the Deployment's status; zero while the Deployment has no status."""
        status = (self.deployment or {}).get("status") or {}
        return int(status.get(name) or 0)

    @property
    def is_current(self) -> bool:
        """Return whether the Deployment's status describes its present spec."""
        found = self.deployment
        return found is not None and self.count("observedGeneration") >= found["metadata"].get("generation", 0)

    @property
    def has_older_pods(self) -> bool:
        """Return whether pods of an earlier spec may still work. A pod that is being deleted returns its items."""
        if self.refused is not None or any(pod["metadata"].get("deletionTimestamp") for pod in self.snapshot.pods):
            return True
        if self.deployment is None:
            return bool(self.live)
        return not self.is_current or self.count("updatedReplicas") != self.count("replicas")


Check = Callable[[ConditionInput[R]], ConditionValue | None]


def first(checks: Iterable[Check[R]], given: ConditionInput[R]) -> ConditionValue:
    """Return the first result of a chain of checks. The last check always has a result."""
    for check in checks:
        found = check(given)
        if found is not None:
            return found._replace(message=found.message[:MOST_CHARACTERS])
    raise AssertionError("the last check of a chain always has a result")


@dataclass(frozen=True, slots=True)
class ResourceType(Generic[R]):
    """One kind of custom resource. The functions are pure."""

    kind: Kind
    children: tuple[Kind, ...]
    """The kinds of its children, in the order of application."""
    label: str
    """The `app.kubernetes.io/name` of its children and pods. It identifies the resource type."""
    read: Callable[[Body], R]
    """Validate an object. Raises `InvalidConfig`."""
    read_status: Callable[[Body], ResourceStatus]
    """Read the `status` of an object that `read` refuses."""
    plan: Callable[[R, ClusterSnapshot, OperatorContext, PollResult | None], ChildrenPlan]
    conditions: Callable[[ConditionInput[R]], Mapping[ConditionType, ConditionValue]]
    status: Callable[[ConditionInput[R], tuple[Condition, ...], ScalingStatus | None], ResourceStatus]
    """Build the status to report from its conditions and the last scaling decision."""
    blocked: Callable[[R, OperatorContext, Sharing], ConditionValue | None] = lambda *_: None
    """Return why the resource must stay unchanged for now, as the value of `Degraded`. The third argument are the
    resources of this type whose queue has the same name."""
    redis_users: Callable[[R, OperatorContext, Sequence[str]], tuple[RedisUser, ...]] = lambda *_: ()
    """Return the users in the operator's own Redis that the resource needs. The third argument are the queues that pods
    of an earlier spec may serve."""
    outdated_users: Callable[[R, ClusterSnapshot, OperatorContext, Mapping[Key, str]], frozenset[str]] = lambda *_: (
        frozenset()
    )
    """Return the names of those among these users whose Secret may have a former password. The fourth argument are the
    hashes of the manifests of the Secrets that this process wrote."""
    kept_users: Callable[[Body, Sequence[str], OperatorContext], tuple[RedisUser, ...]] = lambda *_: ()
    """Return the users of a resource that is not reconciled and may be invalid, for the queues that its pods serve."""
    named_secrets: Callable[[R], tuple[str, ...]] = lambda _resource: ()
    """Return the names of the Secrets that the resource names, which need the label `ballast.dev/allow`."""
    secrets: Callable[[R, OperatorContext], tuple[Key, ...]] = lambda _resource, _context: ()
    """Return the Secrets among its children, which no watch shows."""
    read_counted: Callable[[Body], R | None] = lambda _body: None
    """Read the fields that `Ready` and the counts depend on, of an object that `read` may refuse. The others have
    defaults. Return None if the type has no workers."""
    counts: Callable[[ConditionInput[R]], Mapping[str, object]] = lambda _given: {}
    """Return the fields of the status that count workers."""
    parts: Callable[[ConditionInput[R]], Mapping[str, bool]] = lambda _given: {}
    """Return which parts of its Ray cluster are ready, for the metrics."""
    queue_of: Callable[[Body], str | None] = lambda _body: None
    """Return the name of the queue of a resource that may be invalid, in whichever Redis."""
    own_queue: Callable[[Body], str | None] = lambda _body: None
    """Return the queue of a resource that may be invalid, if it is in the operator's own Redis."""
    written_with: Callable[[Key], tuple[Key, ...]] = lambda _child: ()
    """Return the objects that another controller makes for a child, or changes if they exist."""
    source: Callable[[R, OperatorContext], QueueSource | None] = lambda _resource, _context: None
    """Return where its workers report; None if the type has no workers."""
    progress: Callable[[ConditionInput[R]], Hashable | None] = lambda _given: None
    """Return figures that change while the children make progress; None if none is expected, or Kubernetes itself
    reports a lack of it."""
    reported_lack: Callable[[ConditionInput[R]], float] = lambda _given: 0.0
    """Return the seconds without progress that the reported status shows, for a process that has just started."""
    awaits_poll: Callable[[ConditionInput[R], ResourceStatus], bool] = lambda _given, _status: False
    """Return whether a status lacks figures that the next poll will probably have."""
    scaling: Callable[[R], Scaling | None] = lambda _resource: None
    """Return its scaling settings; None if the operator must not change its replicas."""
    made_replicas: Callable[[ConditionInput[R]], int] = lambda _given: 0
    """Return the replicas that its children have in their specs."""
    startup_seconds: Callable[[R], float] = lambda _resource: 0.0
    """Return the time in which a new replica becomes ready, if it ever does."""
    slots: Callable[[R], int | None] = lambda _resource: None
    """Return the configured slots of a worker; None if the worker decides."""


def computed(function: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
    """Call a pure function of the resource type.

    Raises:
        InvalidConfig: the spec is invalid.
        Unplannable: the function failed on any other error.
    """
    try:
        return function(*arguments, **more)
    except InvalidConfig:
        raise
    except Exception as error:
        raise Unplannable(error) from error
