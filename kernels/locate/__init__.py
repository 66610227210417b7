"""Turn positions into addresses: where a step's new rows and keys are stored, and where resident rows are read.

`reference.py` is the definition, `kernel.py` the same on a device, where a block or page that is absent gives address 0.
"""

from torch import Tensor

from kernels.layout import WHOLE, BlockLayout, PageShare, TableLayout
from kernels.locate import reference
from kernels.place import on_cpu
from kernels.round.plan import RoundPlan

__all__ = ["locate_new", "locate_resident"]


def _check_table(table: Tensor, table_layout: TableLayout, block_layout: BlockLayout) -> None:
    assert table.shape[1] == table_layout.fields, f"a table of {table.shape[1]} fields, not {table_layout.fields}"
    assert table_layout.groups == block_layout.key_layers, f"{table_layout.groups} groups, {block_layout.key_layers} key layers"


def locate_new(
    table: Tensor, table_layout: TableLayout, block_layout: BlockLayout, place_of: Tensor, positions: Tensor, share: PageShare = WHOLE
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the rows and keys of new positions are stored. Padding rows get 0 everywhere.

    table      [places, fields]  int64  device
    place_of   [T]               int32  device  place of each row; padding rows name a free place or -1
    positions  [T]               int64  device  positions of the new rows; anything in padding rows
    returns
      row_destinations   [T]              int64  the row in layer 0, in the ring, or in its history's block when RING is 0
      key_destinations   [T]              int64  the key of key layer 0 in the same block
      page_destinations  [key layers, T]  int64  the key in its page; 0 where that page is another device's
    Args: share: the pages that the table's page tables hold.
    """
    _check_table(table, table_layout, block_layout)
    assert positions.shape == place_of.shape, f"{tuple(positions.shape)} positions for {tuple(place_of.shape)} places"
    if on_cpu("locate_new", table):
        return reference.locate_new(table, block_layout, place_of, positions, share)
    from kernels.locate import kernel

    return kernel.locate_new(table, block_layout, place_of, positions, share)


def locate_resident(
    table: Tensor, table_layout: TableLayout, block_layout: BlockLayout, place_of: Tensor, selection: Tensor, plan: RoundPlan
) -> None:
    """Plan of a resident session: every pick is read where it lies, nothing is kept.

    table      [places, fields]  int64  device
    place_of   [T]               int32  device  place of each row; padding rows name a free place or -1
    selection  [T, k]            int32  device  positions, -1 anywhere; may be `plan.selection` itself, else it is copied there
    plan       sources are written, slot, fill and miss are -1
    """
    _check_table(table, table_layout, block_layout)
    assert selection.shape == plan.selection.shape, f"selection {tuple(selection.shape)} for {tuple(plan.selection.shape)}"
    if on_cpu("locate_resident", table):
        reference.locate_resident(table, block_layout, place_of, selection, plan)
    else:
        from kernels.locate import kernel

        kernel.locate_resident(table, block_layout, place_of, selection, plan)
