"""The protocol's text has the numbers and the tables that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from andon.host.errors import ExitCode
from andon.host.keepalive import MIN_PING_S, Keepalive
from andon.protocol.messages import BlockFaultKind
from andon.protocol.run_settings import SILENCE_LEASES, Liveness
from andon.v1 import coordinator_pb2 as pb
from andon.wire.statuses import FINAL_CODES
from andon_cli.launching.restarts import Restarts
from andon_coordinator.config import CoordinatorConfig
from andon_coordinator.core import state, transfers
from andon_coordinator.core.line_state import LineState
from andon_coordinator.transport.service import server_options
from andon_coordinator.transport.streams import CAPACITY
from andon_reducer.config import ReducerConfig
from andon_trainer.errors import AndonError, JoinRefused, LineHalted, LineLost, RunOver
from andon_trainer.exchange import collector, route
from andon_trainer.exchange.control import connection
from andon_trainer.exchange.star.bulk_stream import OPENING_S
from andon_trainer.place import membership
from unit.project.documents import PROTOCOL, ROOT, protocol

TEXT = protocol()
CITATION = re.compile(r"docs/(protocol[a-z-]*)\.md`?,? (?:sections? (\d+)|([A-Z][\w' ]+)\.)")
SOURCES = {".py", ".proto", ".json", ".h", ".cc", ".go", ".js"}
LINE = CoordinatorConfig(run_id="r", journal=Path("j"))
REDUCER = ReducerConfig()


def section(heading: str) -> str:
    """The text below a heading, to the next one."""
    _, found, rest = TEXT.partition(f"\n### {heading}\n")
    assert found, heading
    return re.split(r"\n#+ ", rest)[0]


def rows(heading: str) -> dict[str, list[str]]:
    """The rows of the tables below a heading, by their first cell."""
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in section(heading).splitlines()
        if line.startswith("| ")
    ]
    return {first: rest for first, *rest in cells}


WAITS = {
    "an answer to a ping": [f"{Liveness().lease_s:g} s"],
    "between two Heartbeats": [f"`lease_s` / {Liveness().lease_s / Liveness().heartbeat_s:g}"],
    "a coordinator to join again": [
        f"{Liveness().reconnect_s:g} s;",
        f"first Join {connection._FIRST_PATIENCE_S:g} s",
    ],
    "between two tries to join": [
        f"{connection._FIRST_WAIT_S:g} s,",
        f"{connection._GROWTH:g} times",
        f"at most {connection._LONGEST_WAIT_S:g} s",
    ],
    "`join_s`": [f"{LINE.join_s:g} s"],
    "`opening_s`": [f"{REDUCER.opening_s:g} s"],
    "RoundOpened": [f"{OPENING_S:g} s;", f"max({route._LEAST_OPENING_S:g} s, `lease_s`)"],
    "the other end of a state transfer": [f"{REDUCER.state_patience_s:g} s"],
    "all pieces of a state": [
        f"{REDUCER.state_s:g} s,",
        f"{REDUCER.state_bytes_per_s / 1e6:g} MB/s;",
        f"{REDUCER.state_stalled_s:g} s for one piece",
        f"given up after {REDUCER.state_hopeless_s:g} s",
    ],
    "`rejoin_grace`": [f"{LINE.rejoin_grace_s:g} s;", "`lease_s` after the run's last step"],
    "the next try at a step": [f"{LINE.rejoin_grace_s:g} s ·", f"{state._LONGEST_PAUSE_S:g} s"],
    "the next try at a transfer": [
        f"at least {LINE.rejoin_grace_s:g} s,",
        f"at most {transfers._LONGEST_PAUSE_S:g} s",
    ],
    "`recovery_window`": [f"{LINE.recovery_window_s:g} s"],
    "its stream after Leave": [f"{membership._LEAVE_PATIENCE_S:g} s"],
}


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_of_the_text_is_that_of_the_code(what: str) -> None:
    waits = {**rows("Waits"), **rows("The servers' waits")}
    (row,) = [[first, *rest] for first, rest in waits.items() if what in first]

    for number in WAITS[what]:
        assert number in " | ".join(row), f"the protocol, Waits: {row}"


def test_what_the_text_says_of_pings_is_what_the_server_is_told() -> None:
    options = dict(server_options())

    client = Keepalive()
    assert f"more often than every {MIN_PING_S:g} s;" in section("Keepalive")
    assert f"after every {client.client_ping_s:g} s in which nothing" in section("Keepalive")
    assert f"no answer comes within {client.client_answer_s:g} s" in section("Keepalive")
    assert f"leaves {CAPACITY} messages unread" in section("Waits")
    assert f"for {SILENCE_LEASES} times `lease_s`" in section("Liveness")
    assert options["grpc.keepalive_time_ms"] * 3 == 1000 * Liveness().lease_s
    assert options["grpc.keepalive_timeout_ms"] * 3 == 2000 * Liveness().lease_s


def test_the_text_names_the_statuses_after_which_a_worker_gives_up() -> None:
    said = [first for first, rest in rows("At an error").items() if rest[0].startswith("ends")]

    named = {word for row in said for word in re.findall(r"[A-Z]{2,}(?:_[A-Z]+)*", row)}
    assert named - {"SLOT"} == {code.name for code in FINAL_CODES}


def test_the_text_has_the_exit_codes_of_workers_and_which_of_them_are_started_again() -> None:
    codes = {int(code): rest[-1] for code, rest in rows("Exit codes").items() if code.isdigit()}

    ours = {cls.exit_code for cls in (AndonError, LineHalted, JoinRefused, LineLost, RunOver)}
    assert ours <= codes.keys()
    for code, again in codes.items():
        starts = Restarts(1).spend(ExitCode(code), 0.0, trained=True) is not None
        assert starts == again.startswith("if"), f"the protocol, Exit codes: {code}"


def test_the_text_has_every_kind_of_fault_and_of_block_fault() -> None:
    table = section("Which Fault to send")
    named = pb.FaultKind.DESCRIPTOR.values_by_name
    kinds = {name.removeprefix("FAULT_KIND_") for name in named} - {"UNSPECIFIED"}

    said = {rest[0] for rest in rows("Which Fault to send").values()}
    assert kinds <= {*said, "NON_FINITE_AVERAGE"}
    for kind, fault in collector._FAULTS.items():
        assert kind.name in table
        assert fault in table
    assert set(collector._FAULTS) == set(BlockFaultKind)


def test_the_text_has_every_state_of_a_line_and_every_message_of_a_worker() -> None:
    tables = {**rows("States of a line"), **rows("What the coordinator does with a message")}
    up = {
        field.message_type.name
        for field in pb.TrainRequest.DESCRIPTOR.fields
        if field.message_type is not None
    }
    down = {
        field.message_type.name
        for field in pb.TrainResponse.DESCRIPTOR.fields
        if field.message_type is not None
    }

    said = " ".join(rows("States of a worker"))
    assert {state.name for state in LineState} <= tables.keys()
    assert up <= {word for first in tables for word in first.split()}
    for message in down - {"HeartbeatAnswer"}:
        assert message in said


@pytest.mark.parametrize(
    "heading", ["2. Keys, records, heads: the rules", "19. The servers' rules"]
)
def test_both_halves_of_the_rules_have_all_seventeen_numbers(heading: str) -> None:
    text = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]

    assert [int(number) for number in re.findall(r"^(\d+)\. \*\*", text, re.M)] == list(
        range(1, 18)
    )


def test_the_numbers_of_the_sections_go_on_from_page_to_page() -> None:
    numbers = re.findall(r"^## (\d+)\. ", TEXT, re.M)

    assert numbers == [str(number) for number in range(1, 38)]


def test_a_citation_in_the_code_names_the_page_that_has_the_section() -> None:
    headings = {
        page: re.findall(r"^#+ (?:(\d+)\. )?(.+)$", (ROOT / f"docs/{page}.md").read_text(), re.M)
        for page in PROTOCOL
    }
    rooms = ("proto", "services", "trainer", "conformance", "clients", "tests")
    paths = {path for room in rooms for path in (ROOT / room).rglob("*") if path.suffix in SOURCES}
    own = [path for path in paths if "node_modules" not in path.parts]
    cited = {each for path in own for each in CITATION.findall(path.read_text("utf-8"))}

    assert cited
    for page, number, name in cited:
        found = {name for pair in headings[page] for name in pair}
        assert (number or name) in found, f"docs/{page}.md has no section {number or name}"
