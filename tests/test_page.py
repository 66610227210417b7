"""The page in a real browser, in front of the real engine: a message is sent, tokens come, counters and pictures move."""

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine import Engine, EngineConfig
from engine.config import ServerConfig
from engine.errors import NotAdmitted
from engine.protocol import EngineFace
from engine.settings import resolve
from server import serve
from tests.browser import NO_BROWSER, Page, chromium, opened
from tests.fake_engine import FakeEngine, Opener, words

pytestmark = [pytest.mark.slow, pytest.mark.skipif(chromium() is None, reason=NO_BROWSER)]

DEMO = resolve({"demo": "true"}, {}).model_directory()
SMALL = EngineConfig(hot_rows=256, host_memory_bytes=64 * 2**20, context_max=2_048, prefix_cache="on")
STATE = "document.getElementById('state').dataset.state"
FIGURE = "Number(document.getElementById('generated').firstChild.textContent.replaceAll(',', ''))"
PAINTED = """(() => {
    const canvas = document.querySelector('[data-lane=compute] canvas');
    return canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value);
})()"""


@asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    program = chromium()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        async with opened(program, Path(profile)) as page:
            yield page


async def _serving(open_engine: Callable[[], object], visit: Callable[[Page, str], Awaitable[None]], **settings: object) -> None:
    """Run a visit of the page while a server serves."""

    async def while_ready(address: str, engine: EngineFace) -> None:
        async with browsing() as page:
            await page.look()
            await visit(page, address)

    config = ServerConfig(port=0, drain_timeout_s=5.0, **settings)  # type: ignore[arg-type]  # a test's own keywords
    await serve(open_engine, config, while_ready)  # type: ignore[arg-type]  # the demo's, or a fake one's


async def _say_and_watch(page: Page, address: str) -> None:
    """A key, a message, its answer, and what moved meanwhile."""
    await page.go(address)
    await page.until(f"{STATE} === 'key' && !document.getElementById('key-form').hidden")
    await page.type("#key", "the-key", enter=True)
    await page.until(f"{STATE} === 'ready' && document.getElementById('model').textContent === 'demo_model'")
    assert await page.value(FIGURE) == 0
    assert await page.value("document.querySelector('#sessions .empty') !== null")
    await page.value(
        "window.lengths = new Set(); new MutationObserver(() => lengths.add(document.querySelector('.said.assistant')?.innerText.length))"
        ".observe(document.getElementById('log'), {subtree: true, childList: true, characterData: true})"
    )
    await page.value("document.getElementById('max-tokens').value = 200")
    await page.value("document.getElementById('temperature').value = 0")  # what the demo then says is longer than that
    await page.type("#text", "def insort(a, x):", enter=True)
    first = await page.until(f"{FIGURE} > 0 && document.querySelector('.tag[data-phase=decoding]') && {FIGURE}")
    await page.until(f"{FIGURE} > {first}")
    await page.until(PAINTED)
    assert await page.until("document.querySelector('.rows .ring').clientWidth > 0")
    await page.until("document.querySelector('.said.assistant .counts').textContent.includes('tokens')", 120)
    counts = await page.value("document.querySelector('.said.assistant .counts').textContent")
    tokens = int(counts.split()[0])
    assert tokens == 200
    assert await page.value("lengths.size") > 20, "the answer came at once, not as a stream"
    assert (await page.until(f"{FIGURE} === {tokens} && {FIGURE}", 30)) == tokens
    assert float((await page.value("document.getElementById('hits').textContent")).rstrip("%")) > 0
    assert await page.value("document.querySelector('#memory .bar span').clientWidth") > 0
    assert not await page.value("document.querySelector('.said.failed') !== null")

    await page.value("document.getElementById('max-tokens').value = 4")
    await page.type("#text", "and once more", enter=True)
    await page.until("document.querySelectorAll('.said.assistant .counts')[1]?.textContent.includes('cached')", 120)
    assert {one for one in page.complaints if "401" not in one} == set()
    assert len(page.complaints) == 1, "only the refusal that asked for the key"
    assert [one for one in page.requested if not one.startswith((address, "data:", "about:"))] == []
    assert await page.value("sessionStorage.length") == 1


async def test_a_message_is_answered_and_counters_move() -> None:
    """A person gives the key, sends a message and sees tokens stream in, counters rise, streams and tiers drawn, and no error."""
    await _serving(lambda: Engine.open(DEMO, SMALL), _say_and_watch, api_key="the-key")


async def _narrow_and_dark(page: Page, address: str) -> None:
    await page.look(360, 740, phone=True)
    await page.go(address)
    await page.until(f"{STATE} === 'ready' && document.querySelector('.session')")
    light = await page.value("getComputedStyle(document.body).backgroundColor")
    for view, shown, hidden in (("machine", ".machine", ".chat"), ("chat", ".chat", ".machine")):
        await page.click(f".views [data-view={view}]")
        assert await page.value("document.documentElement.scrollWidth") == 360
        assert await page.value(f"document.querySelector('{shown}').offsetHeight") > 300
        assert await page.value(f"document.querySelector('{hidden}').offsetHeight") == 0
    await page.look(360, 740, dark=True, phone=True)
    dark = await page.value("getComputedStyle(document.body).backgroundColor")
    assert sum(_channels(dark)) < 150 < 600 < sum(_channels(light))
    await page.type("#text", "<img src=x onerror=alert(1)>", enter=True)
    await page.until("document.querySelector('.said.assistant .counts')?.textContent")
    assert await page.value("document.querySelector('.said.user').textContent") == "<img src=x onerror=alert(1)>"
    parts = await page.value(
        "[...document.querySelector('.said.assistant .text').childNodes].map((node) => [node.nodeName, node.textContent])"
    )
    assert [part for part in parts if part[1]] == [
        ["#text", "<b>bold</b> & more\n"], ["PRE", "<i>code</i>\n"], ["#text", "after\n"], ["PRE", "open"],
    ]  # fmt: skip
    assert await page.value("document.querySelectorAll('.said img, .said b, .said i').length") == 0
    await page.click("#chat-new")
    assert await page.value("document.getElementById('log').childElementCount") == 0
    await page.type("#text", "again", enter=True)
    await page.until("document.querySelector('.said.failed')")
    assert "full" in await page.value("document.querySelector('.said.failed').textContent")
    assert await page.value("document.getElementById('text').value") == "again"
    assert [one for one in page.complaints if "429" not in one] == []


def _channels(colour: str) -> list[int]:
    return [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]


async def test_it_fits_a_phone_follows_the_persons_colours_and_shows_text_as_text() -> None:
    """At 360 pixels nothing sticks out and each view shows its part; dark is dark; markup in a message stays text; a refusal says why."""
    engine = FakeEngine(
        [
            words("<b>bold</b>", " & more\n```js\n<i>", "code</i>\n```\n", "after\n```\nopen"),
            [NotAdmitted("the line is full", retry_after_s=1.0)],
        ]
    )
    await _serving(Opener(engine), _narrow_and_dark)
