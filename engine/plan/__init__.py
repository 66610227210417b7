"""What fits, from arithmetic alone: `forebay plan`. No device, no weights and no engine are needed.

Parts: `boxes.py` (machines, and how cards share a stage), `weights.py` (bytes of every tensor in a form of storage), `stages.py` (layers of
each stage, and what a card and a session take there), `capacity.py` (how much fits and what binds first), `table.py` (for people, JSON).

Invariants:
1. Bytes of rows, blocks, keys, rings, hot caches and tables come from `kernels/layout.py` and `memory/needs.py`, which admission uses too.
2. Where the engine does otherwise than planned, `Plan.notes` says so.
3. Nothing is rounded in favour of fitting: what is uncertain (activations, what the host keeps) is taken off first.

Two cards of a stage (owner and peer) are planned so: matrices of heads, experts, MLPs, embedding and head are halved; what makes a row, a
key, a query latent or a selection is on both, so that both select alike; rings and hot caches are on both, a page of index keys on one.
"""

from engine.plan.boxes import Boxes
from engine.plan.capacity import Ask, Plan, make_plan
from engine.plan.weights import WeightForm

__all__ = ["Ask", "Boxes", "Plan", "WeightForm", "make_plan"]
