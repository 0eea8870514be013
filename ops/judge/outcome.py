"""What a check found."""

from __future__ import annotations

import msgspec

from ops.judge.compare import Divergence


class Outcome(msgspec.Struct):
    """Of `num` comparisons `num_equal` were equal; the others are told one by one."""

    check: str
    num: int = 0
    num_equal: int = 0
    divergences: list[Divergence] = []
    facts: list[str] = []
    table: list[list[str]] = []
    """Rows, the first of them the head."""

    def count(self, found: Divergence | None) -> None:
        """One more comparison: equal, or not."""
        self.num += 1
        if found is None:
            self.num_equal += 1
        else:
            self.divergences.append(found)

    @property
    def num_unexplained(self) -> int:
        """Divergences that nothing explains."""
        return sum(not one.is_explained for one in self.divergences)
