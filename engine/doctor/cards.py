"""Findings about each card: its distance to the CPUs we run on, the IOMMU before it, its PCIe link.

Pure functions of a `Tree`. A card is a PCI display controller or accelerator of AMD or NVIDIA; they are named by their PCI address.
"""

import re

from engine.doctor.finding import Finding, State, unread
from engine.doctor.tree import Tree, Unread

__all__ = ["card_findings", "cards", "parse_list"]

_DEVICES = "/sys/bus/pci/devices"
_NODES = "/sys/devices/system/node"
_MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D, other display, processing accelerator
_GENERATION_OF = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}


def parse_list(text: str) -> set[int]:
    """The kernel's lists: `0-3,8` is {0, 1, 2, 3, 8}. Raises ValueError for anything else."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def cards(tree: Tree) -> list[str]:
    """PCI addresses of the cards, sorted."""
    found = []
    for address in tree.names(_DEVICES):
        kind, vendor = tree.read(f"{_DEVICES}/{address}/class"), tree.read(f"{_DEVICES}/{address}/vendor")
        if not isinstance(kind, Unread) and not isinstance(vendor, Unread) and vendor in _MAKERS and kind.startswith(_CLASSES):
            found.append(address)
    return found


def _label(tree: Tree, address: str) -> str:
    return f"{_MAKERS.get(str(tree.read(f'{_DEVICES}/{address}/vendor')), 'card')} {address}"


def _own_nodes(tree: Tree, nodes: list[int]) -> list[int] | None:
    """Nodes whose CPUs this process may run on; None when that cannot be read."""
    status = tree.read("/proc/self/status")
    allowed = None if isinstance(status, Unread) else re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    if allowed is None:
        return None
    own = []
    try:
        cpus = parse_list(allowed.group(1))
        for node in nodes:
            text = tree.read(f"{_NODES}/node{node}/cpulist")
            if isinstance(text, Unread):
                return None
            if cpus & parse_list(text):
                own.append(node)
    except ValueError:
        return None
    return own


def numa_distance(tree: Tree, address: str) -> Finding:
    """From the nodes this process may run on to the card's node: 10, the node itself, is good."""
    name = f"NUMA distance of {_label(tree, address)}"
    see = f"cat {_DEVICES}/{address}/numa_node {_NODES}/node*/distance; numactl --show"
    why = "reads of RAM behind another node's link are slower and share that link"
    nodes = sorted(int(found.group(1)) for found in (re.fullmatch(r"node(\d+)", each) for each in tree.names(_NODES)) if found)
    if len(nodes) <= 1:
        return Finding(name, "one node" if nodes else "no NUMA in this kernel", "good", why, see)
    text = tree.read(f"{_DEVICES}/{address}/numa_node")
    if isinstance(text, Unread):
        return unread(name, text, why, see)
    if not text.isdecimal() or int(text) not in nodes:  # -1: the firmware does not say
        return Finding(name, f"node {text} of {len(nodes)} nodes: the firmware does not say where it is", "unknown", why, see)
    node, own = int(text), _own_nodes(tree, nodes)
    line = tree.read(f"{_NODES}/node{node}/distance")
    distances = [] if isinstance(line, Unread) else line.split()
    if own is None or not own or len(distances) != len(nodes):
        return Finding(name, f"on node {node}; where this process may run is not readable", "unknown", why, see)
    reached = ", ".join(f"{distances[nodes.index(each)]} from node {each}" for each in own)
    state: State = "good" if own == [node] else "bad"
    set_it = f"numactl --cpunodebind={node} --membind={node} forebay serve ..."
    restore = f"forebay serve ...    (without numactl: nodes {','.join(map(str, own))})"
    return Finding(name, f"on node {node}; {reached}", state, why, see, set_it, restore)


def iommu(tree: Tree, address: str) -> Finding:
    """Translation of the card's addresses: none, or pass-through, is good."""
    name = f"IOMMU of {_label(tree, address)}"
    path = f"{_DEVICES}/{address}/iommu_group/type"
    see, why = f"cat {path}; ls /sys/class/iommu", "with translation every read of RAM by the card goes through the IOMMU's tables"
    kind = tree.read(path)
    line = tree.read("/proc/cmdline")
    words = "" if isinstance(line, Unread) else " ".join(word for word in line.split() if "iommu" in word)
    set_it = "add iommu=pt to the kernel's command line (GRUB_CMDLINE_LINUX), update-grub, reboot"
    restore = f"put the command line back: {words or 'no iommu words'}, update-grub, reboot"
    if isinstance(kind, Unread):
        if tree.names("/sys/class/iommu"):
            return Finding(name, f"there is one; {kind.path}: {kind.why}", "unknown", why, see, set_it, restore)
        return Finding(name, "none seen from here", "good", why, see, set_it, restore)
    state: State = "good" if kind == "identity" else "bad" if kind.startswith("DMA") else "unknown"
    return Finding(name, "pass-through" if kind == "identity" else f"translates ({kind})", state, why, see, set_it, restore)


def _generation(speed: str) -> str:
    number = speed.split(" ")[0]
    generation = _GENERATION_OF.get(number)
    return f"{number} GT/s" if generation is None else f"generation {generation}"


def pcie_link(tree: Tree, address: str) -> Finding:
    """Width and generation of the link against what the card can do; a lower speed alone may be an idle card saving power."""
    name = f"PCIe link of {_label(tree, address)}"
    fields = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
    see = f"grep . {_DEVICES}/{address}/*_link_*"
    why = "misses cross this link: half the width or one generation less is half the rows a second"
    values: list[str] = []
    for field in fields:
        text = tree.read(f"{_DEVICES}/{address}/{field}")
        if isinstance(text, Unread):
            return unread(name, text, why, see)
        values.append(text)
    width, width_max, speed, speed_max = values
    set_it = "put the card into a full slot, take away the riser, set the slot to its highest generation in the firmware"
    now = f"x{width} of x{width_max}, {_generation(speed)} of {_generation(speed_max)}"
    if not width.isdecimal() or not width_max.isdecimal() or int(width) == 0:
        return Finding(name, now, "unknown", why, see, set_it)
    if int(width) < int(width_max):
        return Finding(name, now, "bad", why, see, set_it)
    if speed != speed_max:
        return Finding(name, f"{now} (an idle card may lower it: look again while it works)", "unknown", why, see, set_it)
    return Finding(name, now, "good", why, see)


def card_findings(tree: Tree) -> list[Finding]:
    """Three findings a card; one that says so when there is none."""
    found = cards(tree)
    if not found:
        why = "without a card the model runs on the CPU"
        return [Finding("cards", "no AMD or NVIDIA card seen from here", "unknown", why, "lspci -nn | grep -E '0300|0302|0380|1200'")]
    return [check(tree, address) for address in found for check in (numa_distance, iommu, pcie_link)]
