"""What GPUs cost and draw, from the figures of the input file."""

from __future__ import annotations

from dataclasses import dataclass

from ballast_sim.hardware import Gpu
from ballast_sim.inputs import EnergyInput, MoneyInput

HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class Price:
    """Of one GPU."""

    gpu: Gpu
    energy: EnergyInput
    money: MoneyInput

    def kilowatts(self, utilization: float) -> float:
        """Power drawn at the building's meter: idle draw and the rest in proportion to the work done."""
        gpu, energy = self.gpu, self.energy
        watts = gpu.idle_watts + (gpu.watts - gpu.idle_watts) * min(1.0, utilization)
        return watts / 1e3 * (1 + energy.server_percent / 100) * energy.pue

    def power_per_hour(self, utilization: float) -> float:
        """Dollars for electricity of a GPU of one's own."""
        return self.kilowatts(utilization) * self.energy.dollars_per_kilowatt_hour

    def owned_per_hour(self, utilization: float) -> float:
        """Dollars for a bought GPU: written off over its months, and electricity."""
        hours = self.money.amortization_months * HOURS_PER_MONTH
        return self.gpu.purchase_dollars / hours + self.power_per_hour(utilization)

    def per_hour(self, utilization: float) -> float:
        """Dollars for a GPU today, in the way the inputs say. A rented one has its power in the price."""
        if self.money.way == "rent":
            return self.gpu.dollars_per_hour
        owned = self.owned_per_hour(utilization)
        return owned if self.money.way == "buy" else min(owned, self.gpu.dollars_per_hour)

    def purchase_for(self, months: int) -> float:
        """What owning a GPU for so many months costs beside power: its price less what it then sells for."""
        left = max(0.0, 1 - months / self.money.amortization_months)
        return self.gpu.purchase_dollars * (1 - self.money.resale_percent / 100 * left)
