"""What the site does to its pages, so that they are plain Markdown on GitHub too."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks")

_LINK = re.compile(r"(\]\()([^()\s]+)(\))")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_NESTED = re.compile(r"^ {2,3}(?=[-*|] |[0-9]+\. )|(?<=\n\n) {2,3}(?=\S)", re.MULTILINE)
"""What belongs to the list above it on GitHub, where Python's Markdown wants four spaces."""
_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`")
_OUTSIDE = "source:"
"""Stands before a path from the root until it is known where the sources are."""
_HELP = re.compile(r"^<!-- help: ([a-z ]+) -->$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replaces each pattern in the navigation by the pages that it matches."""
    docs = Path(config.docs_dir)
    config.nav = _expand(config.nav, docs, _named(config.nav))
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Prepares links that lead out of docs/ and nested lists, and shows the help of commands."""
    docs = Path(config.docs_dir)
    folder = (docs / page.file.src_uri).parent

    def rewrite(match: re.Match[str]) -> str:
        path, mark, anchor = match.group(2).partition("#")
        target = (folder / path).resolve()
        if "://" in path or not path or target.is_relative_to(docs):
            return match.group(0)
        root = docs.parent
        if not (target.is_relative_to(root) and target.exists()):
            log.warning("%s links to %s, which does not exist", page.file.src_uri, path)
            return match.group(0)
        place = _OUTSIDE + target.relative_to(root).as_posix()
        if config.repo_url:
            kind = "tree" if target.is_dir() else "blob"
            place = place.replace(_OUTSIDE, f"{config.repo_url}/{kind}/main/")
        return f"{match.group(1)}{place}{mark}{anchor}{match.group(3)}"

    parts = _FENCE.split(_LINK.sub(rewrite, markdown))
    parts[::2] = [_ROW.sub(_bare_pipes, _NESTED.sub("    ", part)) for part in parts[::2]]
    return _HELP.sub(_help, "".join(parts))


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Links without a published address lead to the files beside site/."""
    return html.replace(f'href="{_OUTSIDE}', 'href="../' + "../" * page.url.count("/"))


def _bare_pipes(row: re.Match[str]) -> str:
    """A table's row: what GitHub needs before a pipe within code, Python's Markdown would show."""
    return _CODE.sub(lambda code: code.group().replace("\\|", "|"), row.group())


def _help(match: re.Match[str]) -> str:
    """What a command says of itself, with all of its flags."""
    words = match.group(1).split()
    everything = "--help" if words[0] == "conformance" else "--help-all"
    command = [sys.executable, "-m", "andon_cli", *words, everything]
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        log.warning("%s failed: %s", " ".join(command[1:]), done.stderr)
    return f"```text\n{done.stdout.strip()}\n```"


def _named(nav: Any) -> set[str]:
    """Every page or pattern that the navigation names."""
    if isinstance(nav, str):
        return {nav}
    parts = nav.values() if isinstance(nav, dict) else nav or ()
    return {name for part in parts for name in _named(part)}


def _expand(nav: Any, docs: Path, named: set[str]) -> Any:
    if isinstance(nav, dict):
        return {title: _expand(part, docs, named) for title, part in nav.items()}
    if not isinstance(nav, list):
        return nav
    pages: list[Any] = []
    for part in nav:
        if isinstance(part, str) and "*" in part:
            matched = sorted(path.relative_to(docs).as_posix() for path in docs.glob(part))
            pages += [name for name in matched if name not in named]
        else:
            pages.append(_expand(part, docs, named))
    return pages
