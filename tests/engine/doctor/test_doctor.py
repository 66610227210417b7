"""The doctor over made-up /proc and /sys trees: good, bad, missing, unreadable, several cards, and that it only reads."""

import ast
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import engine.commands.doctor
import engine.doctor
from engine.commands.doctor import report
from engine.doctor import Finding, Tree, examine, rows
from engine.doctor.cards import cards, parse_list

LIMITS = "Limit                     Soft Limit   Hard Limit   Units\nMax locked memory         {}            {}            bytes\n"
MEMORY = "MemTotal:       1048576 kB\nMemFree:         1 kB\nMemAvailable:   {} kB\n"
STATUS = "Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t{}\n"

HOST = {
    "proc/sys/kernel/numa_balancing": "0\n",
    "proc/sys/vm/compaction_proactiveness": "0\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "proc/self/limits": LIMITS.format("unlimited", "unlimited"),
    "proc/meminfo": MEMORY.format(900_000),
    "proc/cmdline": "quiet iommu=pt root=/dev/x\n",
    "proc/self/status": STATUS.format("0-3"),
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance\n",
    "sys/devices/system/cpu/cpufreq/ignored": "",
    "sys/devices/system/node/node0/cpulist": "0-3\n",
    "sys/devices/system/node/node0/distance": "10 32\n",
    "sys/devices/system/node/node1/cpulist": "4-7\n",
    "sys/devices/system/node/node1/distance": "32 10\n",
}


def card(address: str, vendor: str = "0x10de", **fields: str) -> dict[str, str]:
    """One PCI device's files."""
    given = {
        "class": "0x030200", "vendor": vendor, "numa_node": "0", "iommu_group/type": "identity", "current_link_width": "16",
        "max_link_width": "16", "current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe", **fields,
    }  # fmt: skip
    return {f"sys/bus/pci/devices/{address}/{name}": text for name, text in given.items()}


def machine(root: Path, *parts: dict[str, str], without: tuple[str, ...] = ()) -> Tree:
    """A tree of these files, later ones winning."""
    files = {path: text for part in parts for path, text in part.items()}
    for path, text in files.items():
        if path not in without:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
    return Tree(root)


def found(tree: Tree, name: str) -> Finding:
    """The one finding whose name begins so."""
    [one] = [finding for finding in examine(tree) if finding.name.startswith(name)]
    return one


def test_a_good_machine_is_all_good(tmp_path: Path) -> None:
    """With every setting right no line is bad or unknown, and there is a line for each setting and card."""
    findings = examine(machine(tmp_path, HOST, card("0000:41:00.0")))
    assert {finding.state for finding in findings} == {"good"}
    assert len(findings) == 9


