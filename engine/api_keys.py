"""Keys of a server's users: the file they come from, who sent one, and what each may take.

Holds the keys, and what each user has running and has left of the minute. Knows no HTTP.

1. A key that was sent is compared with every key there is, each in constant time.
2. A user's sessions, histories and kept responses are its own (`namespace`, made of the key); a name is for the log alone.
3. Tokens are counted when a request ends: whoever is behind then waits until the minutes have paid for it.
"""

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.errors import ForebayError

__all__ = ["Account", "ApiKey", "QuotaReached", "find_account", "parse_keys"]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LIMITS = ("requests", "tokens_per_minute")
_MINUTE_S = 60.0
_RETRY_S = 1.0


class QuotaReached(ForebayError):
    """A key has as much running, or has taken as many tokens, as it may."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One user's key. `requests`: generations at once; `tokens_per_minute`: read anew and generated; 0: no limit."""

    secret: str = field(repr=False)
    name: str = ""
    requests: int = 0
    tokens_per_minute: int = 0


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Keys of a file: one a line, `[name:]key [requests=N] [tokens_per_minute=N]`; blank lines and # lines are none.

    Raises: ValueError: what is wrong with which line. It never repeats a key.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = _parse_key(line.split())
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if any(key.secret == other.secret for other in keys):
            raise ValueError(f"line {number}: this key is there already")
        if key.name and any(key.name == other.name for other in keys):
            raise ValueError(f"line {number}: the name {key.name!r} is there already")
        keys.append(key)
    if not keys:
        raise ValueError("it holds no key")
    return tuple(keys)


def _parse_key(words: Sequence[str]) -> ApiKey:
    name, colon, secret = words[0].partition(":")
    if not colon:
        name, secret = "", words[0]
    elif not _NAME.fullmatch(name):
        raise ValueError("a name has letters, digits, dots, dashes and underscores, at most 64; a key without a name has no colon")
    if not secret:
        raise ValueError("the key is missing")
    limits = dict.fromkeys(_LIMITS, 0)
    for word in words[1:]:
        limit, equals, value = word.partition("=")
        if not equals or limit not in limits:
            raise ValueError(f"behind the key come {' and '.join(f'{each}=N' for each in _LIMITS)} only; a key has no blanks")
        if not (value.isascii() and value.isdecimal() and int(value[:12]) > 0 and len(value) <= 12):
            raise ValueError(f"{limit} must be an integer of at least 1")
        limits[limit] = int(value)
    return ApiKey(secret, name, **limits)


class Account:
    """What one key has and has taken. Loop only."""

    def __init__(self, key: ApiKey | None, now: Callable[[], float] = time.monotonic) -> None:
        """Args: key: None: everybody's, where no key is asked for. now: seconds."""
        self.name = "" if key is None else key.name
        # The key itself is kept for comparisons alone.
        self.namespace = "" if key is None else hashlib.sha256(key.secret.encode()).hexdigest()
        self._secret = b"" if key is None else key.secret.encode()
        self._requests_max = 0 if key is None else key.requests
        self._tokens_a_minute = 0 if key is None else key.tokens_per_minute
        self._now = now
        self._running = 0
        self._left, self._as_of = float(self._tokens_a_minute), now()

    def has(self, sent: bytes) -> bool:
        """Whether this is the key; in constant time."""
        return hmac.compare_digest(sent, self._secret)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """One of the key's generations for the length of the block. Raises QuotaReached."""
        if self._requests_max and self._running >= self._requests_max:
            raise QuotaReached(f"{self._running} requests of this key are running, the most it may have", _RETRY_S)
        if self._tokens_a_minute and self._refilled() <= 0:
            wait_s = (1 - self._left) * _MINUTE_S / self._tokens_a_minute
            raise QuotaReached(f"this key's {self._tokens_a_minute} tokens a minute are used up; it may go on in {wait_s:.0f} s", wait_s)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def used(self, tokens: int) -> None:
        """A generation has ended that took so many."""
        if self._tokens_a_minute:
            self._left = self._refilled() - tokens

    def _refilled(self) -> float:
        now = self._now()
        self._left = min(float(self._tokens_a_minute), self._left + (now - self._as_of) * self._tokens_a_minute / _MINUTE_S)
        self._as_of = now
        return self._left


def find_account(accounts: Sequence[Account], sent: bytes) -> Account | None:
    """Whose key was sent; looks at all of them, so that the time it takes says nothing."""
    found = None
    for account in accounts:
        if account.has(sent):
            found = account
    return found
