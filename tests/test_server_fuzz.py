"""The server under what its own document allows, and more: schemathesis draws requests, every answer must be of the document."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import uvloop
from hypothesis import HealthCheck, given, seed, settings

from engine.gate.process import server_process
from tests.engine.grammar.random_model import random_model

LEFT_OUT = ("/v1/live",)  # a stream without an end
EXAMPLES = 10  # a route and kind of data


class Running:
    """A server process whose log is read by a loop on a thread: one that nobody reads would fill its pipe, and block the server."""

    def __init__(self, words: list[str]) -> None:
        self._words, self._address = words, Future[str]()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._hold()))

    async def _hold(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with server_process(self._words) as address:
                self._address.set_result(address)
                await self._over.wait()
        except BaseException as error:  # the test's own thread raises it
            self._address.set_exception(error)

    def __enter__(self) -> str:
        self._thread.start()
        return self._address.result(60)

    def __exit__(self, *failure: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = random_model(tmp_path_factory.mktemp("model") / "random")
    words = [
        "serve",
        str(model),
        "--device",
        "cpu",
        "--port",
        "0",
        "--host-memory",
        "64MiB",
        "--context-max",
        "256",
        "--log-format",
        "json",
    ]
    with Running([*words, "--default-max-tokens", "3", "--sessions-dir", str(tmp_path_factory.mktemp("sessions"))]) as address:
        yield address


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the library's own
def test_what_the_document_allows_is_answered_as_it_says(address: str) -> None:
    """Requests drawn from the schemas, valid and not, get a documented status and a body of its schema, and never the server's fault."""
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    sent = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in LEFT_OUT:
            continue
        modes = [GenerationMode.POSITIVE] + [GenerationMode.NEGATIVE] * bool(operation.body)  # a path alone has nothing to be wrong in
        for mode in modes:

            @seed(7)
            @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                nonlocal sent
                sent += 1
                response = case.call(timeout=60)
                checks = [not_a_server_error, status_code_conformance, response_schema_conformance]
                case.validate_response(response, checks=checks)

            check()
    assert sent > 100