@pytest.mark.parametrize(
    ("path", "text", "name", "restore"),
    [
        ("proc/sys/kernel/numa_balancing", "1", "NUMA balancing", "sudo sysctl -w kernel.numa_balancing=1"),
        ("proc/sys/kernel/numa_balancing", "2", "NUMA balancing", "sudo sysctl -w kernel.numa_balancing=2"),
        ("proc/sys/vm/compaction_proactiveness", "20", "proactive compaction", "sudo sysctl -w vm.compaction_proactiveness=20"),
        (
            "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]", "transparent huge pages",
            "echo never | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        ("proc/self/limits", LIMITS.format(8 << 20, "unlimited"), "locked memory", "ulimit -l 8192"),
        ("proc/meminfo", MEMORY.format(524_287), "free RAM", "nothing to restore"),
        (
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave", "CPU governor",
            "sudo cpupower frequency-set -g powersave    (then by CPU: performance on 1 CPUs, powersave on 1 CPUs)",
        ),
        ("proc/self/status", STATUS.format("0-7"), "NUMA distance", "forebay serve ...    (without numactl: nodes 0,1)"),
        (
            "sys/bus/pci/devices/0000:41:00.0/iommu_group/type", "DMA-FQ", "IOMMU",
            "put the command line back: iommu=pt, update-grub, reboot",
        ),
        ("sys/bus/pci/devices/0000:41:00.0/current_link_width", "8", "PCIe link", "nothing to restore"),
    ],
)  # fmt: skip
def test_a_bad_setting_says_how_to_go_back(tmp_path: Path, path: str, text: str, name: str, restore: str) -> None:
    """One bad value makes exactly one line bad, and its restore line carries the value that was found."""
    tree = machine(tmp_path, HOST, card("0000:41:00.0"), {path: text})
    finding = found(tree, name)
    assert finding.state == "bad"
    assert finding.restore == restore
    assert [one for one in examine(tree) if one.state != "good"] == [finding]


@pytest.mark.parametrize("available", [0, 524_286, 524_287, 524_288, 1_048_576])
def test_half_of_the_memory_is_enough(tmp_path: Path, available: int) -> None:
    """Free RAM is good from half of the machine's on (percent, rounded down)."""
    state = found(machine(tmp_path, HOST, {"proc/meminfo": MEMORY.format(available)}), "free RAM").state
    assert state == ("good" if available >= 524_288 else "bad")


@pytest.mark.parametrize(("limit", "state"), [(449_999, "bad"), (450_000, "good")])
def test_a_lock_limit_is_judged_by_what_the_arena_takes(tmp_path: Path, limit: int, state: str) -> None:
    """A finite limit is good from half of the available RAM on."""
    tree = machine(tmp_path, HOST, {"proc/self/limits": LIMITS.format(limit * 1024, "unlimited")})
    assert found(tree, "locked memory").state == state


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ("proc/sys/kernel/numa_balancing", "maybe", "NUMA balancing"),
        ("proc/sys/kernel/numa_balancing", "", "NUMA balancing"),
        ("proc/sys/vm/compaction_proactiveness", "-1", "proactive compaction"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise never", "transparent huge pages"),
        ("proc/self/limits", "nothing here", "locked memory"),
        ("proc/self/limits", LIMITS.format("much", "more"), "locked memory"),
        ("proc/meminfo", "MemTotal: 0 kB", "free RAM"),
        ("proc/meminfo", "", "free RAM"),
        ("proc/self/status", "Name: x", "NUMA distance"),
        ("proc/self/status", STATUS.format("a-b"), "NUMA distance"),
        ("sys/devices/system/node/node0/distance", "10", "NUMA distance"),
        ("sys/bus/pci/devices/0000:41:00.0/numa_node", "-1", "NUMA distance"),
        ("sys/bus/pci/devices/0000:41:00.0/numa_node", "9", "NUMA distance"),
        ("sys/bus/pci/devices/0000:41:00.0/iommu_group/type", "blocked", "IOMMU"),
        ("sys/bus/pci/devices/0000:41:00.0/current_link_width", "0", "PCIe link"),
        ("sys/bus/pci/devices/0000:41:00.0/max_link_width", "?", "PCIe link"),
        ("sys/bus/pci/devices/0000:41:00.0/current_link_speed", "2.5 GT/s PCIe", "PCIe link"),
    ],
)
def test_what_cannot_be_understood_is_unknown(tmp_path: Path, path: str, text: str, name: str) -> None:
    """A value that means nothing to us, or a link that may only be idle, makes its line unknown and nothing fails."""
    assert found(machine(tmp_path, HOST, card("0000:41:00.0"), {path: text}), name).state == "unknown"


def test_an_empty_machine_has_no_error(tmp_path: Path) -> None:
    """Without a single file every line is unknown and says why; nothing raises."""
    findings = examine(Tree(tmp_path))
    assert {finding.state for finding in findings} == {"unknown"}
    assert "this kernel does not have it" in found(Tree(tmp_path), "NUMA balancing").now


def test_missing_card_files_are_unknown(tmp_path: Path) -> None:
    """A card that shows nothing but what it is gives unknown lines where something is hidden; with no IOMMU at all that line is good."""
    address = "0000:41:00.0"
    hidden = tuple(path for path in card(address) if not path.endswith(("class", "vendor")))
    tree = machine(tmp_path, HOST, card(address), without=hidden)
    assert [found(tree, name).state for name in ("NUMA distance", "IOMMU", "PCIe link")] == ["unknown", "good", "unknown"]
    (tmp_path / "sys/class/iommu/dmar0").mkdir(parents=True)
    assert found(tree, "IOMMU").state == "unknown"


def test_an_unreadable_file_is_unknown(tmp_path: Path) -> None:
    """A file that cannot be read (here: a directory in its place) gives an unknown line with the system's reason."""
    tree = machine(tmp_path, HOST, without=("proc/meminfo",))
    (tmp_path / "proc/meminfo").mkdir()
    finding = found(tree, "free RAM")
    assert finding.state == "unknown"
    assert "/proc/meminfo: is a directory" in finding.now


