"""The cost and power of GPUs, from the figures of the inputs, and which GPUs to buy or to rent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast_sim.planner.inputs import EnergyInput, MoneyInput
from ballast_sim.replay.hardware import Accelerator

HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class GpuPrice:
    """The cost and power of one GPU."""

    gpu: Accelerator
    energy: EnergyInput
    money: MoneyInput

    def kilowatts(self, utilization: float) -> float:
        """Return the power at the building's meter: the idle power, and the rest in proportion to the work."""
        gpu, energy = self.gpu, self.energy
        watts = gpu.idle_watts + (gpu.watts - gpu.idle_watts) * min(1.0, utilization)
        return watts / 1e3 * (1 + energy.server_percent / 100) * energy.pue

    def power_per_hour(self, utilization: float) -> float:
        """Return the dollars per hour for the electricity of an owned GPU."""
        return self.kilowatts(utilization) * self.energy.dollars_per_kilowatt_hour

    def per_hour(self, utilization: float) -> float:
        """Return the dollars per hour for a GPU today, with electricity: its rent or its write-off, by the inputs."""
        if self.money.way == "rent":
            return self.gpu.dollars_per_hour
        hours = self.money.amortization_months * HOURS_PER_MONTH
        owned = self.gpu.purchase_dollars / hours + self.power_per_hour(utilization)
        return owned if self.money.way == "buy" else min(owned, self.gpu.dollars_per_hour)

    def purchase_for(self, months: int) -> float:
        """Return the cost of owning a GPU for some months without electricity: its price less its resale value."""
        left = max(0.0, 1 - months / self.money.amortization_months)
        return self.gpu.purchase_dollars * (1 - self.money.resale_percent / 100 * left)


@dataclass(frozen=True, slots=True)
class Purchases:
    """By month: the owned and rented GPUs, and their cost without the electricity of owned GPUs."""

    owned: tuple[int, ...]
    rented: tuple[int, ...]
    dollars: tuple[float, ...]

    @property
    def bought(self) -> tuple[int, ...]:
        """GPUs that are bought in each month."""
        return tuple(now - before for before, now in zip((0, *self.owned), self.owned, strict=False))


def buy_or_rent(counts: Sequence[int], price: GpuPrice) -> Purchases:
    """Decide once for each GPU whether it is bought or rented, whichever is cheaper until the plan ends.

    `counts` is the number of GPUs needed in each month. GPUs that are needed in the same months are decided together.
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
    return Purchases(tuple(owned), tuple(rented), tuple(dollars))


def is_bought(price: GpuPrice, *, num_needed: int, num_held: int) -> bool:
    """Return whether to buy a GPU that is needed for `num_needed` months, and kept for `num_held` months if bought."""
    if price.money.way != "cheapest":
        return price.money.way == "buy"
    power = num_held * HOURS_PER_MONTH * price.power_per_hour(1.0)
    return price.purchase_for(num_held) + power < num_needed * HOURS_PER_MONTH * price.gpu.dollars_per_hour
