"""What a user can set of the simulated NPU."""

import sys
from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.core.device_kinds import CPU, Kind, listed_cards
from runner.device.config import NpuConfig


class NpuSimConfig(NpuConfig):
    """Simulated NPUs: the real torch_npu on the processor, for rehearsals; fetched and built at its first use."""

    factory: ClassVar[str] = "npu_simulator.device:NpuSim"
    deepspeed: ClassVar[bool] = False
    checks: ClassVar[str | None] = "npu_simulator.doctor:CHECKS"
    name: Literal["npu_sim"] = "npu_sim"  # type: ignore[assignment]
    cards: int = Field(default=1, ge=1, le=64, description="How many cards the process is to see.")
    memory_gib: float = Field(
        default=64.0, gt=0, le=1024, description="Memory of a card in GiB; what does not fit is refused as on a card."
    )
    soc: str = Field(default="Ascend910B3", pattern=r"^Ascend\w+$", description="The model that a card says it is.")

    @property
    def occupies(self) -> Kind:
        return CPU

    def visible(self) -> tuple[str, ...]:
        there = tuple(map(str, range(self.cards)))
        asked = listed_cards(self.kind)
        return there if asked is None else tuple(card for card in asked if card in there)

    def problems(self, job: Any) -> list[tuple[str, str]]:
        many = job.launch.devices + job.launch.samplers
        if many <= self.cards:
            return []
        return [
            (
                "device.cards",
                f"{many} processes need one card each, but {self.cards} is simulated; type device.cards={many}",
            )
        ]

    def preflight(self) -> None:
        """Fetch and build what is missing of the simulator, and say so. Raises EnvironmentProblem where that fails."""
        from npu_simulator.prepare import prepare

        prepare(_say)

    def enter(self) -> None:
        from npu_simulator.prepare import prepare  # here, because every command reads this module
        from npu_simulator.process import Pretence, enter

        enter(prepare(_say), Pretence(self.cards, int(self.memory_gib * 2**30), self.soc))

    def simulator(self, cards: int) -> "NpuSimConfig":
        return self.model_copy(update={"cards": cards})


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