def test_one_unreadable_governor_is_not_hidden(tmp_path: Path) -> None:
    """A CPU whose governor cannot be read keeps the line from being good."""
    tree = machine(tmp_path, HOST)
    (tmp_path / "sys/devices/system/cpu/cpu2").mkdir()
    finding = found(tree, "CPU governor")
    assert finding.state == "unknown"
    assert "not readable on 1" in finding.now


def test_every_card_is_judged_by_itself(tmp_path: Path) -> None:
    """Cards of both makers are found, other devices are not, and each has its own lines."""
    tree = machine(
        tmp_path, HOST, card("0000:41:00.0"), card("0000:c1:00.0", "0x1002", **{"class": "0x120000", "numa_node": "1"}),
        card("0000:01:00.0", "0x1002", **{"class": "0x060400"}), card("0000:02:00.0", "0x8086"),
        {"sys/bus/pci/devices/0000:05:00.0/vendor": "0x10de"},
    )  # fmt: skip
    assert cards(tree) == ["0000:41:00.0", "0000:c1:00.0"]
    near, far = found(tree, "NUMA distance of NVIDIA 0000:41:00.0"), found(tree, "NUMA distance of AMD 0000:c1:00.0")
    assert (near.state, near.now) == ("good", "on node 0; 10 from node 0")
    assert (far.state, far.now) == ("bad", "on node 1; 32 from node 0")
    assert "--cpunodebind=1 --membind=1" in far.set_it


def test_one_node_has_no_distance(tmp_path: Path) -> None:
    """On a machine of one node the distance is good, also when the firmware says -1."""
    without = tuple(path for path in HOST if "node1" in path)
    tree = machine(tmp_path, HOST, card("0000:41:00.0", numa_node="-1"), without=without)
    assert found(tree, "NUMA distance").now == "one node"


@pytest.mark.parametrize(("text", "numbers"), [("", set()), ("3", {3}), ("0-2,8", {0, 1, 2, 8}), ("4-4", {4})])
def test_lists(text: str, numbers: set[int]) -> None:
    """The kernel's lists of CPUs are read as they are written."""
    assert parse_list(text) == numbers


def test_json_carries_every_line(tmp_path: Path) -> None:
    """--json prints one object with every finding: now, state, see, set, restore."""
    findings = examine(machine(tmp_path, HOST, {"proc/sys/kernel/numa_balancing": "1"}))
    out = io.StringIO()
    report(findings, Console(file=out), as_json=True)
    printed = json.loads(out.getvalue())
    assert printed["bad"] == 1
    assert printed["findings"] == rows(findings)
    assert set(printed["findings"][0]) == {"name", "now", "state", "why", "see", "set", "restore"}


def test_the_table_names_what_is_bad(tmp_path: Path) -> None:
    """The table's last line counts the states and names the bad ones; brackets in values are not taken for markup."""
    findings = [*examine(machine(tmp_path, HOST, {"proc/sys/kernel/numa_balancing": "1"})), Finding("odd", "[bold]x", "unknown", "", "")]
    out = io.StringIO()
    report(findings, Console(file=out, width=160), as_json=False)
    assert "bad: NUMA balancing" in out.getvalue()
    assert "[bold]x" in out.getvalue()


def offences(source: str) -> list[str]:
    """Calls that write, run or change something."""
    names = {"open", "write_text", "write_bytes", "run", "Popen", "system", "check_output", "mkdir", "unlink", "touch", "chmod", "rename"}
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    called = [getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls]
    return [name for name in called if name in names]


def test_the_doctor_only_reads() -> None:
    """No module of the doctor opens a file by itself, writes one, or runs a program; files are read through `Tree.read` alone."""
    assert offences("open('x', 'w'); Path('x').write_text(''); subprocess.run([])") == ["open", "write_text", "run"]
    paths = [*Path(engine.doctor.__file__).parent.glob("*.py"), Path(engine.commands.doctor.__file__)]
    assert len(paths) == 6
    assert {path.name: offences(path.read_text()) for path in paths if offences(path.read_text())} == {}
    readers = [path.name for path in paths if "read_text" in path.read_text() or "listdir" in path.read_text()]
    assert readers == ["tree.py"]
