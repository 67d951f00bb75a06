"""What the planner does with the budget of a step, and with requests that cannot be in time."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from engine_snapshot import Engine, why
from fake_engine import FakeEngine
from workloads import EXACT, Arrival

from ballast_policy.host import Host
from ballast_policy.learning.cost import CostModel
from ballast_policy.learning.expectation import Expectation
from ballast_policy.learning.interference import Allowance
from ballast_policy.plan import Reason
from ballast_policy.request import OFFLINE, ONLINE, Phase, Request
from ballast_policy.snapshot import PolicyConfig


class TestBudget:
    """With the cost model trusted and an SLO."""

    def make(self, **config) -> Engine:
        return Engine(slots=64, ttft=0.2, tpot=0.02, offline_share=0.05, **config)

    def slo(self) -> dict[str, float]:
        return {"ttft": 0.2, "tpot": 0.02}

    def test_without_online_a_newcomer_that_may_come_bounds_the_step(self):
        engine = self.make(can_suspend=False)
        engine.decoding(OFFLINE)
        engine.extra["typical_prompt"] = 100

        decided = engine.plan()

        fixed = EXACT.k0 + EXACT.decode(10)
        assert decided.budget_seconds == pytest.approx(0.2 - fixed - EXACT.prefill(0, 100))

    def test_lent_decodes_are_parked_until_the_step_fits(self):
        engine = self.make()
        engine.cost = replace(EXACT, k3=0.001)
        engine.decoding(ONLINE, **self.slo())
        items = [engine.decoding(OFFLINE) for _ in range(60)]

        decided = engine.plan()

        assert decided.predicted_seconds <= decided.budget_seconds <= 0.02
        assert decided.predicted_seconds + 0.0012 > decided.budget_seconds
        assert not decided.preempt
        assert decided.park == tuple(items[-len(decided.park) :])
        assert why(decided, items[-1]) is Reason.STEP_BUDGET

    def test_prefill_is_skipped_before_decodes_are_parked(self):
        engine = self.make()
        engine.cost = replace(EXACT, k1=0.02)
        engine.decoding(ONLINE, **self.slo())
        for _ in range(10):
            engine.decoding(OFFLINE)
        item = engine.add(OFFLINE, 50)

        decided = engine.plan()

        assert why(decided, item) is Reason.STEP_BUDGET
        assert not decided.park

    def test_a_parked_decode_is_resumed_before_lent_prefill_takes_the_time(self):
        engine = Engine(slots=64, ttft=0.2, tpot=0.02, offline_share=0.0)
        engine.cost = replace(EXACT, k1=0.001, k3=0.002)
        engine.decoding(ONLINE, **self.slo())
        prompt = engine.prefilling(OFFLINE, tokens=500)
        parked = engine.decoding(OFFLINE, phase=Phase.PARKED)

        decided = engine.plan()

        assert decided.resume == (parked,)
        assert 1 < dict(decided.grants)[prompt] < 64

    def test_the_reservation_is_served_even_where_the_budget_is_spent(self):
        engine = self.make()
        engine.decoding(ONLINE, ttft=0.2, tpot=0.001)
        items = [engine.decoding(OFFLINE) for _ in range(10)]

        decided = engine.plan()

        assert [request for request, _ in decided.grants if request in items] == items[:4]
        assert decided.predicted_seconds > decided.budget_seconds

    def test_a_chunk_is_as_large_as_the_budget_allows(self):
        engine = self.make(chunk_tokens=512)
        engine.decoding(ONLINE, **self.slo())
        items = [engine.add(OFFLINE, 600)]

        decided = engine.plan()

        assert 26 < dict(decided.grants)[items[0]] < 512
        assert decided.predicted_seconds == pytest.approx(decided.budget_seconds, rel=0.01)

    def test_a_cap_bounds_a_step_by_what_online_alone_takes_for_its_part(self):
        engine = Engine()
        engine.extra["allowance"] = Allowance(share=0.1)
        engine.decoding(ONLINE)
        engine.decoding(OFFLINE)

        decided = engine.plan()

        alone = EXACT.k0 + EXACT.decode(10)
        assert decided.predicted_seconds - decided.parts.offline == pytest.approx(alone)
        assert decided.budget_seconds == pytest.approx(1.1 * alone)

    def test_a_cap_bounds_a_step_without_online_as_long_as_it_is_expected(self):
        engine = Engine()
        engine.extra["allowance"] = Allowance(share=0.1)
        engine.decoding(OFFLINE)
        engine.extra["expectation"] = Expectation(online_until=engine.now + 1)

        assert engine.plan().budget_seconds < inf

        engine.now += 2

        assert engine.plan().budget_seconds == inf

    def test_a_waiting_request_bounds_the_step_that_it_waits_for(self):
        engine = self.make(offline_max_share=1.0, chunk_tokens=16)
        relaxed = self._budget_with_waiting(engine, late=0.0)
        pressed = self._budget_with_waiting(engine, late=0.15)

        assert pressed < relaxed

    def _budget_with_waiting(self, engine: Engine, *, late: float) -> float:
        engine.waiting.clear()
        engine.residents.clear()
        engine.decoding(OFFLINE)
        engine.add(ONLINE, 64, arrival=engine.now - late, **self.slo())
        return engine.plan().budget_seconds

    def test_an_overdue_request_does_not_freeze_offline(self):
        engine = self.make()
        engine.decoding(ONLINE, arrival=engine.now - 60, **self.slo())
        item = engine.decoding(OFFLINE)
        for _ in range(5):
            engine.decoding(OFFLINE)

        decided = engine.plan()

        assert item in dict(decided.grants)
        assert not decided.park
        assert decided.budget_seconds == pytest.approx(0.02)

    def test_an_untrusted_model_lends_a_fixed_share(self):
        engine = self.make()
        engine.cost = CostModel()
        engine.decoding(ONLINE, **self.slo())
        for _ in range(60):
            engine.decoding(OFFLINE)

        decided = engine.plan()

        offline = sum(request.request_class is OFFLINE for request, _ in decided.grants)
        assert offline == 4 + 16
        assert decided.budget_seconds == inf

    def test_an_untrusted_model_lends_a_fixed_share_of_the_chunk(self):
        engine = Engine(slots=64, ttft=0.2, tpot=0.02, offline_share=0.0)
        engine.cost = CostModel()
        engine.decoding(ONLINE, **self.slo())
        item = engine.add(OFFLINE, 500)

        assert dict(engine.plan().grants)[item] == 16

        engine.residents.clear()

        assert dict(engine.plan().grants)[item] == 64, "without online, all of it"

        engine.extra["expectation"] = Expectation(online_until=engine.now + 1)

        assert dict(engine.plan().grants)[item] == 16, "an online request is expected"

        engine.config = replace(engine.config, ttft=inf, tpot=inf)

        assert dict(engine.plan().grants)[item] == 64, "without an SLO, all of it"

    def test_the_ceiling_shrinks_the_reservation_not_online(self):
        engine = Engine(slots=16, offline_share=0.25)
        engine.extra["ceiling"] = 4
        for _ in range(4):
            engine.add(OFFLINE, 4)
        for _ in range(16):
            engine.add(ONLINE, 3)

        admitted = engine.plan().admit

        assert sum(request.request_class is OFFLINE for request in admitted) == 1
        assert sum(request.request_class is ONLINE for request in admitted) == 15


class TestTriage:
    """EXACT takes 5 ms a step, 50 us a token of prefill and 0.2 ms a decode."""

    def make(self, **config) -> Engine:
        usual = {"ttft": 1.0, "tpot": 0.05, "offline_share": 0.0, "chunk_tokens": 512, "num_blocks": 20_000}
        return Engine(**usual | config)

    def waits(self, engine: Engine, tokens: int, waited: float = 0.0) -> Request:
        return engine.add(ONLINE, tokens, arrival=engine.now - waited, ttft=1.0, tpot=0.05)

    def decodes(self, engine: Engine, *, num_output: int = 8, taken: float = 0.4) -> Request:
        """At its pace by default: whatever more the next token waits is too late for its mean."""
        first = engine.now - taken
        return engine.decoding(
            ONLINE, arrival=first - 0.1, first_token=first, num_output=num_output, ttft=1.0, tpot=0.05
        )

    def test_requests_that_can_be_in_time_go_before_a_prompt_that_cannot(self):
        engine = self.make()
        long, short = self.waits(engine, 30_000), self.waits(engine, 200)

        decided = engine.plan()

        granted = dict(decided.grants)
        assert granted[short] == 200
        assert granted[long] == 2048 - 200

    def test_a_deferred_request_gets_a_part_of_each_step(self):
        engine = self.make()
        long = self.waits(engine, 30_000)
        others = [self.waits(engine, 600) for _ in range(8)]

        decided = engine.plan()
        granted = dict(decided.grants)

        assert granted[long] == 204, "a tenth of the step"
        assert why(decided, long) is Reason.ONLINE_FIRST
        assert sum(granted.get(other, 0) for other in others) == 2048 - 204

    @pytest.mark.parametrize("cached", [0, 100])
    def test_a_step_ends_when_a_prompt_that_it_finishes_is_due(self, cached: int):
        engine = self.make()
        urgent, other = self.waits(engine, 200 + cached, waited=0.97), self.waits(engine, 2_000)
        urgent.num_cached = cached

        decided = engine.plan()

        granted = dict(decided.grants)
        assert granted[urgent] == 200
        assert decided.predicted_seconds <= 0.03 < decided.predicted_seconds + EXACT.prefill(granted[other], 1)

    def test_a_step_ends_when_a_prompt_that_only_draws_its_token_is_due(self):
        engine = self.make()
        self.waits(engine, 1)
        cached, _ = self.waits(engine, 1, waited=0.97), self.waits(engine, 2_000)

        decided = engine.plan()

        assert cached in decided.admit
        assert decided.predicted_seconds <= 0.03

    def test_a_single_token_that_finds_no_block_does_not_end_a_step(self):
        engine = self.make()
        prompt = engine.prefilling(ONLINE, tokens=100, done=8)
        single = engine.add(ONLINE, 1, priority=1, ttft=0.006)
        engine.extra["free_blocks"] = 20

        decided = engine.plan()

        assert why(decided, single) is Reason.NO_KV
        assert dict(decided.grants) == {prompt: 80}, "it takes 4 ms"

    def test_a_prompt_that_is_late_in_any_case_does_not_end_a_step(self):
        engine = self.make()
        late, other = self.waits(engine, 1, waited=0.999), self.waits(engine, 2_000)

        decided = engine.plan()

        assert dict(decided.grants)[other] == 2_000
        assert late in decided.admit

    def test_an_answer_that_began_in_time_does_not_end_a_step(self):
        engine = self.make()
        again, other = self.waits(engine, 200, waited=0.97), self.waits(engine, 1_800)
        again.num_output = 2

        assert dict(engine.plan().grants) == {again: 200, other: 1_800}

    @pytest.mark.parametrize(
        ("first", "granted"), [pytest.param(63, [63, 100], id="one is left"), pytest.param(64, [64], id="none is left")]
    )
    def test_without_time_an_encoder_starts_prompts_within_an_eighth_of_the_chunk(self, first: int, granted: list[int]):
        engine = Engine(ttft=0.001, offline_share=0.0, chunk_tokens=512, is_encoder=True)
        for tokens in (first, 100):
            engine.add(ONLINE, tokens)

        assert [tokens for _, tokens in engine.plan().grants] == granted

    def test_online_may_prefill_an_eighth_of_the_chunk_beside_decodes_that_cannot_wait(self):
        engine = Engine(ttft=1.0, tpot=0.006, offline_share=0.0, chunk_tokens=4096)
        decode = engine.decoding(ONLINE, tpot=0.006, num_output=50, first_token=engine.now - 50 * 0.006)
        prompt, _ = (engine.add(ONLINE, 1_000) for _ in range(2))

        assert dict(engine.plan().grants) == {decode: 1, prompt: 512}

    def test_a_request_whose_kv_a_higher_priority_takes_does_not_end_the_service_of_the_others(self):
        engine = self.make()
        first, late = engine.prefilling(ONLINE, tokens=20, done=8), engine.prefilling(ONLINE, tokens=410, done=400)
        late.arrival, late.ttft = engine.now - 2.0, 1.0
        urgent = engine.add(ONLINE, 40, priority=1)
        engine.extra["free_blocks"] = 10 + 3 + 3 + 2 - 1  # for the prompts, and the next tokens of the residents

        decided = engine.plan()

        assert decided.preempt == (first,)
        assert dict(decided.grants) == {urgent: 40, late: 10}

    def test_a_step_of_an_encoder_does_not_end_for_a_prompt(self):
        engine = self.make(is_encoder=True)
        urgent, other = self.waits(engine, 200, waited=0.98), self.waits(engine, 300)

        assert dict(engine.plan().grants) == {urgent: 200, other: 300}

    @pytest.mark.parametrize(
        ("error", "due", "seconds"),
        [
            pytest.param(0.0, 0.030, 0.030, id="no error"),
            pytest.param(0.25, 0.030, 0.024, id="less the error of the model"),
            pytest.param(0.25, 0.017, 0.01522, id="within the error, nothing joins"),
        ],
    )
    def test_the_model_may_be_wrong_by_its_usual_error(self, error: float, due: float, seconds: float):
        engine = self.make()
        engine.cost = replace(engine.cost, error=error)
        self.waits(engine, 200, waited=1 - due)
        self.waits(engine, 2_000)

        assert seconds - EXACT.k1 * 1.5 < engine.plan().predicted_seconds <= seconds + 1e-9

    def test_a_prompt_that_ends_a_step_leaves_time_for_the_reservation(self):
        engine = Engine(ttft=1.0, tpot=0.05, offline_share=0.2, chunk_tokens=512, num_blocks=20_000)
        engine.prefilling(OFFLINE, tokens=400)
        self.waits(engine, 200, waited=0.97)
        self.waits(engine, 2_000)

        decided = engine.plan()

        assert sum(tokens for request, tokens in decided.grants if request.request_class is OFFLINE) == 103
        assert 0.0295 < decided.predicted_seconds <= 0.03

    def test_a_prompt_that_is_late_because_of_the_reservation_does_not_end_a_step(self):
        engine = Engine(ttft=1.0, tpot=0.05, offline_share=0.2, chunk_tokens=512, num_blocks=20_000)
        engine.prefilling(OFFLINE, tokens=400)
        self.waits(engine, 200, waited=0.983)
        other = self.waits(engine, 1_500)

        assert dict(engine.plan().grants)[other] == 1_500

    def test_a_prompt_that_would_be_in_time_but_for_the_rest_of_the_step_goes_behind_the_others(self):
        engine = self.make()
        late, other = self.waits(engine, 600, waited=0.967), self.waits(engine, 2_000)

        assert dict(engine.plan().grants) == {late: 204, other: 1_844}

    def test_lending_does_not_make_a_prompt_late_that_the_step_finishes(self):
        engine = self.make()
        self.waits(engine, 200, waited=0.97)
        self.waits(engine, 2_000)
        engine.add(OFFLINE, 2_000)

        assert engine.plan().predicted_seconds <= 0.03

    def test_a_prompt_does_not_pay_for_the_experts_that_decodes_read(self):
        """The decodes take 41 ms with their experts, and the prompt 11 ms. With all experts it would take 40 ms."""
        engine = Engine(slots=64, ttft=1.0, tpot=0.05, offline_share=0.0, chunk_tokens=512, num_blocks=20_000)
        engine.cost = replace(EXACT, k5=0.03, missed=0.9)
        for _ in range(30):
            self.decodes(engine, num_output=60)
        prompt = self.waits(engine, 200, waited=1 - 0.055)
        engine.add(OFFLINE, 2_000)

        decided = engine.plan()

        assert dict(decided.grants)[prompt] == 200
        assert 0.053 < decided.predicted_seconds <= 0.055

    def make_experts(self, *, late: float = 0.0) -> Engine:
        """Let ten decodes read two thirds of the experts in 27 ms. They can wait for `late` seconds."""
        engine = self.make(slots=64)
        engine.cost = replace(EXACT, k5=0.03, missed=0.9)
        for _ in range(10):
            self.decodes(engine, num_output=60, taken=3.0 - late)
        return engine

    def test_prefill_takes_all_the_time_that_decodes_can_wait_beside_the_experts_that_they_read(self):
        engine = self.make_experts(late=0.08)
        self.waits(engine, 2_000)

        assert 0.08 - EXACT.k1 * 1.5 < engine.plan().predicted_seconds <= 0.08 + 1e-9

    def test_a_prompt_is_deferred_only_if_it_is_late_without_the_experts_that_decodes_read(self):
        """The long prompt takes 31 ms of the 51 ms until it is due, and would take 50 ms with all experts."""
        engine = self.make_experts(late=0.4)
        engine.config = replace(engine.config, chunk_tokens=100)
        long, _ = (self.waits(engine, tokens, waited=1 - 0.078) for tokens in (400, 100))
        engine.add(ONLINE, 100, priority=-1, ttft=0.001)

        assert {r: n for r, n in engine.plan().grants if n > 1} == {long: 400}

    def test_answers_fall_behind_for_a_prompt_that_is_late_without_the_experts_that_they_read(self):
        """The prompt takes 66 ms beside the decodes, and would take 85 ms with all experts."""
        engine = self.make_experts()
        engine.extra["expectation"] = Expectation({ONLINE: (200,) * 100})
        late = self.waits(engine, 1_000, waited=1 - 0.1)

        assert dict(engine.plan().grants)[late] == 1_000

    def test_prompts_are_not_late_if_the_time_that_decodes_saved_is_enough(self):
        """Of 50 ms, the decodes take 17. The long prompt takes 0.2 of the 0.25 s until it is due."""
        engine = self.make(slots=64)
        for _ in range(60):
            self.decodes(engine, num_output=50, taken=2.2)
        long, _ = (self.waits(engine, tokens, waited=0.75) for tokens in (3_000, 100))

        assert {r: n for r, n in engine.plan().grants if n > 1} == {long: 2_048}

    def test_a_prompt_that_this_step_does_not_finish_does_not_end_it(self):
        engine = self.make()
        self.waits(engine, 2_500, waited=0.86)

        assert sum(dict(engine.plan().grants).values()) == 2048

    def test_it_does_not_hide_the_slack_of_later_requests(self):
        engine = self.make(tpot=2.0)  # a quarter of it bounds a step of prompts alone
        self.waits(engine, 30_000)
        self.waits(engine, 200, waited=0.5)

        decided = engine.plan()

        slack = 0.5 - decided.predicted_seconds  # its first token comes at the end of the step
        assert decided.budget_seconds == pytest.approx(decided.predicted_seconds + 0.5 * slack, rel=0.01)

    def test_it_gets_nothing_before_a_higher_priority(self):
        engine = self.make()
        long = self.waits(engine, 30_000)
        urgent = engine.add(ONLINE, 5_000, priority=1, ttft=1.0, tpot=0.05)

        granted = dict(engine.plan().grants)

        assert granted == {urgent: 2048}
        assert long not in granted

    def test_decodes_keep_their_pace_beside_prefill_that_cannot_be_in_time(self):
        engine = self.make()
        for _ in range(4):
            self.decodes(engine)
        self.waits(engine, 2_000, waited=0.99)

        decided = engine.plan()

        assert decided.predicted_seconds <= 0.05 + 1e-9

    @pytest.mark.parametrize("num_answers", [2, 40])
    def test_answers_do_not_fall_behind_for_an_answer_that_begins(self, num_answers: int):
        engine = self.make(slots=64)
        engine.extra["expectation"] = Expectation(online_answer=200.0)
        for _ in range(num_answers):
            self.decodes(engine)
        self.waits(engine, 2_000, waited=0.87)

        assert engine.plan().predicted_seconds <= 0.05 + 1e-9

    def answers(self, engine: Engine, *, lengths: tuple[int, ...], rate: float = 0.0, num_decodes: int = 4) -> None:
        """Let decodes run at their pace, with known lengths of answers."""
        outputs = {ONLINE: lengths}
        engine.extra["expectation"] = Expectation(outputs=outputs, online_answer=200.0, online_rate=rate)
        engine.extra["typical_prompt"] = 2_000
        for _ in range(num_decodes):
            self.decodes(engine)

    @pytest.mark.parametrize("max_output", [9, 10, 12])
    def test_answers_do_not_fall_behind_by_more_than_their_last_tokens_save(self, max_output: int):
        engine = self.make()
        self.answers(engine, lengths=(200,) * 100)
        for request in engine.residents:
            request.max_output = max_output
        self.waits(engine, 2_000, waited=0.87)

        seconds = engine.plan().predicted_seconds

        fixed = EXACT.k0 + 4 * EXACT.decode(engine.residents[0].num_tokens)
        assert seconds + (max_output - 9) * fixed <= max(0.05, (max_output - 8) * 0.05) + 1e-9

    def test_answers_that_fall_behind_leave_time_for_the_reservation(self):
        engine = Engine(ttft=1.0, tpot=0.05, offline_share=0.2, chunk_tokens=512, num_blocks=20_000)
        self.answers(engine, lengths=(10,) * 100)
        engine.prefilling(OFFLINE, tokens=400)
        self.waits(engine, 1_387, waited=1 - 0.0892)

        fixed = EXACT.k0 + 4 * EXACT.decode(10)
        assert 0.08 < engine.plan().predicted_seconds <= 2 * (0.05 - fixed) + 1e-4

    def test_answers_that_go_on_fall_behind_for_a_prompt_that_would_be_late(self):
        engine = self.make()
        self.answers(engine, lengths=(200,) * 100)
        late = self.waits(engine, 2_000, waited=0.87)

        decided = engine.plan()

        assert dict(decided.grants)[late] == 2_000
        assert 0.1 < decided.predicted_seconds < 0.13

    @pytest.mark.parametrize(
        ("lengths", "rate", "prompts", "num_decodes"),
        [
            pytest.param((9,) * 3 + (200,) * 97, 0.0, [(2_000, 0.87)], 4, id="some of them may end soon"),
            pytest.param((200,) * 100, 9.0, [(2_000, 0.87)], 4, id="new requests leave them no time"),
            pytest.param((200,) * 100, 0.0, [(2_000, 0.87)] * 3, 4, id="some prompts would be late in any case"),
            pytest.param((200,) * 100, 0.0, [(2_000, 0.5)], 4, id="the prompt is in time without that"),
            pytest.param((200,) * 100, 0.0, [(200, 0.86), (2_000, 0.0)], 4, id="in time one after the other"),
            # Of 50 ms, the decodes take 17. In two more tokens they catch up 66 ms, too little for the prompt.
            pytest.param((10,) * 100, 0.0, [(3_000, 0.75)], 60, id="the prompt would be late even then"),
        ],
    )
    def test_answers_keep_their_pace_otherwise(self, lengths, rate: float, prompts, num_decodes: int):
        engine = self.make(slots=64)
        self.answers(engine, lengths=lengths, rate=rate, num_decodes=num_decodes)
        for tokens, waited in prompts:
            self.waits(engine, tokens, waited=waited)

        assert engine.plan().predicted_seconds <= 0.05 + 1e-9

    @pytest.mark.parametrize(("waited", "falls_behind"), [(0.6, False), (0.75, True)])
    def test_young_answers_fall_behind_for_prompts_that_need_half_of_their_time(
        self, waited: float, falls_behind: bool
    ):
        """The prompt takes 0.1 s, and at the pace of the decodes 0.12 s."""
        engine = self.make()
        engine.extra["expectation"] = Expectation(online_short=100, online_answer=200.0)
        self.decodes(engine)
        self.waits(engine, 2_000, waited=waited)

        assert (engine.plan().predicted_seconds > 0.05 + 1e-9) is falls_behind

    def test_a_deferred_prompt_is_finished_under_a_lasting_overload(self):
        slo = {"request_class": ONLINE, "output": 1, "ttft": 0.2, "tpot": 0.05}
        long = Arrival(at=0.0, prompt=3_000, **slo)
        flood = [Arrival(at=0.01 * i, prompt=900, **slo) for i in range(400)]
        config = PolicyConfig(slots=16, num_blocks=8_000, offline_share=0.0, ttft=0.2, tpot=0.05)
        engine = FakeEngine(Host(config, cost=EXACT), [long, *flood])

        engine.run()

        (ended,) = (at for arrival, at in engine.ended.values() if arrival is long)
        assert ended < flood[-1].at
