"""The peer of a stage is laid out and allocated: its pool, its share of the keys, and with two mirrors an arena of its own."""

from collections.abc import Callable
from functools import partial

import torch

from engine.config import EngineConfig
from engine.errors import BadSetting
from engine.model.split import PeerModel
from engine.peer import PEER_SHARE, PeerStage
from engine.placing import device_budget, placement_of, rounds_of
from engine.stage_streams import StageStreams
from kernels.layout import BlockLayout, TableLayout
from memory.arena import Arena
from memory.copyback import Copyback
from memory.ledger import Ledger
from memory.pair import PairPlacement
from memory.placement import Offload, Resident
from memory.pool import Pool
from memory.registration import registration_for
from memory.replica import FollowedBlocks, FollowingCopyback

__all__ = ["check_peer", "open_peer"]


def check_peer(owner: torch.device, config: EngineConfig) -> torch.device | None:
    """The peer's device, if there is one. Raises BadSetting: there is no such device, or the owner is none of its kind."""
    if not config.peer:
        return None
    try:
        peer = torch.device(config.peer)
    except RuntimeError as error:
        raise BadSetting(f"peer {config.peer!r} is no device; use cpu, or a card's name such as cuda:1") from error
    if peer.type != owner.type or peer.type not in ("cpu", "cuda"):
        raise BadSetting(f"peer {config.peer}: the model runs on {owner}, and both devices of a pair are of one kind")
    if peer.type == "cuda":
        number = peer.index if peer.index is not None else -1
        if not 0 <= number < torch.cuda.device_count() or number == owner.index:
            raise BadSetting(f"peer {config.peer}: give another of the {torch.cuda.device_count()} cards than {owner}, as in cuda:1")
        if not torch.cuda.can_device_access_peer(owner, peer):
            raise BadSetting(f"peer {config.peer}: {owner} cannot reach its memory; choose cards with peer access, or leave --peer out")
        _reach(owner, peer)
    return peer


def _reach(owner: torch.device, peer: torch.device) -> None:
    """Let kernels of each card read and write the other's memory: torch asks the driver for that before its first copy either way."""
    for one, other in ((owner, peer), (peer, owner)):
        torch.zeros(1, device=one).to(other)
    for device in (owner, peer):
        torch.cuda.synchronize(device)


def open_peer(
    model: PeerModel, config: EngineConfig, layout: BlockLayout, streams: StageStreams, owner: Offload | Resident, host_bytes: int,
    pool_of: Callable[[torch.device, int | None, Ledger], Pool], share: float = 1.0,
) -> tuple[PeerStage, PairPlacement]:  # fmt: skip
    """Args: streams: the stage's. owner: the first device's placement. host_bytes: of the peer's mirror, if it has one. share: of what the
    peer's memory gives.

    Raises: ArenaFull, RegistrationRefused: the host cannot give the second mirror.
    """
    assert streams.peer is not None, "the stage has streams for a peer"
    device, ledger = model.device, Ledger()
    arena = None
    if config.mirror_replicas == 2:
        arena = Arena(layout, host_bytes, ledger, registration=registration_for(device))
    store_of = partial(FollowedBlocks, owner.arena) if arena is None else None
    budget = device_budget(device)
    pool = pool_of(device, None if budget is None else int(share * budget), ledger)
    placement = placement_of(config, model.config, layout, arena or owner.arena, pool, PEER_SHARE, store_of)
    copyback = (FollowingCopyback if arena is None else Copyback)(streams.peer.copyback)
    groups = layout.groups
    table_layout = TableLayout(len(groups))
    main_groups = tuple(group for group in groups if group[0] < len(model.layers))
    peer = PeerStage(
        model=model, layout=layout, table_layout=table_layout, main_groups=main_groups, streams=streams.peer, pool=pool, arena=arena,
        rounds=rounds_of(config, layout, table_layout), copyback=copyback,
    )  # fmt: skip
    return peer, PairPlacement(owner, placement, streams.peer.compute, copyback)
