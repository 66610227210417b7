"""A headless Chromium, driven over its DevTools protocol: pages opened, looked at, typed into and photographed.

Knows no server. `chromium()` says what there is; a test that finds nothing is skipped with `NO_BROWSER`.

1. The browser keeps its profile in a directory of its own and ends with the block.
2. What a page complains about (exceptions, errors on its console, refused loads) is kept in `complaints`: look at it.
"""

import asyncio
import base64
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import aiohttp

__all__ = ["NO_BROWSER", "Page", "chromium", "opened"]

NO_BROWSER: Final = "no Chromium here: install the distribution's package (chromium), or name one in CHROMIUM"
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS: Final = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--mute-audio", "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0", "--disable-features=Translate,MediaRouter,OptimizationHints",
)  # fmt: skip
_ADDRESS: Final = re.compile(r"DevTools listening on (ws://\S+)")
_START_S: Final = 60.0
_COMMAND_S: Final = 400.0


def chromium() -> str | None:
    """The program, if there is one."""
    named = os.environ.get("CHROMIUM")
    return named or next((found for name in _NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. Its methods fail with RuntimeError when the page, or the browser, refuses."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self.requested: list[str] = []  # addresses the page has asked for
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""

    async def listen(self) -> None:
        """Take what the browser says, until it says no more."""
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                details = said["params"]["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.complaints.append(said["params"]["entry"]["text"])
            elif said["method"] == "Network.requestWillBeSent":
                self.requested.append(said["params"]["request"]["url"])

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        target = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": number, "method": method, "params": params, **target})
        said = await asyncio.wait_for(answer, _COMMAND_S)
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']['message']}")
        return said["result"]  # type: ignore[no-any-return]

    async def attach(self) -> None:
        """Make the tab that the other commands are for."""
        made = await self.command("Target.createTarget", url="about:blank")
        self._session = (await self.command("Target.attachToTarget", targetId=made["targetId"], flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.command(f"{domain}.enable")

    async def look(self, width: int = 1440, height: int = 1000, *, dark: bool = False, phone: bool = False) -> None:
        """The size of the window in CSS pixels, and the colours that the person prefers."""
        await self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])

    async def go(self, address: str) -> None:
        """Open an address and wait until its document is there."""
        await self.command("Page.navigate", url=address)
        await self.until("document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """What an expression of the page's gives; of a promise, what it comes to."""
        result = await self.command("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails'].get('exception', {}).get('description')}")
        return result["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 60.0) -> Any:
        """Wait for the page until an expression is true there; returns its value. The page looks itself, at every picture it draws."""
        watch = f"""new Promise((resolve, reject) => {{
            const end = performance.now() + {1000 * timeout_s};
            const look = () => {{
                const found = (() => {{ try {{ return {expression}; }} catch {{ return false; }} }})();
                if (found) resolve(found);
                else if (performance.now() > end) reject(new Error('never true'));
                else setTimeout(look, 20);
            }};
            look();
        }})"""
        return await self.value(watch)

    async def click(self, selector: str) -> None:
        """A mouse click in the middle of an element."""
        place = await self.value(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'nearest'}});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.command("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    async def type(self, selector: str, text: str, *, enter: bool = False) -> None:
        """Click into an element and type, as a person does."""
        await self.click(selector)
        await self.command("Input.insertText", text=text)
        if enter:
            for kind in ("keyDown", "keyUp"):
                await self.command("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")

    async def picture(self, path: Path) -> None:
        """What is to be seen now, as a PNG."""
        shot = await self.command("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))


@asynccontextmanager
async def opened(program: str, directory: Path) -> AsyncIterator[Page]:
    """A browser with one tab. Args: directory: for its profile, empty."""
    browser = await asyncio.create_subprocess_exec(
        program, *_FLAGS, f"--user-data-dir={directory}", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HOME": str(directory)},
    )  # fmt: skip
    try:
        async with asyncio.TaskGroup() as group:
            assert browser.stderr is not None
            async with asyncio.timeout(_START_S):
                address = await _address(browser.stderr)
            reading = group.create_task(_read_out(browser.stderr))
            async with aiohttp.ClientSession() as client, client.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                listening = group.create_task(page.listen())
                await page.attach()
                yield page
                listening.cancel()
            browser.terminate()
            await browser.wait()
            reading.cancel()
    finally:
        if browser.returncode is None:
            browser.kill()
            await browser.wait()


async def _address(lines: asyncio.StreamReader) -> str:
    seen = []
    async for line in lines:
        seen.append(line.decode(errors="replace"))
        if found := _ADDRESS.search(seen[-1]):
            return found.group(1)
    raise RuntimeError(f"Chromium ended before it listened: {''.join(seen[-5:])}")


async def _read_out(lines: asyncio.StreamReader) -> None:
    """So that it never waits for somebody to read what it says."""
    async for _ in lines:
        pass
