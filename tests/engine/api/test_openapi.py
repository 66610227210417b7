"""The document of the interface: it is one, it names every route, and its schemas are of what is really taken and sent."""

import json

import aiohttp
import jsonschema
import pytest
from openapi_spec_validator import validate

from engine.api.openapi import OPERATIONS, encode_openapi
from engine.api.requests import ChatRequest
from engine.config import ServerConfig
from engine.service import Service
from server import build_app, listening
from tests.fake_engine import FakeEngine, words
from tests.test_server import served

DOCUMENT = json.loads(encode_openapi())


def schema_of(name: str) -> dict[str, object]:
    """A component with all others at hand."""
    return {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}


def test_it_is_a_document_of_openapi() -> None:
    """An independent reader takes it; names of operations differ; every reference leads somewhere."""
    validate(DOCUMENT)
    names = [operation["operationId"] for path in DOCUMENT["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names) == len(OPERATIONS)


def test_it_names_every_route() -> None:
    """The table and the server's routes are the same."""
    routes = build_app(Service(ServerConfig())).router.routes()
    there = {(route.method.lower(), route.resource.canonical) for route in routes if route.resource is not None and route.method != "HEAD"}
    assert {(operation.method, operation.path) for operation in OPERATIONS} == there


def test_requests_are_the_types_that_decode_them() -> None:
    """Every field of a chat request is there, `messages` alone is required, and its docstring describes it."""
    chat = DOCUMENT["components"]["schemas"]["ChatRequest"]
    assert set(chat["properties"]) == set(ChatRequest.__struct_fields__)
    assert chat["required"] == ["messages"]
    assert chat["description"].startswith("Body of /v1/chat/completions")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
async def test_answers_are_of_their_schemas(path: str) -> None:
    """Whole answers and refusals of the generating routes are what the document says, by an independent reader."""
    asked = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
    body = asked.get(path, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9})
    (operation,) = (each for each in OPERATIONS if each.path == path)
    assert isinstance(operation.answer, type)
    async with served(FakeEngine([words("fine", " then")])) as client:
        async with client.post(path, json=body) as response:
            assert response.status == 200
            jsonschema.validate(await response.json(), schema_of(operation.answer.__name__))
        async with client.post(path, json={"messages": 3, "prompt": 3, "input": 3}) as response:
            assert response.status == 400
            jsonschema.validate(await response.json(), schema_of(operation.error.__name__))


async def test_the_document_is_served() -> None:
    """`/openapi.json` answers before the model is loaded, and with the key where there is one."""
    service = Service(ServerConfig(port=0, api_key="secret"))
    async with listening(service) as address, aiohttp.ClientSession(address) as client:
        async with client.get("/openapi.json", headers={"Authorization": "Bearer secret"}) as response:
            assert (response.status, await response.json()) == (200, DOCUMENT)
        async with client.get("/openapi.json") as response:
            assert response.status == 401
