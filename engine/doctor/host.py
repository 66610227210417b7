"""Findings about the host: NUMA balancing, compaction, huge pages, locked memory, free RAM, the CPU's governor.

Pure functions of a `Tree`. Knows no card.
"""

import re
from collections import Counter
from collections.abc import Callable

from engine.doctor.finding import Finding, State, unread
from engine.doctor.tree import Tree, Unread

__all__ = ["host_findings", "kibibytes_of"]

_PERCENT_FREE_LEAST = 50
_CHOSEN = re.compile(r"\[(\S+)\]")


def size_text(kibibytes: int) -> str:
    """`12.5 GiB`, `8.0 MiB`."""
    return f"{kibibytes / 2**20:.1f} GiB" if kibibytes >= 2**20 else f"{kibibytes / 2**10:.1f} MiB"


def kibibytes_of(meminfo: str, field: str) -> int | None:
    """A field of /proc/meminfo in KiB, None when it is not there."""
    found = re.search(rf"^{field}:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(found.group(1)) if found else None


def _sysctl_off(tree: Tree, name: str, key: str, why: str) -> Finding:
    """A sysctl that is good when 0."""
    path = "/proc/sys/" + key.replace(".", "/")
    see = f"cat {path}"
    value = tree.read(path)
    if isinstance(value, Unread):
        return unread(name, value, why, see)
    if not value.isdecimal():
        return Finding(name, f"{value!r}, not a number", "unknown", why, see)
    state: State = "good" if int(value) == 0 else "bad"
    return Finding(name, value, state, why, see, f"sudo sysctl -w {key}=0", f"sudo sysctl -w {key}={value}")


def numa_balancing(tree: Tree) -> Finding:
    """Automatic NUMA balancing: off is good."""
    why = "balancing unmaps pages to see who uses them; a thread that feeds the card then stalls on page faults"
    return _sysctl_off(tree, "NUMA balancing", "kernel.numa_balancing", why)


def proactive_compaction(tree: Tree) -> Finding:
    """Compaction in the background: off is good."""
    why = "background compaction moves pages and holds locks while steps are submitted"
    return _sysctl_off(tree, "proactive compaction", "vm.compaction_proactiveness", why)


def huge_pages(tree: Tree) -> Finding:
    """Transparent huge pages: always or madvise is good, because the arena asks for them."""
    name, path = "transparent huge pages", "/sys/kernel/mm/transparent_hugepage/enabled"
    why = "the arena asks for huge pages: registering it is quicker and a row is found with fewer translations"
    text = tree.read(path)
    if isinstance(text, Unread):
        return unread(name, text, why, f"cat {path}")
    chosen = _CHOSEN.search(text)
    if chosen is None:
        return Finding(name, f"{text!r}, no choice marked", "unknown", why, f"cat {path}")
    now = chosen.group(1)
    state: State = "good" if now in ("always", "madvise") else "bad"
    return Finding(name, now, state, why, f"cat {path}", f"echo madvise | sudo tee {path}", f"echo {now} | sudo tee {path}")


def locked_memory(tree: Tree) -> Finding:
    """The limit of locked memory: unlimited, or at least what the arena takes by itself, is good."""
    name, see = "locked memory", "ulimit -l    (KiB; the hard limit: ulimit -H -l)"
    why = "histories lie in registered memory, which some drivers count against this limit; half of the free RAM is what the arena takes"
    text = tree.read("/proc/self/limits")
    if isinstance(text, Unread):
        return unread(name, text, why, see)
    found = re.search(r"^Max locked memory\s+(\S+)\s+(\S+)", text, re.MULTILINE)
    if found is None:
        return Finding(name, "/proc/self/limits has no such line", "unknown", why, see)
    soft = found.group(1)
    set_it = "ulimit -l unlimited    (systemd: LimitMEMLOCK=infinity; container: --ulimit memlock=-1)"
    if soft == "unlimited":
        return Finding(name, soft, "good", why, see, set_it, "ulimit -l unlimited")
    if not soft.isdecimal():
        return Finding(name, f"{soft!r}, not a size", "unknown", why, see)
    kibibytes = int(soft) // 1024
    hard = size_text(int(found.group(2)) // 1024) if found.group(2).isdecimal() else found.group(2)
    meminfo = tree.read("/proc/meminfo")
    available = None if isinstance(meminfo, Unread) else kibibytes_of(meminfo, "MemAvailable")
    state: State = "unknown" if available is None else "good" if kibibytes >= available // 2 else "bad"
    now = f"{size_text(kibibytes)} (hard limit {hard})"
    return Finding(name, now, state, why, see, set_it, f"ulimit -l {kibibytes}")


def free_memory(tree: Tree) -> Finding:
    """RAM that can be had: at least half of the machine's is good."""
    name, see = "free RAM", "grep -E 'MemTotal|MemAvailable' /proc/meminfo"
    why = "histories live in RAM; what others hold is missing there, and swapping stalls every step"
    text = tree.read("/proc/meminfo")
    if isinstance(text, Unread):
        return unread(name, text, why, see)
    total, available = kibibytes_of(text, "MemTotal"), kibibytes_of(text, "MemAvailable")
    if not total or available is None:
        return Finding(name, "/proc/meminfo lacks MemTotal or MemAvailable", "unknown", why, see)
    percent = 100 * available // total
    state: State = "good" if percent >= _PERCENT_FREE_LEAST else "bad"
    now = f"{size_text(available)} of {size_text(total)} ({percent}%)"
    return Finding(name, now, state, why, see, "end what holds it (ps aux --sort=-rss | head), or serve with a smaller --host-memory")


def cpu_governor(tree: Tree) -> Finding:
    """The governors of all CPUs: performance is good."""
    name, place = "CPU governor", "/sys/devices/system/cpu"
    see = f"cat {place}/cpu*/cpufreq/scaling_governor | sort | uniq -c"
    why = "a core that sleeps deep or runs slow takes longer to submit a step and to see it end"
    cores = [cpu for cpu in tree.names(place) if re.fullmatch(r"cpu\d+", cpu)]
    read = [tree.read(f"{place}/{cpu}/cpufreq/scaling_governor") for cpu in cores]
    governors = Counter(text for text in read if not isinstance(text, Unread))
    failed = [text for text in read if isinstance(text, Unread)]
    if not governors:
        reason = failed[0] if failed else Unread(f"{place}/cpu0/cpufreq/scaling_governor", "this kernel does not have it")
        return unread(name, reason, why, see)
    state: State = "bad" if set(governors) != {"performance"} else "unknown" if failed else "good"
    now = ", ".join(f"{governor} on {count} CPUs" for governor, count in sorted(governors.items()))
    if failed:
        now += f", not readable on {len(failed)}"
    usual = governors.most_common(1)[0][0]
    restore = f"sudo cpupower frequency-set -g {usual}"
    if len(governors) > 1:
        restore += f"    (then by CPU: {now})"
    return Finding(name, now, state, why, see, "sudo cpupower frequency-set -g performance", restore)


_CHECKS: tuple[Callable[[Tree], Finding], ...] = (
    numa_balancing, proactive_compaction, huge_pages, locked_memory, free_memory, cpu_governor,
)  # fmt: skip


def host_findings(tree: Tree) -> list[Finding]:
    """All of them, in the order they are shown."""
    return [check(tree) for check in _CHECKS]
