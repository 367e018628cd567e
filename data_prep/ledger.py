"""Bookkeeping of rows: how many came in, and for every one that did not stay, why."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Rows in and rows dropped, by reason. What was kept is counted elsewhere, where it is kept, so that the sum is a check."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    """Things done to rows that stayed, such as cutting a chat after its first user turn."""
    rows: list[dict] = field(default_factory=list)
    """One entry for every dropped row, for `dropped.jsonl`."""

    def drop(self, reason: str, row: str) -> None:
        """Counts a row that does not stay; `row` names it for people (a key, or a file and line)."""
        self.dropped[reason] += 1
        self.rows.append({"row": row, "reason": reason})

    def add(self, other: "Ledger") -> None:
        """Takes over the entries of another ledger."""
        self.read += other.read
        self.dropped.update(other.dropped)
        self.notes.update(other.notes)
        self.rows.extend(other.rows)

    def facts(self, kept: int) -> dict:
        """The form that manifests carry."""
        return {"in": self.read, "kept": kept, "dropped": dict(sorted(self.dropped.items()))}


def reasons(dropped: dict[str, int] | Counter[str]) -> str:
    """{'duplicate': 3, 'too short': 1} -> '3 duplicate, 1 too short', most frequent first."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items(), key=lambda pair: (-pair[1], pair[0])))
