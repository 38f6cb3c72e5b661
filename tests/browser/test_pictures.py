"""Pictures of the page for the documents, of a whole stack at work; `make screenshots` puts them there."""

import asyncio
import os
import random
import shutil
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, async_playwright

from tests.system.chaos import MODEL
from tests.system.processes import RunningStack

SCREENSHOTS = os.environ.get("TANDEM_SCREENSHOTS")
CHROMIUM = shutil.which("chromium")
NUM_CLIENTS = 6
LOAD_S = 150.0
WORDS = [
    "river",
    "stone",
    "wind",
    "harbour",
    "letter",
    "garden",
    "winter",
    "bread",
    "music",
    "window",
    "bridge",
    "summer",
    "clock",
    "paper",
]

pytestmark = [
    pytest.mark.skipif(SCREENSHOTS is None, reason="only for make screenshots"),
    pytest.mark.timeout(900),
]


async def load(url: str, number: int) -> None:
    """One client that asks again and again."""
    chance = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        while True:
            subject = " ".join(chance.choices(WORDS, k=chance.choice((5, 40, 150))))
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"Write a story about {subject}."}],
                "max_tokens": chance.randrange(20, 120),
                "stream": True,
            }
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass
            await asyncio.sleep(chance.uniform(0, 3))


async def take(page: Page, scheme: str, directory: Path) -> None:
    await page.fill("#question", "What is the capital of France? Answer in one sentence.")
    await page.fill("#temperature", "0")
    await page.press("#question", "Enter")
    await page.locator(".message.assistant .served", has_text="complete after").wait_for(timeout=120_000)
    await page.locator("#links path.moving").first.wait_for(state="attached", timeout=120_000)
    await page.screenshot(path=directory / f"page-{scheme}.png", full_page=True)
    if scheme == "light":
        await page.set_viewport_size({"width": 390, "height": 844})
        await page.wait_for_timeout(1200)
        await page.screenshot(path=directory / "page-phone.png", full_page=True)


async def test_pictures_for_the_documents() -> None:
    assert SCREENSHOTS is not None
    with RunningStack(prompt_engines=2, completion_engines=2, kv_bytes=64 << 20) as stack:
        loads = [asyncio.create_task(load(stack.url, number)) for number in range(NUM_CLIENTS)]
        await asyncio.wait(loads, timeout=LOAD_S, return_when=asyncio.FIRST_COMPLETED)
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                page = await browser.new_page(color_scheme=scheme, viewport={"width": 1100, "height": 1000})
                await page.goto(stack.url)
                await page.locator(".engine .state.ready").nth(3).wait_for()
                await take(page, scheme, Path(SCREENSHOTS))
            await browser.close()
        for task in loads:
            task.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
