"""The project's documentation as data: files, links, code and what it names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["DOCUMENTS", "PROTOCOL", "ROOT", "Document", "protocol"]

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


@dataclass(frozen=True)
class Document:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """Its path from the root."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        """All of it."""
        return self.path.read_text("utf-8")

    @cached_property
    def links(self) -> list[str]:
        """Targets of its links that lead into the project."""
        prose = _CODE.sub("", _FENCE.sub("", self.text))
        return [link for link in _LINK.findall(prose) if "://" not in link]

    @cached_property
    def code(self) -> list[str]:
        """Lines of its blocks of code, then its words of code."""
        blocks = [block.splitlines()[1:-1] for block in _FENCE.findall(self.text)]
        words = _CODE.findall(_FENCE.sub("", self.text))
        return [*(line.strip() for block in blocks for line in block), *words]

    @cached_property
    def anchors(self) -> set[str]:
        """What a link's `#part` may be, as GitHub makes it of headings."""
        headings = _HEADING.findall(_FENCE.sub("", self.text))
        plain = (re.sub(r"[^\w\- ]", "", heading).lower() for heading in headings)
        return {heading.replace(" ", "-") for heading in plain}


def protocol() -> str:
    """The protocol's text: all of its pages, one after another."""
    return "\n".join((ROOT / f"docs/{page}.md").read_text("utf-8") for page in PROTOCOL)


def _documents() -> tuple[Document, ...]:
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("conformance/*.md")]
    paths += [*ROOT.glob("clients/*.md"), *ROOT.glob("clients/*/*.md")]
    return tuple(Document(path) for path in sorted(paths))


DOCUMENTS = _documents()
"""Every Markdown file of the project that a reader is sent to."""
