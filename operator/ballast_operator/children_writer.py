"""Writes a plan to the cluster: the only place that creates, changes and deletes the children of a resource."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from secrets import token_urlsafe

from ballast_api.conditions import ConditionReason
from ballast_api.metadata import Metadata
from ballast_api.names import SPEC_HASH
from ballast_log import Log
from ballast_operator.cache import Cache
from ballast_operator.children.ray import services_of_kuberay
from ballast_operator.cluster import Cluster
from ballast_operator.drift import drift
from ballast_operator.errors import (
    ClusterRefused,
    ClusterUnavailable,
    Conflict,
    Invalid,
    LeftOver,
    NameTaken,
    ObjectNotFound,
)
from ballast_operator.kinds import SECRET, SERVICE, Body, Key, Kind
from ballast_operator.plan import (
    KEEP_ADDITIONS,
    MOUNTED,
    NEEDED,
    Annotate,
    Apply,
    ChildrenPlan,
    Tolerated,
    is_left_over,
    is_made_for,
    is_owned,
    makes_pods,
    shape,
)
from ballast_operator.poll_result import Problem
from ballast_operator.resource_memory import Failure, ResourceMemory

log = Log(__name__)

PASSWORD_BYTES = 32
REFUSED_AGAIN_SECONDS = 300.0
"""A manifest that the API server refused is sent again after this time, or when it changes."""
NAME_AGAIN_SECONDS = 10.0
"""The same time if an object of another owner has the name. No watch shows the deletion of this object."""
SLOW_SECONDS = 5.0
"""After a write that failed later than this, a reconciliation writes no other object of the kind."""
MOST_RESTORES, RESTORE_AGAIN_SECONDS = 5, 60.0
"""A child that was restored more often in a row is restored once in this time, so that two writers do not compete."""
ANNOTATIONS = "annotations of pods"
"""The name under which their failures are counted."""


@dataclass(slots=True)
class _Outcome:
    """The first problem to report, and the first failure, after which to try again."""

    problem: Problem | None = None
    failure: Failure | None = None

    def note(self, problem: Problem | None, failure: Failure | None = None) -> None:
        """Take what a write led to. The other writes go on."""
        self.problem = self.problem or problem
        self.failure = self.failure or failure


@dataclass(frozen=True, slots=True)
class ChildrenWriter:
    """Writes the children of resources. An object of another owner is never changed."""

    cluster: Cluster
    cache: Cache
    post: Callable[[Metadata, str, str], None]
    """Post an event about a resource: its reason and message."""

    async def write(
        self, key: Key, metadata: Metadata, wanted: ChildrenPlan, memory: ResourceMemory
    ) -> tuple[Problem | None, Failure | None]:
        """Write the plan. Return the first problem to report, and the first failure, after which to try again."""
        slow: set[Kind] = set()
        outcome = _Outcome()
        done: list[str] = []
        await self._annotate(wanted.costs, memory, slow, outcome)
        may_start = True  # new pods
        for apply in wanted.apply:
            if not may_start and makes_pods(apply.key.kind, apply.manifest):
                continue
            try:
                with _failing_fast(apply.key.kind, slow):
                    if await self._is_written(apply, memory):
                        memory.lost.discard(apply.key)
                        continue
                    problem = await self._apply(apply, memory)
            except LeftOver:
                pass  # the resource is reconciled again while a Secret is lost
            except (ClusterUnavailable, ClusterRefused) as error:
                marker = apply.manifest["metadata"]["annotations"][SPEC_HASH]
                outcome.note(_problem(error, memory, marker), error)  # the other children do not depend on this one
            else:
                outcome.note(problem)
                if problem is None:
                    done.append(apply.because)
                    continue
            if apply.key.kind == SECRET:
                memory.lost.add(apply.key)
            if _is_needed(apply, key):
                may_start = False  # not with an object of another owner or with an old one, nor without its policy
                if apply.key.kind in MOUNTED:
                    break
        for size in wanted.resize:
            if not may_start and not size.leaving:
                continue
            try:
                with _failing_fast(size.key.kind, slow):
                    if await self.cluster.resize(size.key, size.replicas, size.leaving, owner=size.owner):
                        done.append(size.because)
            except Invalid as error:
                message = f"the API server refused the size of {size.key}, or another object owns it: {error.message}"
                outcome.note(Problem(ConditionReason.NOT_APPLIED, message))
            except (ClusterUnavailable, ClusterRefused) as error:
                outcome.note(_problem(error, memory, f"resize {size.key}"), error)
        for gone in wanted.delete:
            try:
                with _failing_fast(gone.key.kind, slow):
                    await self.cluster.delete(gone.key, gone.uid)
            except (ClusterUnavailable, ClusterRefused) as error:
                outcome.note(_problem(error, memory, f"delete {gone.key}"), error)
            else:
                done.append(gone.because)
        await self._annotate(wanted.annotate, memory, slow, outcome)
        if done:
            log.info("applied", resource=str(key), because=done)
            self.post(metadata, "Applied", "; ".join(done))
        if memory.contest is not None and time.monotonic() < memory.contest[0]:
            outcome.note(memory.contest[1])
        return outcome.problem, outcome.failure

    async def _annotate(
        self, steps: Sequence[Annotate], memory: ResourceMemory, slow: set[Kind], outcome: _Outcome
    ) -> None:
        """Annotate pods. The other writes do not depend on it, so only the first failure in a row ends them."""
        for step in steps:
            try:
                with _failing_fast(step.key.kind, slow):
                    await self.cluster.annotate(step.key, step.annotations)
            except (ClusterUnavailable, ClusterRefused) as error:
                problem = _problem(error, memory, ANNOTATIONS)
                if problem is None:
                    raise
                outcome.note(problem, error)

    async def keep_own(self, key: Key, uid: str) -> None:
        """Keep in the cache the children that the resource with this uid owns, and only the metadata of others.

        Whoever may create objects can give any number of them the labels of a child.
        """
        for child in self.cache.keep_own(key, uid):
            found = await self.cluster.find(child)
            if found is not None:
                self.cache.put(child.kind, found)

    async def _apply(self, step: Apply, memory: ResourceMemory) -> Problem | None:
        marker = step.manifest["metadata"]["annotations"][SPEC_HASH]
        known = memory.refused.get(marker)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        kind, name = step.key.kind, step.key.name
        again = REFUSED_AGAIN_SECONDS
        try:
            answer = await self._write_child(step, memory.uid)
        except Invalid as error:
            problem = Problem(
                ConditionReason.INVALID_POD, f"the API server refused {kind.name} {name}: {error.message}"
            )
        except ObjectNotFound:
            if not kind.is_optional:
                raise
            return None  # the kind was deleted, and the next audit finds that
        except NameTaken as error:
            problem, again = Problem(ConditionReason.NAME_TAKEN, str(error)), NAME_AGAIN_SECONDS
        else:
            memory.refused.pop(marker, None)
            memory.failures.pop(marker, None)
            if kind == SECRET:
                memory.secrets[step.key] = marker, answer["metadata"]["resourceVersion"]
                memory.lost.discard(step.key)
            else:
                self.cache.put(kind, answer)
                self._tolerate(step, answer, memory)
            return self._contest(step, marker, memory) if step.is_repair else None
        memory.refused[marker] = (time.monotonic() + again, problem)
        log.warning("refused by the API server", kind=kind.name, name=name, because=problem.message)
        return problem

    async def _write_child(self, step: Apply, owner: str) -> Body:
        """Create an object, or change the resource's own.

        Raises:
            NameTaken: the object exists, and the resource does not own it. Or another controller would change an
                object of another owner for it.
            LeftOver: a deleted resource of this name owns the Secret. The plan leaves out other kinds.
        """
        for key in services_of_kuberay(step.key):
            found = await self.cluster.metadata(key)
            if found is not None and not is_made_for(found, step.key):
                raise NameTaken(f"{key.kind.name} {key.name}")
        uid = step.uid
        if uid is None:
            new = {"stringData": {step.generates: token_urlsafe(PASSWORD_BYTES)}} if step.generates else {}
            try:
                return await self.cluster.apply(step.key, step.manifest | new, uid=None)
            except Conflict:
                # The cache does not show an object that was created just now, or that lost its labels.
                found = await self.cluster.metadata(step.key)
                if found is None or found["metadata"].get("deletionTimestamp"):
                    raise
                if not is_owned(found, owner):
                    if step.key.kind == SECRET and is_left_over(step.manifest, found):
                        raise LeftOver from None
                    raise NameTaken(f"{step.key.kind.name} {step.key.name}") from None
                if step.generates:
                    return found
                uid = str(found["metadata"]["uid"])
        if step.patch is not None:
            return await self.cluster.overwrite(step.key, step.patch, uid=uid)
        try:
            return await self.cluster.apply(step.key, step.manifest, uid=uid)
        except Invalid:
            # A Service whose port was changed would get two ports of the same name, so its lists are replaced.
            if not step.is_repair:
                raise
        return await self.cluster.overwrite(step.key, step.manifest, uid=uid)

    async def _is_written(self, step: Apply, memory: ResourceMemory) -> bool:
        """Return whether a Secret is as this process wrote it. The ConfigMap that records this may be refused."""
        marker, version = memory.secrets.get(step.key, ("", ""))
        if marker != step.manifest["metadata"]["annotations"][SPEC_HASH]:
            return False
        found = await self.cluster.metadata(step.key)
        return found is not None and found["metadata"]["resourceVersion"] == version

    @staticmethod
    def _contest(step: Apply, marker: str, memory: ResourceMemory) -> Problem | None:
        """Count a repair. Return a problem if another writer changes the object after each one.

        The first repair of another manifest finds out what the cluster adds to it, so the count begins again.
        """
        now, wanted = time.monotonic(), shape(step.manifest)
        known, count, last = memory.restored.get(step.key, (wanted, 0, now))
        count = count + 1 if known == wanted and now - last < 2 * RESTORE_AGAIN_SECONDS else 1
        memory.restored[step.key] = wanted, count, now
        if count <= MOST_RESTORES:
            return None
        message = (
            f"another writer changes {step.key.kind.name} {step.key.name} again after each repair, so the operator "
            f"repairs it once in {RESTORE_AGAIN_SECONDS:g} s. {step.because}. Find the writer in its managedFields"
        )
        memory.contest = now + RESTORE_AGAIN_SECONDS, Problem(ConditionReason.NOT_APPLIED, message)
        memory.refused[marker] = memory.contest
        return memory.contest[1]

    @staticmethod
    def _tolerate(step: Apply, answer: Body, memory: ResourceMemory) -> None:
        """Remember which fields the cluster changes after an apply, so that they are not restored indefinitely.

        An apply keeps additions. Those of the cluster itself are in the answer to a patch that removes them.
        """
        found, wanted = drift(step.manifest, answer), shape(step.manifest)
        if step.patch is not None:
            paths = frozenset((*found.changed, *found.added))
        elif step.key.kind in KEEP_ADDITIONS:
            paths = frozenset(found.changed)
        else:
            paths = frozenset(found.changed).difference(found.added)
        before = memory.tolerated.get(step.key)
        known = before.paths if before is not None and before.shape == wanted else frozenset()
        if not paths <= known:
            log.warning("the cluster changes applied fields", kind=step.key.kind.name, fields=sorted(paths)[:8])
            memory.tolerated[step.key] = Tolerated(wanted, known | paths)


def _is_needed(failed: Apply, resource: Key) -> bool:
    """Return whether no pod of a resource may start after the write of a child failed.

    The head of a Ray cluster connects to a Service that is not named like the resource. A policy or a Service of the
    resource itself stays in force.
    """
    if failed.key.kind in MOUNTED:
        return not failed.is_for_others
    is_named = failed.key.kind == SERVICE and failed.key.name != resource.name
    return failed.uid is None and (failed.key.kind in NEEDED or is_named)


@contextlib.contextmanager
def _failing_fast(kind: Kind, slow: set[Kind]) -> Iterator[None]:
    """Fail at once if `slow` contains the kind. Add the kind if the block fails after a long time.

    A slow webhook delays each write for up to a minute, and the other resources wait for the end of a reconciliation.

    Raises:
        ClusterUnavailable: a write of this kind failed before, or this one failed.
    """
    if kind in slow:
        raise ClusterUnavailable(f"a {kind.name} is not written, because another one failed late", is_about_one=True)
    begun = time.monotonic()
    try:
        yield
    except ClusterUnavailable:
        if time.monotonic() - begun >= SLOW_SECONDS:
            slow.add(kind)
        raise


def _problem(error: Failure, memory: ResourceMemory, marker: str) -> Problem | None:
    """Count a failure of one write. Return a problem if it is to be reported.

    Raises:
        ClusterUnavailable: the other writes would fail too.
    """
    if isinstance(error, ClusterUnavailable) and not error.is_about_one:
        raise error
    return memory.problem(error, marker)
