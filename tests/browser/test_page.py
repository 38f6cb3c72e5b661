"""The web page in headless Chromium, in front of mock engines.

Needs a `chromium` on the PATH (Debian: `apt-get install chromium`); without one it is skipped, and says so.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from playwright.async_api import Browser, Page, async_playwright

from tests.proxy.builders import Answering, Stack, stack
from tests.proxy.mock_engines import Call, MockEngine

CHROMIUM = shutil.which("chromium")
TEXT = "Prompt engines compute, completion engines write: שלום 🙂"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="NOT TESTED: the web page (no chromium on the PATH)")


class Gate:
    """Holds completion engines back while it is closed."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.opened.set()

    async def prompt(self, call: Call) -> None:
        await Answering(TEXT).prompt(call)

    async def completion(self, call: Call) -> None:
        await call.accept()
        await self.opened.wait()
        token_ids = Answering(TEXT).ids
        for index in range(1, len(token_ids)):
            reason = "stop" if index == len(token_ids) - 1 else None
            await call.tokens(index, [token_ids[index]], finish_reason=reason)
        await call.end()


@asynccontextmanager
async def serving(gate: Gate) -> AsyncIterator[Stack]:
    engines = [
        *(MockEngine("prompt", gate.prompt) for _ in range(2)),
        *(MockEngine("completion", gate.completion) for _ in range(2)),
    ]
    for number, engine in enumerate(engines):
        engine.info = replace(
            engine.info, engine_id=f"e{number}", max_model_len=4096, num_free_blocks=1000 - 130 * (number + 1)
        )
    async with stack(*engines, refresh_s=0.2) as running:
        yield running


@asynccontextmanager
async def open_page(browser: Browser, running: Stack, **options: object) -> AsyncIterator[Page]:
    """A page that may not complain about anything, nor ask anybody but the proxy."""
    context = await browser.new_context(**options)
    page = await context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    asked: list[str] = []
    await page.goto(running.url)
    await page.locator(".engine .state.ready").nth(3).wait_for()
    yield page
    assert complaints == []
    assert all(url.startswith((running.url, "data:")) for url in asked)
    await context.close()


async def ask(page: Page, question: str) -> None:
    await page.fill("#question", question)
    await page.press("#question", "Enter")


async def check_chat(page: Page, gate: Gate, running: Stack) -> None:
    gate.opened.clear()
    await ask(page, "What do you do?")
    await page.locator(".message.assistant .served", has_text="first token after").wait_for()
    await page.locator("#links path.moving").wait_for(state="attached")
    assert await page.inner_text("#moving") == "1"
    gate.opened.set()
    served = page.locator(".message.assistant .served", has_text="complete after")
    await served.wait_for()
    told = await served.inner_text()
    route = [engine for engine in running.engines if engine.calls]
    assert len(route) == 2
    for part in ("served by prompt", "→ completion", "first token after", "KV arrived by", "complete after"):
        assert part in told
    assert await page.inner_text(".message.assistant .content") == TEXT


async def check_charts(page: Page, running: Stack) -> None:
    running.services.activity.bucket_s = 0.5
    for _ in range(3):
        await running.complete()
    await page.locator("#ttft-chart path.series[d^='M']").first.wait_for(state="attached")
    box = await page.locator("#tokens-chart svg").bounding_box()
    assert box is not None
    await page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    assert "s ago" in await page.inner_text("#tokens-chart .legend")


async def check_links_join_engines(page: Page) -> None:
    """Wherever the page is scrolled to."""
    await page.locator("#question").scroll_into_view_if_needed()
    await page.wait_for_timeout(1500)
    gap = await page.evaluate("""() => {
        const path = document.querySelector('#links path').getBoundingClientRect();
        const card = document.querySelector('#prompt-engines .engine').getBoundingClientRect();
        return [path.left - card.right, path.top - (card.top + card.height / 2)];
    }""")
    assert all(abs(distance) < 3 for distance in gap), gap


async def check_fits_a_phone(page: Page) -> None:
    await page.set_viewport_size({"width": 360, "height": 740})
    await check_links_join_engines(page)
    widths = "[document.documentElement.scrollWidth, innerWidth]"
    needed, given = await page.evaluate(widths)
    assert needed <= given, "nothing is wider than the screen"


async def test_engines_charts_and_chat() -> None:
    gate = Gate()
    async with serving(gate) as running, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        async with open_page(browser, running, viewport={"width": 1100, "height": 900}) as page:
            await check_chat(page, gate, running)
            await check_charts(page, running)
            await check_fits_a_phone(page)
        await browser.close()


async def test_an_engine_that_drains_is_not_called_down() -> None:
    async with serving(Gate()) as running, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        async with open_page(browser, running) as page:
            await running.engines[2].drain(grace_s=30.0)
            state = page.locator(".engine .state.leaving")
            await state.wait_for()
            assert await state.inner_text() == "◐ draining"
        await browser.close()


async def test_colours_follow_the_readers_wish() -> None:
    async with serving(Gate()) as running, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        backgrounds = []
        for scheme in ("light", "dark"):
            async with open_page(browser, running, color_scheme=scheme) as page:
                colour = "getComputedStyle(document.body).backgroundColor"
                backgrounds.append(await page.evaluate(colour))
        assert backgrounds[0] != backgrounds[1]
        await browser.close()


async def test_an_error_is_shown_with_its_reason() -> None:
    async def refuse(call: Call) -> None:
        await call.refuse(400, "no room in this town", kind="invalid_request_error")

    engines = MockEngine("prompt", refuse), MockEngine("completion", Gate().completion)
    async with stack(*engines) as running, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page()
        await page.goto(running.url)
        await page.locator(".engine .state.ready").nth(1).wait_for()
        await ask(page, "Hello?")
        served = page.locator(".message.failed .served")
        await served.wait_for()
        assert await served.inner_text() == "no room in this town"
        await browser.close()
