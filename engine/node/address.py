"""Where a node listens, as people write it: `host:port`, an IPv6 host in brackets."""

from typing import NamedTuple

__all__ = ["Address", "parse_address", "parse_addresses"]


class Address(NamedTuple):
    """A host, as name or number, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """One address. Raises ValueError, saying what was expected."""
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or (":" in host and not bracketed) or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ValueError("host:port, like 10.0.0.2:7000 or [fd00::2]:7000")
    return Address(host, int(port))


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Several, with commas between, each once. Raises ValueError."""
    found = tuple(parse_address(part) for part in text.split(","))
    if len(set(found)) < len(found):
        raise ValueError("addresses that differ: each node is named once")
    if any(address.port == 0 for address in found):
        raise ValueError("addresses with a port: 0 is no port to connect to")
    return found
