"""Kill every process of `ballast up` at random, break the network, and check that nothing is lost, doubled or leaked.

python benchmarks/chaos                        one hour
python benchmarks/chaos --minutes 2 --seed 7   the kills and faults of seed 7, for two minutes
python benchmarks/chaos --kills 1000           until 1,000 processes were killed
python benchmarks/chaos --cluster              components of a Kubernetes cluster instead (see e2e/README.md)

Three workers serve one queue: one `ballast up` has the embedded Valkey, two reach it through toxiproxy. Jobs and online
requests come all the time. A kill is a SIGKILL of one process, or of all processes of one `ballast up` at once. Kills
come in bursts, so they hit processes that work, that start, and that end. The seed decides what is killed and broken,
and in which order. The machine decides how far a process has come by then.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import httpx
from checks import SETTLE_SECONDS, descriptor_leaks, leaks_in_redis, leaks_in_workers, results_of, wait_for
from load import MODEL, Jobs, Online, Outcome
from network import MISSING, Fault, Link, draw, program, toxiproxy
from redis import Redis
from stacks import Kind, Stack

import ballast_cli
from ballast_queue.errors import QueueError
from ballast_queue.redis_store import Queue

FIRST, OTHERS = "first", ("second", "third")
TREE_SHARE = 0.35
"""Share of the kills that end all processes of one `ballast up` at once, as a power cut does."""
FAULT_SHARE = 0.3
"""Share of the events that are network faults."""
REST_SECONDS = 60
"""How long the workers may take to be ready again after a burst of kills. Then the next burst hits them anyway."""
WORK_SECONDS = (2.0, 8.0)
"""How long all workers work between two bursts, at least and at most."""
PROGRESS_SECONDS = 10


def main() -> int:
    """Run, and return 1 if a check failed."""
    options = _parse()
    if options.cluster:
        from on_cluster import run_on_cluster  # noqa: PLC0415  needs e2e/support

        return run_on_cluster(options)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ballast-chaos-"))).resolve()
        path = program()
        if path is None:
            say(MISSING)
        api = None if path is None else stack.enter_context(toxiproxy(path))
        links = {} if api is None else {name: Link(api, name) for name in OTHERS}
        run = Chaos(options, directory, links)
        try:
            problems = run.run()
        except BaseException:
            run.stop()
            raise
        run.print_table(problems)
        if problems:
            kept = Path(tempfile.mkdtemp(prefix="ballast-chaos-logs-"))
            for each in run.stacks:
                (kept / f"{each.name}.log").write_text(each.log_tail(5000))
            say(f"The logs are in {kept}.")
    return 1 if problems else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60, help="most time before the checks (default: 60)")
    parser.add_argument("--kills", type=int, default=None, help="end after this number of kills")
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock; it is printed")
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between two events (default: 2)")
    parser.add_argument("--burst", type=int, default=5, help="mean kills of a burst (default: 5)")
    parser.add_argument("--cluster", action="store_true", help="kill components of a cluster; PROVIDER=local or kind")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = int(time.time())
    return options


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


@dataclass
class Chaos:
    """One run."""

    options: argparse.Namespace
    directory: Path
    links: dict[str, Link]
    stacks: list[Stack] = field(init=False)
    faults: Counter[str] = field(default_factory=Counter)
    num_trees: int = 0
    seconds: float = 0.0
    num_results: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.options.seed)
        self.queue = (
            f"chaos/{uuid4().hex[:8]}"  # a worker that finds another server on the old port finds no queue there
        )
        self.stacks = [self._stack(name) for name in (FIRST, *OTHERS)]
        self.jobs = Jobs(lambda: self.stacks[0].redis_url, self.queue, random.Random(self.options.seed + 1))
        self.online = Online(self.stacks)
        self._heal_at: dict[str, float] = {}
        self._began = self._said_at = 0.0

    @property
    def num_kills(self) -> int:
        """Return the processes killed so far."""
        return sum(sum(stack.killed.values()) for stack in self.stacks)

    def run(self) -> list[str]:
        """Run to the end, and return the problems found."""
        say(f"seed {self.options.seed}, {len(self.stacks)} workers, in {self.directory}")
        for stack in self.stacks:
            stack.start()
            self._follow_redis()
            wait_for(lambda: self.stacks[0].redis_url is not None, seconds=60, pause=0.1)
        if not wait_for(self._all_ready, seconds=SETTLE_SECONDS):
            return ["not all workers became ready before the run", *(stack.log_tail() for stack in self.stacks)]
        self.jobs.start()
        self.online.start()
        self._break_things()
        return self._settle()

    def _break_things(self) -> None:
        self._began = self._said_at = time.monotonic()
        most = self.options.kills
        until = self._began + 60 * self.options.minutes
        while time.monotonic() < until and (most is None or self.num_kills < most):
            self._wait(lambda: False, self.rng.uniform(*WORK_SECONDS))
            before, kills = self.num_kills, self.rng.randint(1, 2 * self.options.burst - 1)
            while self.num_kills < before + kills and time.monotonic() < until:
                self._event()
                self._wait(lambda: False, self.rng.expovariate(1 / self.options.pause))
            self._wait(self._all_ready, REST_SECONDS)
        self.seconds = time.monotonic() - self._began

    def _wait(self, what: Callable[[], bool], seconds: float) -> None:
        """Wait until `what` returns True, at most `seconds`, and keep the network and the progress up to date."""
        until = time.monotonic() + seconds
        while True:
            self._follow_redis()
            self._heal(time.monotonic())
            if time.monotonic() >= self._said_at + PROGRESS_SECONDS:
                self._said_at = time.monotonic()
                self._say_progress(self._said_at - self._began)
            if what() or time.monotonic() >= until:
                return
            time.sleep(max(0.0, min(0.1, until - time.monotonic())))

    def _event(self) -> None:
        """Draw an event. The draws depend on the seed alone."""
        dice, tree_dice = self.rng.random(), self.rng.random()
        stack = self.rng.choice(self.stacks)
        kind = self.rng.choice(list(Kind) if stack.has_valkey else [Kind.UP, Kind.WORKER])
        link, (fault, seconds) = self.rng.choice(OTHERS), draw(self.rng)
        if dice < FAULT_SHARE and self.links:
            self._spoil(link, fault, seconds)
            return
        processes = stack.processes()
        if tree_dice < TREE_SHARE:
            self.num_trees += 1
            for process in processes:
                stack.kill(process)
        elif processes:
            stack.kill(next((process for process in processes if process.kind is kind), processes[0]))

    def _spoil(self, name: str, fault: Fault, seconds: float) -> None:
        if name in self._heal_at:
            return
        self.links[name].spoil(fault)
        self.faults[fault.name] += 1
        self._heal_at[name] = time.monotonic() + seconds

    def _heal(self, now: float) -> None:
        for name in [name for name, at in self._heal_at.items() if at <= now]:
            del self._heal_at[name]
            self.links[name].heal()

    def _follow_redis(self) -> None:
        """Point the other workers to the present Valkey, which gets a new port at each start."""
        url = self.stacks[0].redis_url
        if url is None:
            for link in self.links.values():
                link.point_to(None)
            return
        for name in OTHERS:
            file = self.directory / f"{name}.url"
            if name in self.links:
                self.links[name].point_to(url.removeprefix("redis://"))
                wanted = f"redis://127.0.0.1:{self.links[name].port}"
            else:
                wanted = url
            if not file.exists() or file.read_text() != wanted:
                part = file.with_suffix(".part")
                part.write_text(wanted)
                part.replace(file)

    def _settle(self) -> list[str]:
        """End the faults, wait until all is done, and check."""
        say(f"{self.num_kills} kills. No more from here: the workers finish the jobs ...")
        self._heal(float("inf"))
        self._follow_redis()
        problems = []
        if not wait_for(lambda: self._follow_redis() or self._all_ready(), seconds=SETTLE_SECONDS):
            problems.append("not all workers became ready after the last kill")
        self.online.stop()
        self.jobs.stop()
        problems += self.online.lost
        try:
            problems += self._check(str(self.stacks[0].redis_url))
        except (QueueError, httpx.HTTPError) as error:
            problems.append(f"a check could not run: {error!r}")
        return problems + self._end()

    def _check(self, url: str) -> list[str]:
        queue = Queue.connect(url, self.queue, socket_timeout=120)
        problems = []
        with Redis.from_url(url) as connection:
            if not wait_for(lambda: self._is_done(queue), seconds=SETTLE_SECONDS):
                problems.append(f"jobs are not over: {queue.stats().items}")
            self.num_results, differing = results_of(queue, self.jobs)
            problems += differing
            time.sleep(6)  # statuses of dead workers expire after 5 s
            problems += [*leaks_in_redis(queue, connection, self.stacks), *leaks_in_workers(self.stacks)]
            problems += descriptor_leaks(self.stacks, self.links)
        queue.close()
        return problems

    def _end(self) -> list[str]:
        """Stop everything, and return what did not stop."""
        problems = []
        for stack in reversed(self.stacks):
            code = stack.stop()
            if code != 0:
                problems.append(f"{stack.name}: `ballast up` ended with {code} after Ctrl-C")
        wait_for(lambda: not any(stack.processes() for stack in self.stacks), seconds=30)
        for stack in self.stacks:
            problems += [f"{stack.name}: {process.kind} {process.pid} is still there" for process in stack.processes()]
        return problems

    def stop(self) -> None:
        """End all processes of the run at once."""
        for stack in self.stacks:
            stack.stop(seconds=20)
            for process in stack.processes():
                stack.kill(process)

    def _all_ready(self) -> bool:
        return all(stack.is_ready for stack in self.stacks)

    def _is_done(self, queue: Queue) -> bool:
        items = queue.stats().items
        self.jobs.finished = items.succeeded + items.failed + items.cancelled
        return items.waiting + items.leased == 0

    def _say_progress(self, seconds: float) -> None:
        ready = sum(stack.is_ready for stack in self.stacks)
        answered, lost = self.online.outcomes[Outcome.ANSWERED], self.online.outcomes[Outcome.LOST]
        say(
            f"{seconds:6.0f} s  {self.num_kills} kills, {self.faults.total()} faults, {ready} of {len(self.stacks)} "
            f"ready, {self.jobs.finished} of {self.jobs.num_items} items done, {answered} online answers, {lost} lost"
        )

    def print_table(self, problems: Sequence[str]) -> None:
        """Print what was broken, and what came of it."""
        kills: Counter[Kind] = Counter()
        for stack in self.stacks:
            kills.update(stack.killed)
        outcomes = self.online.outcomes
        rows: list[tuple[str, object]] = [
            ("seed", self.options.seed),
            ("minutes", f"{self.seconds / 60:.1f}"),
            *((f"killed: {kind}", kills[kind]) for kind in Kind),
            ("killed: all", kills.total()),
            ("of these, all processes of one `ballast up` at once (times)", self.num_trees),
            ("starts of `ballast up`", sum(stack.starts for stack in self.stacks)),
            *((f"network: {name}", count) for name, count in sorted(self.faults.items())),
            ("network faults", self.faults.total() if self.links else "none: toxiproxy-server is missing"),
            ("jobs", len(self.jobs.submitted)),
            ("jobs cancelled", sum(job.is_cancelled for job in self.jobs.submitted)),
            ("items", self.jobs.num_items),
            ("results", self.num_results),
            *((f"online requests {outcome}", outcomes[outcome]) for outcome in Outcome),
            ("problems", len(problems)),
        ]
        width = max(len(name) for name, _ in rows)
        say("")
        for name, value in rows:
            say(f"| {name:<{width}} | {value!s:>10} |")
        for problem in problems:
            say(f"PROBLEM: {problem}")

    def _stack(self, name: str) -> Stack:
        config: dict[str, object] = {
            "model": {"uri": str(Path(ballast_cli.__file__).parent / "demo" / "model"), "servedName": MODEL},
            "slots": 8,
            "engine": {"threads": 1, "kvMemoryMebibytes": 32},
            "offline": {"queue": self.queue, "leaseSeconds": 5, "maxAttempts": 100},
            "runtime": {} if name == FIRST else {"redisUrlFile": str(self.directory / f"{name}.url")},
        }
        return Stack(name, self.directory / name, config, has_valkey=name == FIRST)


if __name__ == "__main__":
    sys.exit(main())
