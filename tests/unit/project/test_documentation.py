"""The documentation is true: what it links to, and what it says to type, exists."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from metrics_tables import process, service, table_of, worker

from andon_cli.help import help_text
from andon_cli.verbs import VERBS
from andon_conformance.config import build_parser as conformance_parser
from andon_coordinator.core.line_state import TRANSITIONS, LineState
from unit.project.documents import DOCUMENTS, ROOT, Document

_PACKAGES = {
    "andon_conformance",
    "andon_server",
    "andon_cli",
    "andon_coordinator",
    "andon_reducer",
    "andon_torch",
    "andon_trainer",
    "andon_grafana",
}
_PATH = re.compile(r"(?:proto|services|trainer|tests|examples|benchmarks|docs)/[\w./*-]+")
_METRIC = re.compile(r"\bandon_[a-z_]*[a-z]\b")
_PARTS_OF_A_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")

DRAWINGS = sorted(path for path in (ROOT / "docs/assets").glob("*.svg") if path.stem != "logo")

_BY_PATH = {document.path: document for document in DOCUMENTS}


def _help_of_conformance() -> str:
    """What `andon conformance` says of itself and of its own commands."""
    parser = conformance_parser()
    verbs = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return "".join(each.format_help() for each in (parser, *verbs[0].choices.values()))


def _wrong_link(document: Document, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (document.path.parent / path).resolve() if path else document.path
    if not target.exists():
        return True
    to = _BY_PATH.get(target) or Document(target)
    return bool(anchor) and target.suffix == ".md" and anchor not in to.anchors


def _coded() -> Iterator[tuple[str, str]]:
    """Each line or word of code, after the name of its document."""
    return ((document.name, code) for document in DOCUMENTS for code in document.code)


def test_every_link_of_a_document_leads_somewhere() -> None:
    wrong = [
        f"{document.name} links to {link}: no such file or heading"
        for document in DOCUMENTS
        for link in document.links
        if _wrong_link(document, link)
    ]

    assert wrong == []


def test_the_home_page_changes_a_loop_as_the_readme_does() -> None:
    read, home = (
        re.findall(r"^```diff\n.*?^```", (ROOT / page).read_text("utf-8"), re.M | re.S)
        for page in ("README.md", "docs/README.md")
    )

    assert len(read) == 1
    assert home == read


def test_every_drawing_is_shown_has_a_title_and_a_dark_form() -> None:
    shown = {
        (document.path.parent / link).resolve() for document in DOCUMENTS for link in document.links
    }

    assert set(DRAWINGS) <= shown
    for drawing in DRAWINGS:
        root = ElementTree.parse(drawing).getroot()
        assert root.findtext("{*}title"), drawing
        assert "prefers-color-scheme: dark" in (root.findtext("{*}style") or ""), drawing


def test_every_file_that_a_document_names_exists() -> None:
    for name, code in _coded():
        if _PATH.fullmatch(code):
            assert list(ROOT.glob(code.rstrip("/"))), f"{name} names {code}"


def test_every_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    for name, code in _coded():
        call = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*make ([a-z-]+)", code)
        if call:
            assert call.group(1) in targets, f"{name} says `{code}`"


def test_every_andon_command_that_a_document_names_exists() -> None:
    texts = {name: help_text(name, verb, everything=True) for name, verb in VERBS.items()}
    texts["conformance"] = _help_of_conformance()

    for name, code in _coded():
        call = re.match(r"(?:\$ )?(?:\.venv/bin/)?andon ([a-z]+)((?: .*)?)$", code)
        if not call:
            continue
        verb, rest = call.groups()
        assert verb in texts, f"{name} says `{code}`"
        for flag in re.findall(r" (--[a-z-]+)", re.split(r" \S+\.py| -- ", rest)[0]):
            assert re.search(rf"{flag}\b", texts[verb]), f"{name}: `{code}` has no {flag}"


def test_every_metric_that_a_document_names_is_registered() -> None:
    registered = {*table_of(process()), *table_of(service()), *table_of(worker()), *_PACKAGES}

    for name, code in _coded():
        for metric in _METRIC.findall(code):
            known = {metric, _PARTS_OF_A_HISTOGRAM.sub("", metric)} & registered
            assert known, f"{name} names the metric {metric}"


def test_the_drawing_of_the_states_is_the_table_of_transitions() -> None:
    text = (ROOT / "docs/architecture.md").read_text("utf-8")

    drawn = {
        (LineState[before], trigger, LineState[after])
        for before, after, triggers in re.findall(r"^ +([A-Z]+) --> ([A-Z]+): (.+)$", text, re.M)
        for trigger in triggers.split(", ")
    }

    assert drawn == {
        (before, trigger.name.lower().replace("_", " "), after)
        for (before, trigger), after in TRANSITIONS.items()
    }


def test_every_name_in_a_drawing_of_the_architecture_is_in_the_code() -> None:
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    way = text.split("\n## The path of a gradient\n")[1].split("\n## ")[0]
    drawings = " ".join(re.findall(r"^```mermaid\n(.*?)^```", way, re.M | re.S))
    drawn = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+|\b[a-z]+_[a-z_]+", drawings))
    sources = [
        path for room in ("proto", "services", "trainer") for path in (ROOT / room).rglob("*")
    ]
    code = "".join(path.read_text("utf-8") for path in sources if path.suffix in (".py", ".proto"))

    assert drawn
    for name in drawn:
        assert re.search(rf"\b(?:class|def|message) {name}\b", code), name
