"""The page's files: complete, and in keeping with the policy under which they are served."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import andon_server.board

STATIC = Path(andon_server.board.__file__).parent / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))


class Elements(HTMLParser):
    """The elements of the page, and the text of scripts and styles in it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style"):
            self.inline += data.strip()


@pytest.fixture
def page() -> Elements:
    elements = Elements()
    elements.feed((STATIC / "index.html").read_text())
    return elements


def test_the_page_has_neither_scripts_nor_styles_of_its_own(page: Elements) -> None:
    assert page.inline == ""
    for _tag, attributes in page.found:
        assert not [name for name in attributes if name == "style" or name.startswith("on")]


def test_every_file_that_the_page_names_is_there(page: Elements) -> None:
    named = [attributes.get("src") or attributes.get("href") for _tag, attributes in page.found]
    files = [name for name in named if name and not name.startswith("#")]

    assert len(files) >= 6
    for name in files:
        assert name.startswith("board/"), name
        assert (STATIC / name.removeprefix("board/")).is_file(), name


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_imports_what_is_there_and_never_makes_markup_of_text(script: Path) -> None:
    text = script.read_text()
    imported = re.findall(r'^(?:import|\} from) .*?"(.+?)";$', text, re.M)

    for name in imported:
        source = (script.parent / name).read_text()
        (names,) = re.findall(rf'import {{([^}}]*)}} from "{re.escape(name)}"', text)
        for each in filter(None, map(str.strip, names.split(","))):
            assert re.search(rf"export (async )?(function|class|const) {each}\b", source), each
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    assert not re.search(forbidden, text)
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


def test_every_script_is_used(page: Elements) -> None:
    used, left = set(), ["board.js"]
    while left:
        name = left.pop()
        used.add(name)
        left += set(re.findall(r'from "\./(.+?)"', (STATIC / name).read_text())) - used

    assert used == {path.name for path in SCRIPTS}


def test_the_chart_library_comes_with_its_version_and_its_licence() -> None:
    vendor = STATIC / "vendor"

    assert "uPlot (v1.6.32)" in (vendor / "uPlot.iife.min.js").read_text()[:200]
    assert "MIT License" in (vendor / "uPlot.LICENSE").read_text()
