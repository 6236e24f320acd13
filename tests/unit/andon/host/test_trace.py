"""A worker's part of a trace: what is written is read, also if the worker was killed meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from andon.host.trace import (
    ClockSample,
    EventKind,
    PartHeader,
    PartWriter,
    TraceDamaged,
    TraceEvent,
    Track,
    WorkerKnown,
    is_part,
    parts_folder,
    read_part,
)

HEADER = PartHeader(
    run_id="7f3a",
    host="alpha",
    process=71,
    clock="boot",
    at_us=5,
    unix_us=1_000_005,
    notes=("no GPU",),
)
SPAN = TraceEvent(
    kind=EventKind.SPAN, name="data", track=Track.SCRIPT, at_us=7, us=2, args={"step": 1}
)
INSTANT = TraceEvent(kind=EventKind.INSTANT, name="joined", track=Track.SCRIPT, at_us=6)


def written(folder: Path) -> PartWriter:
    part = PartWriter(folder, HEADER)
    part.write([WorkerKnown(3), INSTANT])
    part.write([ClockSample(6, 1_000_016, 2), SPAN])
    return part


def test_what_is_written_is_read_while_the_file_is_still_open(tmp_path: Path) -> None:
    part = written(tmp_path / "t.json.parts")

    found = read_part(part.path)

    assert (found.header, found.worker) == (HEADER, 3)
    assert found.events == [INSTANT, SPAN]
    assert found.samples == [ClockSample(6, 1_000_016, 2)]
    part.close()
    part.close()


def test_a_part_that_ends_in_the_middle_of_a_line_is_whole_up_to_there(tmp_path: Path) -> None:
    part = written(tmp_path)
    part.close()
    content = part.path.read_bytes()
    second = content.index(b"\n") + 1

    for end in range(second, len(content)):
        part.path.write_bytes(content[:end])
        found = read_part(part.path)
        assert found.header == HEADER
        assert found.events == [INSTANT, SPAN][: len(found.events)]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]\n", b'{"andon_trace_part":2}\n', b'{"andon_trace_part":1}\n', b"\xff\xfe\n"],
)
def test_what_is_no_part_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(content)

    with pytest.raises(TraceDamaged, match=r"odd\.jsonl is no part of a trace"):
        read_part(path)


def test_a_part_is_told_from_a_merged_trace_by_its_beginning(tmp_path: Path) -> None:
    part, merged = written(tmp_path), tmp_path / "t.json"
    merged.write_text('{"traceEvents": []}')

    assert is_part(part.path)
    assert not is_part(merged)
    part.close()


def test_each_process_has_a_part_of_its_own_beside_the_trace(tmp_path: Path) -> None:
    folder = parts_folder(tmp_path / "t.json")

    parts = [PartWriter(folder, replace(HEADER, process=process)) for process in (71, 72)]

    assert folder == tmp_path / "t.json.parts"
    assert len(list(folder.iterdir())) == 2
    for part in parts:
        part.close()
