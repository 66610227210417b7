"""Machines to plan for. Knows no model."""

from dataclasses import dataclass

from engine.errors import BadSetting
from engine.stage import activations_bytes

__all__ = ["Boxes"]

_HOST_SHARE = 0.05  # of a node's RAM, kept for the kernel, the process and the page cache of archives
_HOST_BYTES = 8 << 30  # and at least this, if that is no more than half


@dataclass(frozen=True, slots=True)
class Boxes:
    """Equal nodes of equal cards. Raises BadSetting naming the flag."""

    nodes: int = 2
    ram_bytes: int = 1 << 40  # a node
    cards: int = 8  # a node
    card_bytes: int = 48 << 30
    cards_per_stage: int = 2  # 2: owner and peer

    def __post_init__(self) -> None:
        for flag, value in (("--nodes", self.nodes), ("--cards", self.cards), ("--ram", self.ram_bytes), ("--vram", self.card_bytes)):
            if value < 1:
                raise BadSetting(f"{flag} must be at least 1, not {value}")
        if self.cards_per_stage not in (1, 2):
            raise BadSetting(f"--cards-per-stage must be 1 or 2, not {self.cards_per_stage}")
        if self.cards % self.cards_per_stage:
            raise BadSetting(f"--cards-per-stage {self.cards_per_stage} does not divide the {self.cards} cards of a node; use 1")

    @property
    def stages(self) -> int:
        """Stages of all nodes together."""
        return self.nodes * self.stages_a_node

    @property
    def stages_a_node(self) -> int:
        """Stages of one node."""
        return self.cards // self.cards_per_stage

    @property
    def arena_bytes_max(self) -> int:
        """What of a node's RAM histories may have."""
        return self.ram_bytes - min(self.ram_bytes // 2, max(_HOST_BYTES, int(_HOST_SHARE * self.ram_bytes)))

    @property
    def usable_card_bytes(self) -> int:
        """What of a card weights and sessions may have: all but the engine's share for activations, scratch and graphs."""
        return max(0, self.card_bytes - activations_bytes(self.card_bytes))
