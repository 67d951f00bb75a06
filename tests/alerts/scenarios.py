"""Series that must and must not fire, as promtool's rule tests write them: one sample a minute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TARGET = 'namespace="default",service="chat",pod="chat-0"'
QUEUE = f'{TARGET},queue="default/chat"'
MINUTES = 10 * 60
"""Length of a scenario. A constant share is the same over every window, so a few hours replace days."""


@dataclass(frozen=True)
class Scenario:
    """Scraped series, the alerts that fire at a point of time, and those that fired before it and are over."""

    name: str
    series: dict[str, str]
    at: str
    fires: set[tuple[str, str]] = field(default_factory=set)
    over: set[tuple[str, str]] = field(default_factory=set, kw_only=True)
    spec: dict[str, Any] = field(default_factory=dict)
    keeps_head_state: bool = True
    every: str = "2m"
    """The interval at which the rules are evaluated."""


def judged(slo: str, met: str, missed: str, *, of: str = "online", pods: int = 1) -> dict[str, str]:
    """Return the counters of one objective in each pod, as `start+step x minutes`."""
    targets = [TARGET.replace("chat-0", f"chat-{i}") for i in range(pods)]
    about = [f'ballast_slo_requests_total{{{target},class="{of}",slo="{slo}"' for target in targets]
    return {
        f'{each},met="{is_met}"}}': values for each in about for is_met, values in (("true", met), ("false", missed))
    }


def ended(of: str = "online", **outcomes: str) -> dict[str, str]:
    """Return the counters of ended requests of a class."""
    return {f'ballast_requests_total{{{TARGET},class="{of}",outcome="{o}"}}': v for o, v in outcomes.items()}


def gauge(name: str, values: str, labels: str = TARGET) -> dict[str, str]:
    return {f"{name}{{{labels}}}": values}


def operated(
    metric: str, values: str, *more: str, pod: str = "operator-0", name: str = "default/chat"
) -> dict[str, str]:
    """Return a series about a resource that the operator exports. The target sets namespace, Service and pod."""
    namespace, _, resource = name.partition("/")
    about = f'kind="InferenceDeployment",resource_namespace="{namespace}",name="{resource}"'
    target = f'namespace="system",service="ballast-operator",pod="{pod}"'
    return gauge(f"ballast_operator_{metric}", values, ",".join((about, *more, target)))


def condition(kind: str, reason: str, values: str, status: str = "True") -> dict[str, str]:
    """Return the series of a condition that the operator exports."""
    return operated("condition", values, f'type="{kind}",status="{status}",reason="{reason}"')


def replicas(desired: str, ready: str, pod: str = "operator-0") -> dict[str, str]:
    """Return the series that the operator exports about the number of workers."""
    return operated("replicas", desired, 'state="desired"', pod=pod) | operated(
        "replicas", ready, 'state="ready"', pod=pod
    )


def ray(head: str, storage: str = "1x60") -> dict[str, str]:
    """Return the series that the operator exports about a Ray cluster."""
    return operated("ray_ready", head, 'part="head"') | operated("ray_ready", storage, 'part="storage"')


def one_after_another(pods: int) -> dict[str, str]:
    """Return the series of pods that are created one after another, each of which loads its model for five minutes."""
    return {
        f"up{{{TARGET.replace('chat-0', f'chat-{i}')}}}": f"_x{5 * i} 0x5 1x{5 * (pods - i)}" for i in range(1, pods)
    }


ON_RAY: dict[str, Any] = {"runtime": {"ray": {}}}
IN_PLACE: dict[str, Any] = {"rollout": {"startupSeconds": 600, "maxSurge": 0, "maxUnavailable": 1}}
"""A rollout stops a worker before it starts the next, because there is no free GPU."""
TO_ZERO: dict[str, Any] = {"scaling": {"minReplicas": 0, "maxReplicas": 2}}
RAMP = " ".join(f"{count}x3" for count in range(3, 20))
"""Another replica every four minutes."""
GATED = condition("Ready", "SchedulingGated", "1x60")
CRITICAL, WARNING = "critical", "warning"
NOT_READY = {("BallastWorkerNotReady", CRITICAL)}
NO_WORKER = {("BallastNoWorkerReady", CRITICAL)}
NOT_MET = {("BallastOfflineReservationNotMet", WARNING)}
LATE = {("BallastDeadlineAtRisk", WARNING)}
LETTERS = {("BallastDeadLetters", WARNING)}
"""What fires for half an hour after Prometheus finds the letters of a queue."""
HEAD_DOWN = {("BallastRayHeadDown", CRITICAL)}
NO_REDIS = {("BallastRedisUnreachable", CRITICAL)}
RESTARTS = " ".join(["{0} {0} stale _ _"] * 20)
"""A value of the operator, which serves for two minutes, is away for three, and starts again."""
SCENARIOS = (
    Scenario("nothing is scraped", {}, "1d"),
    Scenario("all objectives met", judged("ttft", f"0+60x{MINUTES}", f"0x{MINUTES}"), "8h"),
    Scenario(
        "half a percent misses and one percent may",
        judged("ttft", f"0+199x{MINUTES}", f"0+1x{MINUTES}") | judged("ttft", "0x600", f"0+5x{MINUTES}", of="offline"),
        "8h",
    ),
    Scenario(
        "two percent miss on two workers for days",
        judged("ttft", f"0+49x{MINUTES}", f"0+1x{MINUTES}", pods=2),
        "8h",
        {("BallastTtftBudgetBurn", WARNING)},
    ),
    Scenario(
        "a fifth of the embeddings misses its latency",
        judged("latency", f"0+80x{MINUTES}", f"0+20x{MINUTES}"),
        "2h",
        {("BallastLatencyBudgetBurn", CRITICAL), ("BallastLatencyBudgetBurn", WARNING)},
        {"slo": {"latencyMilliseconds": 30}, "engine": {"backend": "vllm"}},
    ),
    Scenario(
        "a fifth misses for an hour after a good day",
        judged("tpot", "0+100x1440 144000+80x70", "0x1440 0+20x70"),
        "25h5m",
        {("BallastTpotBudgetBurn", CRITICAL)},
    ),
    Scenario(
        "a fifth missed for an hour, over for ten minutes",
        judged("tpot", "0+100x1440 144000+80x60 148800+100x20", "0x1440 0+20x60 1200x20"),
        "25h12m",
        over={("BallastTpotBudgetBurn", CRITICAL)},
    ),
    Scenario(
        "a tenth misses for six hours",
        judged("ttft", "0+100x200 20000+90x400", "0x200 0+10x400"),
        "9h30m",
        {("BallastTtftBudgetBurn", CRITICAL), ("BallastTtftBudgetBurn", WARNING)},
    ),
    Scenario(
        "five requests an hour, one of them late",
        judged("ttft", "0 0 1 1 1 1 2 2 2 2 3 3 3 4x100", "0 0 0 0 0 1x100"),
        "30m",
    ),
    Scenario(
        "eight requests an hour on two workers, two of them late, for four hours",
        judged(
            "ttft",
            " ".join(f"{count}x19" for count in range(15)),
            " ".join(f"{count}x59" for count in range(6)),
            pods=2,
        ),
        "4h",
        {("BallastTtftBudgetBurn", WARNING)},
    ),
    Scenario(
        "online requests fail or are refused",
        ended(stop="0+100x200", queue_full="0+3x200", failed="0+3x200", draining="0+3x200", invalid="0+500x200")
        | ended("offline", stop="0+5000x200"),
        "2h",
        {("BallastAvailabilityBudgetBurn", CRITICAL), ("BallastAvailabilityBudgetBurn", WARNING)},
    ),
    Scenario(
        "clients disconnect and send invalid requests, and offline requests fail",
        ended(stop="0+50x200", length="0+50x200", failed="0+0.9x200", aborted="0+500x200", invalid="0+500x200")
        | ended("offline", failed="0+500x200"),
        "2h",
    ),
    Scenario("the reservation is met", gauge("ballast_offline_reservation_met", "1x60"), "30m"),
    Scenario("one poll found it not met", gauge("ballast_offline_reservation_met", "1x20 0 1x20"), "30m"),
    Scenario(
        "every third poll finds it not met",
        gauge("ballast_offline_reservation_met", " ".join(["1 1 0"] * 20)),
        "40m",
        NOT_MET,
    ),
    Scenario(
        "the reservation is not met on one of two workers",
        gauge("ballast_offline_reservation_met", "1x60")
        | gauge("ballast_offline_reservation_met", "0x60", TARGET.replace("chat-0", "chat-1")),
        "40m",
        NOT_MET,
    ),
    Scenario(
        "the reservation was not met and is again",
        gauge("ballast_offline_reservation_met", "0x20 1x40"),
        "40m",
        over=NOT_MET,
    ),
    Scenario("the reservation is not met", gauge("ballast_offline_reservation_met", "1x10 0x60"), "40m", NOT_MET),
    Scenario("a job is late", gauge("ballast_jobs_at_risk", "0x5 1x30", QUEUE), "20m", LATE),
    Scenario(
        "a job is late, and workers could not report it for five minutes",
        gauge("ballast_jobs_at_risk", "1x10 stale _x4 1x30", QUEUE),
        "18m",
        LATE,
    ),
    Scenario(
        "a job is late, and no worker is left",
        gauge("ballast_jobs_at_risk", "1x10 stale", QUEUE)
        | replicas("0x60", "0x60")
        | condition("DeadlineAtRisk", "Late", "1x60"),
        "40m",
        LATE,
    ),
    Scenario(
        "a job was late for three minutes, and no worker is left",
        gauge("ballast_jobs_at_risk", "0x5 1x2 stale", QUEUE)
        | replicas("0x60", "0x60")
        | condition("DeadlineAtRisk", "OnTime", "1x60", "False"),
        "13m",
    ),
    Scenario(
        "a job is late, as only workers knew, and then Redis is away",
        gauge("ballast_jobs_at_risk", "0x5 1x2 stale", QUEUE)
        | replicas("1x60", "1x60")
        | condition("DeadlineAtRisk", "OnTime", "1x7 stale", "False")
        | condition("DeadlineAtRisk", "NotReported", "_x8 1x60", "Unknown"),
        "14m",
        LATE,
    ),
    Scenario(
        "a job is late, and then is not, as the operator knows later",
        gauge("ballast_jobs_at_risk", "0x60", QUEUE) | condition("DeadlineAtRisk", "Late", "1x60"),
        "40m",
    ),
    Scenario("a job was late for three minutes", gauge("ballast_jobs_at_risk", "0x5 1x2 0x30", QUEUE), "9m"),
    Scenario(
        "another queue's job is late", gauge("ballast_jobs_at_risk", "1x30", f'{TARGET},queue="else/where"'), "20m"
    ),
    Scenario("old dead letters", gauge("ballast_dead_letters", "7x120", QUEUE), "1h", over=LETTERS),
    Scenario("new dead letters", gauge("ballast_dead_letters", "7x50 9x60", QUEUE), "1h", LETTERS),
    Scenario("letters of an hour ago", gauge("ballast_dead_letters", "7x30 9x120", QUEUE), "1h30m", over=LETTERS),
    Scenario("letters were redriven", gauge("ballast_dead_letters", "7x50 0x60", QUEUE), "1h", over=LETTERS),
    Scenario(
        "letters were redriven, and one of two workers was not scraped since",
        gauge("ballast_dead_letters", "7x50 0x60", QUEUE)
        | gauge("ballast_dead_letters", "7x52 0x60", QUEUE.replace("chat-0", "chat-1")),
        "52m",
        over=LETTERS,
    ),
    Scenario(
        "old letters, and no worker for nine days",
        gauge("ballast_dead_letters", f"7x10 _x{9 * 24 * 60} 7x30", QUEUE),
        f"{9 * 24 * 60 + 20}m",
        over=LETTERS,
        spec={"offline": {"resultsDays": 14}},
        every="20m",
    ),
    Scenario(
        "old letters, and Redis was away", gauge("ballast_dead_letters", "7x20 _x10 7x60", QUEUE), "57m", over=LETTERS
    ),
    Scenario(
        "new letters, and then Redis is away", gauge("ballast_dead_letters", "7x50 9x5 stale", QUEUE), "1h5m", LETTERS
    ),
    Scenario(
        "new letters after a rollout, and then Redis is away",
        gauge("ballast_dead_letters", "0x35 stale", QUEUE)
        | gauge("ballast_dead_letters", "_x36 9x10 stale", QUEUE.replace("chat-0", "chat-1")),
        "55m",
        LETTERS,
    ),
    Scenario(
        "letters were redriven after a rollout, and then Redis is away",
        gauge("ballast_dead_letters", "7x35 stale", QUEUE)
        | gauge("ballast_dead_letters", "_x36 7x5 0x5 stale", QUEUE.replace("chat-0", "chat-1")),
        "55m",
        over=LETTERS,
    ),
    Scenario(
        "new letters in a new queue, and then Redis is away",
        gauge("ballast_dead_letters", "_x40 5x5 stale", QUEUE),
        "55m",
        LETTERS,
    ),
    Scenario(
        "new letters, and then Redis is away for long",
        gauge("ballast_dead_letters", "7x50 9x5 stale _x5 9x60", QUEUE),
        "1h25m",
        over=LETTERS,
    ),
    Scenario(
        "new letters after a job with letters was deleted",
        gauge("ballast_dead_letters", "9x50 2x5 5x60", QUEUE),
        "1h",
        LETTERS,
    ),
    Scenario("letters of a queue that is new", gauge("ballast_dead_letters", "_x40 5x60", QUEUE), "50m", LETTERS),
    Scenario(
        "letters of a queue that was new", gauge("ballast_dead_letters", "_x40 5x60", QUEUE), "1h15m", over=LETTERS
    ),
    Scenario(
        "Redis is full, and entries of inboxes wait",
        gauge("ballast_feeder_failures_total", "0x20 1+60x30", TARGET + ',task="inbox"'),
        "45m",
        {("BallastFeederFailing", WARNING)},
    ),
    Scenario(
        "a task failed once", gauge("ballast_feeder_failures_total", "0x20 1x30", TARGET + ',task="prepare"'), "45m"
    ),
    Scenario("Redis was away for a minute", gauge("ballast_redis_up", "1x5 0 1x30"), "8m"),
    Scenario("Redis is away", gauge("ballast_redis_up", "1x5 0x30"), "10m", NO_REDIS),
    Scenario(
        "Redis is away, and the resource has no worker",
        replicas("0x60", "0x60") | condition("DeadlineAtRisk", "RedisUnreachable", "1x60", "Unknown"),
        "10m",
        NO_REDIS,
        TO_ZERO,
    ),
    Scenario(
        "the operator cannot use the Redis that workers use",
        gauge("ballast_redis_up", "1x60") | condition("DeadlineAtRisk", "RedisUnreachable", "1x60", "Unknown"),
        "10m",
    ),
    Scenario(
        "Redis is back, and the resource has no worker",
        replicas("0x60", "0x60") | condition("DeadlineAtRisk", "RedisUnreachable", "1x10 stale", "Unknown"),
        "12m",
        set(),
        TO_ZERO,
        over=NO_REDIS,
    ),
    Scenario(
        "one of two workers cannot reach Redis",
        gauge("ballast_redis_up", "1x30") | gauge("ballast_redis_up", "0x30", TARGET.replace("chat-0", "chat-1")),
        "10m",
        NO_REDIS,
    ),
    Scenario("a file of API keys is replaced", gauge("ballast_config_invalid", "0x10 1x2 0x30"), "20m"),
    Scenario(
        "one of two workers finds an invalid file of API keys",
        gauge("ballast_config_invalid", "0x60")
        | gauge("ballast_config_invalid", "0x10 1x50", TARGET.replace("chat-0", "chat-1")),
        "20m",
        {("BallastConfigInvalid", WARNING)},
    ),
    Scenario("a worker loads its model", gauge("up", "0x9 1x30"), "15m"),
    Scenario("a worker does not come", gauge("up", "0x60"), "20m", NOT_READY),
    Scenario(
        "an engine failed and the process stays",
        gauge("up", "1x60") | gauge("ballast_engine_healthy", "0x60"),
        "20m",
        NOT_READY,
    ),
    Scenario("a scrape fails, and all workers are ready", gauge("up", "0x60") | replicas("1x60", "1x60"), "20m"),
    Scenario("the operator misses a worker", replicas("3x60", "2x60"), "20m", NOT_READY),
    Scenario("scaling adds replicas one after another", replicas(f"2x9 {RAMP}", f"2x19 {RAMP}"), "50m"),
    Scenario("a further replica is not ready for twice its start", replicas("2x9 3x60", "2x70"), "30m"),
    Scenario("a further replica is never ready", replicas("2x9 3x60", "2x70"), "37m", NOT_READY),
    Scenario("no worker of two serves", replicas("2x60", "2x20 0x40"), "27m", NO_WORKER),
    Scenario("no worker of two serves for long", replicas("2x60", "2x20 0x40"), "34m", NO_WORKER | NOT_READY),
    Scenario(
        "no worker of two serves, and one may be missing", replicas("2x60", "2x20 0x40"), "27m", NO_WORKER, IN_PLACE
    ),
    Scenario(
        "no worker of three serves while the operator restarts again and again",
        replicas(f"3x20 {RESTARTS.format(3)}", f"3x20 {RESTARTS.format(0)}"),
        "34m",
        NO_WORKER | NOT_READY,
    ),
    Scenario(
        "most workers with a fast start are missing while the operator restarts again and again",
        replicas(f"4x20 {RESTARTS.format(4)}", f"4x20 {RESTARTS.format(1)}"),
        "34m",
        NOT_READY,
        {"rollout": {"startupSeconds": 60}},
    ),
    Scenario(
        "all workers are back, and another replica of the operator becomes active",
        replicas("3x12 stale", "3x10 0x1 stale") | replicas("_x14 3x60", "_x14 3x60", pod="operator-1"),
        "20m",
    ),
    Scenario("a rollout stops the only worker", replicas("1x60", "1x20 0x40"), "27m", spec=IN_PLACE),
    Scenario("Ray restarts the only worker in its pod", replicas("1x60", "1x20 0x40"), "27m", spec=ON_RAY),
    Scenario("a resource was stopped for a moment", replicas("1x20 0x5 1x40", "1x20 0x40"), "33m"),
    Scenario(
        "the last worker of a resource that scales to zero ends", replicas("1x60", "1x20 0x40"), "27m", spec=TO_ZERO
    ),
    Scenario("all replicas are ready", replicas("3x60", "3x60"), "20m"),
    Scenario("the resource is scaled to zero", replicas("0x60", "0x60"), "20m", spec=IN_PLACE),
    Scenario("a rollout replaces 20 workers on their own GPUs", replicas("20x120", "19x120"), "1h40m", spec=IN_PLACE),
    Scenario("a rollout loads 20 models in turn", replicas("20x120", "20x120") | one_after_another(20), "1h30m"),
    Scenario("two workers are missing and one may be", replicas("4x60", "2x60"), "20m", NOT_READY, IN_PLACE),
    Scenario(
        "the only worker is missing, and may be in a rollout", replicas("1x60", "0x60"), "20m", NOT_READY, IN_PLACE
    ),
    Scenario("all workers are missing and one may be", replicas("4x60", "0x60"), "20m", NOT_READY, IN_PLACE),
    Scenario(
        "a worker that may be missing in a rollout does not come back",
        replicas("4x500", "3x500"),
        "6h30m",
        {("BallastWorkerNotReady", WARNING)},
        IN_PLACE,
    ),
    Scenario("Kueue holds back two of four workers", replicas("4x60", "2x60") | GATED, "50m"),
    Scenario("Kueue holds back all workers", replicas("4x60", "0x60") | GATED, "20m", NOT_READY),
    Scenario("Ray's head is replaced in two minutes", ray("0x2 1x30"), "10m", set(), ON_RAY),
    Scenario(
        "a resource on Ray is stopped, and its head ends first",
        ray("1x5 0x1 stale") | replicas("2x4 0x60", "2x4 0x60"),
        "12m",
        set(),
        ON_RAY,
    ),
    Scenario(
        "Ray's head does not come back, and the operator restarts again and again",
        ray(RESTARTS.format(0)),
        "10m",
        HEAD_DOWN,
        ON_RAY,
    ),
    Scenario(
        "Ray's head is away, and no Redis keeps its state", ray("0x30"), "2m", HEAD_DOWN, ON_RAY, keeps_head_state=False
    ),
    Scenario(
        "the Redis of Ray's head is away, and so the head ends",
        ray("0x30", "0x30"),
        "10m",
        {("BallastRayStorageDown", CRITICAL)},
        ON_RAY,
    ),
    Scenario(
        "Ray starts a replica",
        condition("Progressing", "RayReplicasPending", "1x9 stale") | replicas("2x60", "2x60"),
        "15m",
        set(),
        ON_RAY,
    ),
    Scenario(
        "Ray finds no place for a replica",
        condition("Progressing", "RayReplicasPending", "1x60"),
        "20m",
        {("BallastRayReplicasPending", WARNING)},
        ON_RAY,
    ),
    Scenario(
        "Ray finds no place for a replica while the operator restarts again and again",
        condition("Progressing", "RayReplicasPending", RESTARTS.format(1))
        | replicas(RESTARTS.format(2), RESTARTS.format(2)),
        "20m",
        {("BallastRayReplicasPending", WARNING)},
        ON_RAY,
    ),
)
