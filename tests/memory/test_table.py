"""The step table: rewritten whole, in one place, by work that was given its values when it was made."""

import pytest
import torch

from kernels.layout import GROUP_FIELDS, GroupField, TableField, TableLayout
from memory.table import StepTable

LAYOUT = TableLayout(2)


def place(start: int, rows: int = 1) -> list[int]:
    fields = list(range(start, start + LAYOUT.fields))
    fields[TableField.ROWS] = rows
    return fields


def test_a_new_table_is_free() -> None:
    """Every place has 0 rows."""
    table = StepTable(3, LAYOUT)
    assert table.tensor.shape == (3, TableField.GROUPS + 2 * GROUP_FIELDS)
    assert table.places == 3
    assert table.tensor.dtype == torch.int64
    assert int(table.tensor.abs().sum()) == 0


def test_nothing_changes_until_the_work_runs() -> None:
    """`rewrite` only makes work; running it writes fields in order, frees what is None or missing, and never moves the tensor."""
    table = StepTable(4, LAYOUT)
    address = table.tensor.data_ptr()
    table.rewrite([place(100), place(200), place(300), place(400)])()
    work = table.rewrite([None, place(2**62, rows=3)])
    assert table.tensor[0, TableField.STATE] == 101
    work()
    assert table.tensor[[0, 2, 3]].tolist() == [[0] * LAYOUT.fields] * 3
    assert table.tensor[1].tolist() == place(2**62, rows=3)
    assert table.tensor[1, LAYOUT.group(1, GroupField.HAND)] == 2**62 + TableField.GROUPS + GROUP_FIELDS + GroupField.HAND
    assert table.tensor.data_ptr() == address


def test_work_keeps_the_values_it_was_made_with() -> None:
    """Rewrites made early and run late write what was asked then, in the order they run."""
    table = StepTable(1, LAYOUT)
    row = place(100)
    first = table.rewrite([row])
    row[TableField.STATE] = 7
    second = table.rewrite([row])
    first()
    assert table.tensor[0, TableField.STATE] == 101
    second()
    assert table.tensor[0, TableField.STATE] == 7


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([place(1), place(1)], "2 rows for 1 places"),
        ([place(1)[:-1]], "18 fields, not 19"),
        ([place(1, rows=0)], "a free place is None"),
    ],
)
def test_rows_that_cannot_be_are_refused(rows: list[list[int]], message: str) -> None:
    """Too many places, a missing field, or a busy place without rows never reach the table."""
    with pytest.raises(AssertionError, match=message):
        StepTable(1, LAYOUT).rewrite(rows)
