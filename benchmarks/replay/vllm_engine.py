"""vLLM in this process, with or without Ballast, and a loop that replays online and offline requests on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from random import Random
from typing import Any

from ballast_sim.replay.traffic import Arrival

BUDGET = 2048
"""Most tokens of a step."""
MOST_WAIT = 120.0
"""Seconds after the last arrival when a replay ends, even if online requests are left."""
PLAIN, PRIORITIES, BALLAST = "plain vLLM", "priorities", "Ballast"
SCHEDULERS = (PLAIN, PRIORITIES, BALLAST)
OBJECTIVE = 0.99
"""Share of the online requests that shall meet the SLO: the default of `slo.objectivePercent`."""
UNBOUNDED = {"ttft": inf, "tpot": inf}
"""A policy for the time in which Ballast learns its cost model."""


@dataclass(frozen=True)
class Feed:
    """How offline requests are sent to the engine. They never run out."""

    most: int = 0
    """Requests that are sent and not yet answered, at most."""
    rate: float = inf
    """Requests per second."""

    def due(self, now: float, num_sent: int, num_waiting: int) -> bool:
        """Return whether another request is due."""
        return num_waiting < self.most and (self.rate == inf or num_sent <= self.rate * now)

    def upcoming(self, num_sent: int) -> float:
        """Return the time when the next request is due, if the engine is idle."""
        return num_sent / self.rate if self.most else inf


@dataclass
class Answer:
    """An online request. Times are in seconds since the begin of the replay."""

    arrival: float
    first: float = 0.0
    """When its first token came."""
    last: float = 0.0
    num_output: int = 0
    """Wanted tokens."""

    @property
    def ttft(self) -> float:
        """Return the time to the first token."""
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Return the mean time between two tokens; 0 for an answer of one token."""
        return (self.last - self.first) / (self.num_output - 1) if self.num_output > 1 else 0.0


@dataclass
class Replayed:
    """The result of a replay."""

    online: list[Answer] = field(default_factory=list)
    online_tokens: int = 0
    """Tokens of prompts and answers. A prompt counts with its first token."""
    offline: list[tuple[float, int]] = field(default_factory=list)
    """Time and tokens of each step that answered offline requests."""

    def offline_tokens(self, until: float) -> int:
        """Return the offline tokens before a time."""
        return sum(tokens for at, tokens in self.offline if at < until)


class VllmEngine:
    """An engine of vLLM. Set `time.monotonic` to the clock before, so that vLLM and Ballast read it."""

    def __init__(self, clock: Any, model: str, scheduler: str, *, slots: int, longest: int, **options: Any) -> None:
        """Load the model.

        Args:
            clock: Returns the seconds, and has `jump(seconds)`.
            model: The checkpoint.
            scheduler: One of `SCHEDULERS`.
            slots: Most requests in a step.
            longest: Most tokens of a request.
            options: Other arguments of vLLM's engine.
        """
        from vllm import EngineArgs, LLMEngine  # noqa: PLC0415 - after the clock is set

        self.is_priority = scheduler == PRIORITIES
        if self.is_priority:
            options["scheduling_policy"] = "priority"
        if scheduler == BALLAST:
            options |= {
                "scheduler_cls": "ballast_vllm.scheduler.BallastScheduler",
                "additional_config": {
                    "ballast": {"ttft": 1.0, "tpot": 1.0, "offline_share": 0.0, "objective": OBJECTIVE}
                },
            }
        self.clock = clock
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model, max_model_len=longest, max_num_seqs=slots, max_num_batched_tokens=BUDGET,
                disable_log_stats=True, seed=0, **options,
            )
        )  # fmt: skip
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self._serial = count()

    def replay(
        self,
        online: Sequence[Arrival],
        offline: Iterator[Arrival],
        feed: Feed,
        *,
        seconds: float = 0.0,
        pause: Callable[[Replayed], None] | None = None,
        pause_seconds: float = inf,
    ) -> Replayed:
        """Replay until the last online request has its answer, and for `seconds` if there are no online requests.

        `pause` is called with the result so far after each `pause_seconds`. The clock leaves out its time.
        """
        last = online[-1].seconds if online else seconds
        due = dict(zip((f"online-{next(self._serial)}" for _ in online), online, strict=True))
        found = {name: Answer(arrival.seconds, num_output=arrival.num_output) for name, arrival in due.items()}
        replayed = Replayed(list(found.values()))
        left = list(due.items())[::-1]
        waiting: dict[str, int] = {}
        num_sent, num_left, next_pause = 0, len(due), pause_seconds
        while feed.due(0.0, num_sent, len(waiting)):  # offline work that is there before the first online request
            num_sent += 1
            self._add_offline(next(offline), waiting)
        begin = self.clock()
        while (now := self.clock() - begin) < last or (num_left and now < last + MOST_WAIT):
            if pause is not None and now >= next_pause:
                next_pause += pause_seconds
                pause(replayed)
                self.clock.jump(now + begin - self.clock())
            while left and left[-1][1].seconds <= now:
                name, arrival = left.pop()
                self._add(name, arrival, late=now - arrival.seconds)
            while feed.due(now, num_sent, len(waiting)):
                num_sent += 1
                self._add_offline(next(offline), waiting)
            if not self.engine.has_unfinished_requests():
                wanted = min(left[-1][1].seconds if left else last, feed.upcoming(num_sent))
                self.clock.jump(max(0.0, wanted - now))
                continue
            outputs = self.engine.step()
            now = self.clock() - begin
            offline_tokens = 0
            for output in outputs:
                name, num = output.request_id, len(output.outputs[0].token_ids)
                if name in waiting:
                    offline_tokens += num + waiting[name]
                    waiting[name] = 0  # the prompt counts with the first token
                    if output.finished:
                        del waiting[name]
                elif name in found:
                    answer = found[name]
                    replayed.online_tokens += num + (0 if answer.first else due[name].num_prompt)
                    answer.first = answer.first or now
                    if output.finished:
                        answer.last = now
                        num_left -= 1
            if offline_tokens:
                replayed.offline.append((now, offline_tokens))
        end = self.clock() - begin
        unfinished = [name for name, answer in found.items() if not answer.last]
        for name in unfinished:
            found[name].first = found[name].first or end
            found[name].last = end
        self.engine.abort_request([*waiting, *unfinished])
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return replayed

    def _add_offline(self, arrival: Arrival, waiting: dict[str, int]) -> None:
        name = f"offline-{next(self._serial)}"
        waiting[name] = arrival.num_prompt
        self._add(name, arrival)

    def _add(self, name: str, arrival: Arrival, *, late: float = 0.0) -> None:
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        kind = name.partition("-")[0]
        prompt = Random(name).choices(range(5, 255), k=arrival.num_prompt)
        sampling = SamplingParams(
            max_tokens=arrival.num_output, ignore_eos=True, temperature=0.0, detokenize=False,
            output_kind=RequestOutputKind.DELTA, extra_args={"ballast": {"class": kind}},
        )  # fmt: skip
        priority = 10 if self.is_priority and kind == "offline" else 0
        self.engine.add_request(
            name, {"prompt_token_ids": prompt}, sampling, arrival_time=time.time() - late, priority=priority
        )


def backlog(slots: int) -> Feed:
    """Return a feed that keeps more requests waiting than there are slots."""
    return Feed(3 * slots)
