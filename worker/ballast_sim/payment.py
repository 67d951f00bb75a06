"""Which GPUs are bought and which rented, month by month."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast_sim.price import HOURS_PER_MONTH, Price


@dataclass(frozen=True, slots=True)
class Payments:
    """By month: GPUs owned and rented, and what having them costs. Electricity of owned ones comes on top."""

    owned: tuple[int, ...]
    rented: tuple[int, ...]
    dollars: tuple[float, ...]

    @property
    def bought(self) -> tuple[int, ...]:
        """GPUs bought in each month."""
        return tuple(now - before for before, now in zip((0, *self.owned), self.owned, strict=False))


def pay(counts: Sequence[int], price: Price) -> Payments:
    """Decide for each GPU that is ever needed, once: bought where that is cheaper until the plan ends, or rented.

    The GPUs between two counts are needed in the same months, so they are decided together.
    """
    months = len(counts)
    owned, rented, dollars = [0] * months, [0] * months, [0.0] * months
    below = 0
    for level in sorted(set(counts) - {0}):
        needed = [month for month, count in enumerate(counts) if count >= level]
        gpus, held = level - below, months - needed[0]
        if is_bought(price, num_needed=len(needed), num_held=held):
            for month in range(needed[0], months):
                owned[month] += gpus
                dollars[month] += gpus * price.purchase_for(held) / held
        else:
            for month in needed:
                rented[month] += gpus
                dollars[month] += gpus * HOURS_PER_MONTH * price.gpu.dollars_per_hour
        below = level
    return Payments(tuple(owned), tuple(rented), tuple(dollars))


def is_bought(price: Price, *, num_needed: int, num_held: int) -> bool:
    """Whether a GPU that is needed for so many months, and kept for so many if bought, is better bought."""
    if price.money.way != "cheapest":
        return price.money.way == "buy"
    power = num_held * HOURS_PER_MONTH * price.power_per_hour(1.0)
    return price.purchase_for(num_held) + power < num_needed * HOURS_PER_MONTH * price.gpu.dollars_per_hour
