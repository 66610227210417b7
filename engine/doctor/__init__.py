"""What of a host stalls decoding: read, judged, explained, never changed.

Parts
    tree.py     the kernel's files, the only way to the machine
    finding.py  one line of the doctor
    host.py     NUMA balancing, compaction, huge pages, locked memory, free RAM, CPU governor
    cards.py    each card's NUMA distance, IOMMU, PCIe link

Invariants
    1. Nothing is written and nothing is run; a person does what the lines say.
    2. Every line that can be set says how to restore the value that was found.
    3. A file that is missing or unreadable makes a line `unknown`, never an error.
"""

from dataclasses import asdict
from typing import Any

from engine.doctor.cards import card_findings
from engine.doctor.finding import Finding
from engine.doctor.host import host_findings
from engine.doctor.tree import Tree

__all__ = ["Finding", "Tree", "examine", "rows"]


def examine(tree: Tree | None = None) -> list[Finding]:
    """Every finding about this machine (or the one that `tree` stands for), host first, then each card."""
    tree = Tree() if tree is None else tree
    return [*host_findings(tree), *card_findings(tree)]


def rows(findings: list[Finding]) -> list[dict[str, Any]]:
    """The findings as JSON objects; `set_it` is called `set` there."""
    return [{("set" if key == "set_it" else key): value for key, value in asdict(finding).items()} for finding in findings]
