"""Staging on the CPU: nothing is copied twice, and a glance sees what is there. Its device half is in test_on_device.py."""

import pytest
import torch

from memory.staging import Glance, landing, outside_streams, pinned

CPU = torch.device("cpu")


def test_host_values_are_their_own_staging_on_the_cpu() -> None:
    """No copy is made where no device copies, and values that would have to be staged twice are our bug."""
    values = torch.arange(12).view(3, 4)
    assert pinned(values, CPU) is values
    with pytest.raises(AssertionError, match="not contiguous"):
        pinned(values[:, :2], CPU)
    assert outside_streams(CPU)


def test_a_landing_has_room_for_its_source() -> None:
    """Shape and dtype are the source's, for a strided one too, and it is contiguous."""
    source = torch.arange(12, dtype=torch.int32).view(3, 4)[:, ::2]
    found = landing(source)
    found.copy_(source)
    assert found.is_contiguous()
    assert found.dtype == torch.int32
    assert torch.equal(found, source)


def test_a_glance_asks_again_unless_nothing_changed() -> None:
    """While steps run every look asks; two looks at the same still moment ask once; another moment asks anew."""
    asked = 0

    def values() -> torch.Tensor:
        nonlocal asked
        asked += 1
        return torch.tensor([asked, 10 * asked])

    glance = Glance(CPU, 2)
    assert glance.look(values, still="a") == [1, 10]
    assert glance.look(values, still="a") == [1, 10]
    assert glance.look(values, still=None) == [2, 20]
    assert glance.look(values, still="a") == [3, 30]
    assert glance.look(values, still="b") == [4, 40]
