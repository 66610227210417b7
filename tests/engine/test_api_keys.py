"""Keys of a file, and what each may take."""

import pytest

from engine.api_keys import Account, ApiKey, QuotaReached, find_account, parse_keys


def test_a_file_of_keys() -> None:
    """Names and limits are optional, comments and blank lines are none, and the order is the file's."""
    text = "# keys\n\nplain-key\n  anna:k:with:colons requests=2\nbob:k2 tokens_per_minute=600 requests=1\n"
    assert parse_keys(text) == (
        ApiKey("plain-key"), ApiKey("k:with:colons", "anna", requests=2), ApiKey("k2", "bob", requests=1, tokens_per_minute=600),
    )  # fmt: skip
    assert "k2" not in repr(parse_keys(text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"), ("# none\n", "holds no key"), ("anna:", "line 1: the key is missing"), ("\na b", "line 2: behind the key"),
        ("secret requests=0", "requests must be"), ("secret requests=-1", "requests must be"), ("secret requests=x", "requests must be"),
        ("secret tokens=5", "behind the key"), ("secret tokens_per_minute=", "tokens_per_minute must be"),
        ("secret\nx:secret", "line 2: this key is there already"), ("x:secret\nx:other", "line 2: the name 'x'"),
        ("a/b:secret", "line 1: a name"),
        (":secret", "line 1: a name"), (f"secret requests={'9' * 5_000}", "requests must be"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_by_its_line(text: str, said: str) -> None:
    """The line is named, and no key is repeated."""
    with pytest.raises(ValueError, match=said) as caught:
        parse_keys(text)
    assert "secret" not in str(caught.value)


def test_a_key_is_found_whole_or_not_at_all() -> None:
    """Beginnings, ends, and nothing are no key; namespaces differ, and hold nothing of the key."""
    accounts = [Account(ApiKey(secret)) for secret in ("abc", "abcd", "ü")]
    assert [find_account(accounts, sent) for sent in (b"abc", b"abcd", "ü".encode())] == accounts
    assert [find_account(accounts, sent) for sent in (b"", b"ab", b"bcd", b"abcde", b"\xfc")] == [None] * 5
    assert len({account.namespace for account in accounts}) == 3
    assert not any("abc" in account.namespace for account in accounts)


def test_requests_at_once() -> None:
    """One too many is refused while the others run, and taken when one has ended, however it ended."""
    account = Account(ApiKey("k", requests=2))
    with account.generating():
        with account.generating(), pytest.raises(QuotaReached, match="2 requests"), account.generating():
            pass
        with pytest.raises(ZeroDivisionError), account.generating():
            raise ZeroDivisionError
        with account.generating():
            pass


def test_tokens_a_minute() -> None:
    """What was taken is paid back by time: at once while some are left, with the wait named when they are not."""
    now = [100.0]
    account = Account(ApiKey("k", tokens_per_minute=60), lambda: now[0])
    with account.generating():
        account.used(59)
    with account.generating():
        account.used(31)
    with pytest.raises(QuotaReached) as caught, account.generating():
        pass
    assert (caught.value.status, caught.value.retry_after_s) == (429, 31.0)
    now[0] += 29.0
    with pytest.raises(QuotaReached), account.generating():
        pass
    now[0] += 2.0
    with account.generating():
        pass
    now[0] += 10_000.0
    with account.generating():
        account.used(60)
    with pytest.raises(QuotaReached), account.generating():
        pass
