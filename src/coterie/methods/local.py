"""Local: every client trains on its own data and receives nothing from the others."""

from dataclasses import dataclass
from typing import ClassVar, final

from coterie.methods.base import Info, PeerMethod, Round, State


@final
@dataclass(frozen=True)
class Local(PeerMethod):
    """Local training without collaboration: the baseline that collaboration has to beat."""

    kind: ClassVar[str] = "local"
    summary: ClassVar[str] = "train alone, without any exchange"
    exchanges: ClassVar[int] = 0

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Do nothing."""
        return state, {}
