"""The `openai` package against the server: what its users call, what they get, which of its exceptions they see."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from engine.chunk import Chunk, TokenLogprob, Usage
from engine.config import ServerConfig
from engine.errors import BadRequest, NeverFits, NotAdmitted, SessionBroken
from engine.service import Service
from server import listening
from tests.fake_engine import FakeEngine, words

MESSAGES = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(engine: FakeEngine, *, key: str | None = None, sent: str = "any") -> AsyncIterator[AsyncOpenAI]:
    service = Service(ServerConfig(port=0, api_key=key))
    service.engine = engine
    async with (
        listening(service) as address,
        DefaultAsyncHttpxClient(trust_env=False) as http,
        AsyncOpenAI(base_url=f"{address}/v1", api_key=sent, max_retries=0, http_client=http) as client,
    ):
        yield client


async def test_chat() -> None:
    """A chat answer arrives as the package's own type with text, finish reason and usage."""
    engine = FakeEngine([words("Hel", "lo")])
    async with client_of(engine, key="k", sent="k") as client:
        answer = await client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=5, seed=1)
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 5
    assert engine.calls[0].sampling.max_tokens == 5


async def test_chat_stream_with_usage() -> None:
    """A stream's pieces make the text, and the last chunk has the usage and no choice."""
    async with client_of(FakeEngine([words("Hel", "lo")])) as client:
        stream = await client.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_completion_with_token_ids_and_extensions() -> None:
    """A prompt of token ids and the extra fields of other servers go through extra_body, and token ids come back."""
    engine = FakeEngine([words("a", "b")])
    async with client_of(engine) as client:
        answer = await client.completions.create(
            model="fake", prompt=[1, 2, 3], extra_body={"ignore_eos": True, "return_token_ids": True, "top_k": 5}
        )  # fmt: skip
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"] == [100, 101]
    assert engine.calls[0].prompt == [1, 2, 3]
    assert (engine.calls[0].sampling.ignore_eos, engine.calls[0].sampling.top_k) == (True, 5)


async def test_completion_stream() -> None:
    """A streamed completion makes the whole text."""
    async with client_of(FakeEngine([words("a", "b", "c")])) as client:
        stream = await client.completions.create(model="fake", prompt="x", stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]
    assert pieces == ["a", "b", "c"]


async def test_logprobs() -> None:
    """Logprobs arrive in the package's shape for chat and for completions, offsets running on through a stream."""
    top = (TokenLogprob(5, "ab", -0.5), TokenLogprob(6, "c", -1.5))
    chunks = [
        Chunk("ab", (5,), Usage(1, 1), logprobs=(TokenLogprob(5, "ab", -0.5, top),)),
        Chunk("c", (6,), Usage(1, 2), logprobs=(TokenLogprob(6, "c", -0.25, top),), finish_reason="length"),
    ]
    async with client_of(FakeEngine([chunks])) as client:
        chat = await client.chat.completions.create(model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2)
        stream = await client.completions.create(model="fake", prompt="x", logprobs=2, stream=True)
        offsets = [chunk.choices[0].logprobs.text_offset async for chunk in stream if chunk.choices[0].logprobs]
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content or []
    assert [(token.token, token.logprob) for token in content] == [("ab", -0.5), ("c", -0.25)]
    assert [top.token for top in content[0].top_logprobs] == ["ab", "c"]
    assert offsets == [[0], [2]]


async def test_leaving_a_stream_aborts_the_generation() -> None:
    """Closing the stream after its first chunk closes the generation on the server."""
    engine = FakeEngine([[words("a", "b")[0], asyncio.Event()]])
    async with client_of(engine) as client:
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        async for chunk in stream:
            assert chunk.choices[0].delta.content == "a"
            break
        await stream.close()
        await engine.generations[0].closed.wait()
    assert engine.aborted == 1


async def test_models() -> None:
    """The model is listed and can be retrieved by name."""
    async with client_of(FakeEngine([words("x")])) as client:
        listed = [model.id async for model in client.models.list()]
        assert listed == ["fake"]
        assert (await client.models.retrieve("fake")).id == "fake"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (BadRequest("too long", field="messages"), openai.BadRequestError),
        (NotAdmitted("full", retry_after_s=2.0), openai.RateLimitError),
        (NotAdmitted("does not fit"), openai.InternalServerError),
        (NeverFits("can never fit"), openai.BadRequestError),
        (SessionBroken("layer 2"), openai.InternalServerError),
    ],
)
async def test_engine_errors_are_the_packages_own(error: Exception, raised: type[openai.APIStatusError]) -> None:
    """Each of the engine's errors becomes the exception that users of the package catch for it."""
    async with client_of(FakeEngine([[error]])) as client:
        with pytest.raises(raised) as caught:
            await client.chat.completions.create(model="fake", messages=MESSAGES)
    assert str(error) in caught.value.message


async def test_an_error_amid_a_stream_is_raised() -> None:
    """A stream that breaks raises the package's APIError with our message instead of ending quietly."""
    async with client_of(FakeEngine([[words("a", "b")[0], SessionBroken("layer 2 is not finite")]])) as client:
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        assert (await anext(stream)).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError, match="layer 2 is not finite"):
            await anext(stream)


async def test_wrong_key_model_and_fields() -> None:
    """A wrong key, an unknown model and a field out of range raise what the package's users expect."""
    async with client_of(FakeEngine([words("x")]), key="right", sent="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with client_of(FakeEngine([words("x")])) as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="fake", messages=MESSAGES, temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="fake", messages=MESSAGES, n=17)
