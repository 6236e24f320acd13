"""A browser for the tests: Debian's Chromium, headless; skipped where it is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

HERE = Path(__file__).parent
ASSETS = HERE.parents[1] / "docs" / "assets"
AXE = HERE / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PICTURES = bool(os.environ.get("ANDON_SCREENSHOTS"))
"""Whether the tests write the pictures of the documentation (`make screenshots`)."""

_COLOURS = 256
_PATIENCE_MS = 60_000


@dataclass
class Sight:
    """One page in the browser, and what it did that it should not have done."""

    page: Any
    wrong: list[str] = field(default_factory=list)
    expected: set[str] = field(default_factory=set)
    """Parts of messages that a test provokes."""

    @property
    def faults(self) -> list[str]:
        """Errors in the console, and requests that left the service."""
        return [each for each in self.wrong if not any(part in each for part in self.expected)]

    def barriers(self) -> list[str]:
        """What axe-core finds that is serious or critical, with the elements."""
        if not AXE.exists():
            pytest.skip("needs axe-core: make browser")
        # By the debugger's interface: the page's own policy would refuse another script.
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{each['id']} ({each['impact']}): {node['html'][:200]} {node['failureSummary']}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]

    def overhang(self) -> int:
        """By how many pixels the page is wider than the window."""
        script = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return int(self.page.evaluate(script))

    def picture(self, name: str, *, height: int | None = None, whole: bool = False) -> None:
        """Writes a picture of the page for the documentation, if they were asked for."""
        if not PICTURES:
            return
        from PIL import Image

        if whole:
            height = int(self.page.evaluate("document.documentElement.scrollHeight"))
        if height:
            self.page.set_viewport_size({**self.page.viewport_size, "height": height})
        self.page.wait_for_timeout(400)  # the charts follow the window's size
        shot = Image.open(BytesIO(self.page.screenshot())).convert("RGB")
        few = shot.quantize(palette=palette_of(shot), dither=Image.Dither.NONE)
        few.save(ASSETS / f"{name}.png", optimize=True)


Opens = Callable[..., Sight]
"""Opens a page: its address, the window's width, height and scheme, a script that runs first."""


def palette_of(shot: Any) -> Any:
    """The most frequent colours exactly, so that no surface changes its tone, and then a spread."""
    from PIL import Image

    exact = sorted(shot.getcolors(shot.width * shot.height), reverse=True)[: _COLOURS // 2]
    spread = shot.quantize(_COLOURS - len(exact), Image.Quantize.MAXCOVERAGE).getpalette()
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _count, colour in exact for part in colour] + spread)
    return palette


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A running browser."""
    if find_spec("playwright") is None:
        pytest.skip("needs Playwright: make browser")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's sandbox does not work for root, as in containers.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def look(chromium: Any) -> Iterator[Opens]:
    """Opens pages; at the end none of them may have made an error or asked elsewhere."""
    sights: list[Sight] = []
    contexts: list[Any] = []

    def open_(
        url: str,
        *,
        width: int = 1360,
        height: int = 900,
        scheme: str = "light",
        script: str = "",
    ) -> Sight:
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        context.set_default_timeout(_PATIENCE_MS)
        if script:
            context.add_init_script(script)
        page = context.new_page()
        sight = Sight(page)
        home = urlsplit(url).netloc

        def requested(request: Any) -> None:
            parts = urlsplit(request.url)
            if parts.scheme not in ("data", "blob") and parts.netloc != home:
                sight.wrong.append(f"asked elsewhere: {request.url}")

        page.on("request", requested)
        page.on("pageerror", lambda error: sight.wrong.append(f"error: {error}"))
        page.on(
            "console",
            lambda said: (
                sight.wrong.append(f"console: {said.text} {said.location.get('url')}")
                if said.type in ("error", "warning")
                else None
            ),
        )
        sights.append(sight)
        contexts.append(context)
        page.goto(url)
        return sight

    yield open_
    faults = [each for sight in sights for each in sight.faults]
    for context in contexts:
        context.close()
    assert faults == []
