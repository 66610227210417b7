"""Pictures of the page for the README, of a server at work with the packaged model.

    python tests/page_pictures.py docs
    python tests/page_pictures.py /tmp/pictures --sessions 4

Writes page_light.png and page_dark.png, and page_phone.png unless it is left out. Times in them are of this machine.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, the folder of this file comes first

import torch
import uvloop

from engine import Engine, EngineConfig, Sampling
from engine.config import ServerConfig
from engine.protocol import EngineFace, SessionId
from engine.settings import resolve
from server import serve
from tests.browser import NO_BROWSER, Page, chromium, opened

DEMO = resolve({"demo": "true"}, {}).model_directory()
CONFIG = EngineConfig(hot_rows=512, host_memory_bytes=48 * 2**20, context_max=8_192, prefix_cache="on")
PROMPT = Path(__file__).read_text()
QUESTION = "def insort(a, x):"


async def _talk(engine: EngineFace, session: SessionId, place: int, tokens: int) -> None:
    """A conversation of one session: a long first turn, and a generation that goes on while pictures are taken."""
    text = (PROMPT * 3)[: 2_500 * (place + 1)]
    async with engine.generate(
        text, Sampling(max_tokens=tokens, temperature=0.8, seed=place, ignore_eos=True), session=session
    ) as generation:
        async for _ in generation:
            pass


async def _photograph(page: Page, address: str, folder: Path) -> None:
    await page.look(1440, 1130)
    await page.go(address)
    await page.until("document.getElementById('state').dataset.state === 'ready'")
    reading = "document.querySelectorAll('.tag[data-phase=appending]').length"
    await page.until(f"document.querySelectorAll('.session').length && !{reading}", 300)
    await page.value("document.getElementById('max-tokens').value = 120")
    await page.value("document.getElementById('temperature').value = 0")
    await page.type("#text", QUESTION, enter=True)
    await page.until("document.querySelector('.said.assistant .counts')?.textContent.includes('a second')", 300)
    await page.value("new Promise((resolve) => setTimeout(resolve, 15000))")
    for name, dark in (("page_light.png", False), ("page_dark.png", True)):
        await page.look(1440, 1130, dark=dark)
        await page.value("window.scrollTo(0, 0)")
        await page.value("new Promise((resolve) => setTimeout(resolve, 1500))")
        await page.picture(folder / name)
    await page.look(360, 1500, phone=True)
    await page.value("window.scrollTo(0, 0)")
    await page.value("new Promise((resolve) => setTimeout(resolve, 1500))")
    await page.picture(folder / "page_phone.png")


async def run(folder: Path, sessions: int) -> None:
    """Serve, keep it busy, look."""
    program = chromium()
    assert program is not None, NO_BROWSER

    async def look(address: str, engine: EngineFace) -> None:
        ids = [await engine.create_session() for _ in range(sessions)]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            async with opened(program, Path(profile)) as page, asyncio.TaskGroup() as group:
                talks = [group.create_task(_talk(engine, one, place, 2_000)) for place, one in enumerate(ids)]
                await _photograph(page, address, folder)
                for talk in talks:
                    talk.cancel()

    await serve(lambda: Engine.open(DEMO, CONFIG), ServerConfig(port=0, drain_timeout_s=1.0), look)


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description="pictures of the page, of a server at work")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sessions", type=int, default=4)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.folder.mkdir(parents=True, exist_ok=True)
    uvloop.run(run(asked.folder, asked.sessions))


if __name__ == "__main__":
    main()
