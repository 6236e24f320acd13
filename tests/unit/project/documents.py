"""The project's documentation as data: files, links, code and what it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PROTOCOL", "ROOT", "Document", "documents", "protocol"]

ROOT = Path(__file__).resolve().parents[3]
PROTOCOL = (
    "protocol",
    "protocol-data",
    "protocol-servers",
    "protocol-sessions",
    "protocol-same-bits",
)
"""The pages in `docs/` that are the protocol, in their order."""

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Document:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """Its path from the root."""
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        """All of it."""
        return self.path.read_text("utf-8")

    def links(self) -> list[str]:
        """Targets of its links that lead into the project."""
        prose = _CODE.sub("", _FENCE.sub("", self.text))
        return [link for link in _LINK.findall(prose) if "://" not in link]

    def code(self) -> Iterator[str]:
        """Lines of its blocks of code, then its words of code."""
        for block in _FENCE.findall(self.text):
            yield from (line.strip() for line in block.splitlines()[1:-1])
        yield from _CODE.findall(_FENCE.sub("", self.text))

    def anchors(self) -> set[str]:
        """What a link's `#part` may be, as GitHub makes it of headings."""
        headings = _HEADING.findall(_FENCE.sub("", self.text))
        plain = (re.sub(r"[^\w\- ]", "", heading).lower() for heading in headings)
        return {heading.replace(" ", "-") for heading in plain}


def protocol() -> str:
    """The protocol's text: all of its pages, one after another."""
    return "\n".join((ROOT / f"docs/{page}.md").read_text("utf-8") for page in PROTOCOL)


def documents() -> list[Document]:
    """Every Markdown file of the project that a reader is sent to."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("conformance/*.md")]
    paths += [*ROOT.glob("clients/*.md"), *ROOT.glob("clients/*/*.md")]
    return [Document(path) for path in sorted(paths)]
