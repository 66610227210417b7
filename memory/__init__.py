"""Where a row of KV is, and how it moves.

`memory` decides which rows; `streams` moves their bytes in order, `kernels` reads and writes them by address, `engine` decides when.

Parts, from the bytes up
    ledger.py      who holds how many physical bytes on which tier
    host.py        host buffers at exact size, touched lazily; the seam where a device registers them
    registration.py  host memory made readable by a device; numa.py: its pages from the node beside the card
    staging.py     copies that wait for nobody, and the order of what is filled outside the streams
    arena.py       RAM in 64-row blocks, taken once; reference counts
    pool.py        long-lived device buffers at exact size within a budget; backing.py: what their bytes are cut from
    allotment.py   the units a session holds of a store and is still entitled to
    history.py     a session's block table; blocks in device memory
    keys.py        pages of 1,024 index keys and a session's table of them
    row.py         row and key formats from the model's widths
    counts.py      mirrored <= submitted <= committed <= logical, and the epoch; the only place where they move
    ring.py        a session's recent ring, a stage's append ring, the room rule
    hot.py         slots and slot maps of one session and selection group
    table.py       the step table
    rounds.py      how a step finds and reads selected rows, a class a placement
    operations.py  what of a session is in flight, and whether a failed copy broke it
    copyback.py    block copies to RAM and what their completion raises
    append.py      a chunk's addresses and how it ends
    session.py     the protocol of a session's memory, and what both placements hold alike
    offload.py, resident.py   the two implementations
    fork.py        a second session from the first rows of one: what is shared and what is copied
    idle.py        what a session between two turns gives up: reservations, pages of index keys
    placement.py   `Offload` and `Resident`: made once, they open, fork, grow, rest, shed and refuse sessions
    replica.py     a session on two devices behind the protocol of one; pair.py: the placement that makes such
    barrier.py     flush, await, check

Invariants
    1. Only committed rows are copied, whole blocks at a time; a rejected or rolled-back row never reaches RAM.
    2. Mirrored rises behind the copy: on the device by an operation ordered after it, on the host when that operation completed.
    3. A ring place is written again only after its block is in RAM.
    4. An operation owns its buffers until it completes; cancelling a wait cancels nothing; closing waits.
    5. A session holds or has reserved all it can need from the moment it is opened; what fails, fails in `open` or `grow`, whole.
    6. Slots and RAM reads are for rows of whole mirrored blocks: steps round their snapshot of MIRRORED down to a block.

Choices
    The raise of MIRRORED is chained to the raise before it, so a failed copy stops the counts for good and nothing jumps over it.
    A cut into rows of a copy in flight is refused, not untangled: the rollback of a step never needs it, and truncation can wait.
    A chunk's counts rise when its copies completed, not when they were submitted: a failed chunk then leaves nothing to take back.
    Cut blocks stay the session's until nothing of it is in flight: a step that still runs may read them, a stale copy may write them.
    Index-key pages of all key layers for one stretch of 1,024 positions are one buffer: they are needed and shared together,
    and a million tokens make a thousand objects, not twenty-two thousand.
"""

from memory.append import AppendChunk
from memory.arena import Arena, BlockId
from memory.barrier import barrier, verify_mirror
from memory.copyback import Copyback
from memory.counts import RowCounts
from memory.errors import ArenaFull, BarrierFailed, CopybackInFlight, DoesNotFit, PoolExhausted, RegistrationRefused, RingOverrun
from memory.ledger import Ledger
from memory.placement import Offload, Placement, Resident
from memory.pool import Pool
from memory.registration import DeviceRegistration, registration_for
from memory.session import SessionMemory

__all__ = [
    "Arena", "BlockId", "Pool", "Ledger",
    "Placement", "Offload", "Resident", "SessionMemory", "AppendChunk", "RowCounts",
    "Copyback", "barrier", "verify_mirror", "DeviceRegistration", "registration_for",
    "DoesNotFit", "ArenaFull", "PoolExhausted", "RingOverrun", "CopybackInFlight", "BarrierFailed", "RegistrationRefused",
]  # fmt: skip
