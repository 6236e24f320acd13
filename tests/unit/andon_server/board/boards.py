"""A board without sockets: a line to show, and requests to its application."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core import effects, events
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.settings import History, LineSettings
from andon_coordinator.core.status import LineSnapshot
from andon_coordinator.transport.access_control import AccessControl
from andon_coordinator.transport.errors import LineError
from andon_server.board.app import BoardApp
from andon_server.board.feed import BoardFeed
from andon_server.board.gate import BoardGate
from andon_server.board.history import RunHistory
from andon_server.runs import JOURNAL
from scenarios import line_values
from unit.andon_cli.books import Book

__all__ = [
    "OPERATORS",
    "RUN",
    "Answer",
    "Board",
    "MakeBoard",
    "commit",
    "line_core",
    "line_of",
    "nan_halt",
]

RUN, OPERATORS = b"the-token-of-the-run", b"the-token-of-operators"


def line_of(workers: int = 0) -> LineSnapshot:
    """A line that waits for its workers, of whom some are here."""
    return line_core(workers).status(1.0)


def line_core(workers: int = 0) -> LineCore:
    """Its core; a worker's stream is its slot plus one."""
    settings = LineSettings(run_id="7f3a", expect_workers=workers + 1)
    core = LineCore(settings, term=1, history=History(), random_bits=lambda: 0)
    for slot in range(workers):
        request = line_values.joining(
            incarnation=slot + 1,
            plan=RunPlan(global_batch=4, dataset_size=8),
            node_id=f"host-{slot}",
            launch_slot=slot,
            devices=(events.Device("cpu", "AMD EPYC", 2**30, 2),),
        )
        core.receive(events.WorkerJoined(slot + 1, request), 0.0, wall=0.0)
    return core


def commit(feed: BoardFeed, step: int, loss: float = 1.5, *, at: float = 0.0) -> None:
    """A step that is committed and durable."""
    key = Key(1, step)
    result = line_values.result(loss=loss, seconds=0.5, correct=3, gradient_norm=2.0)  # fmt: skip
    record = Record(key, None, RecordKind.STEP, step, Cursor(0, 4), (0, 1))
    feed.observe(events.TimePassed(), [effects.SaveRecord(record, result)], at)
    feed.observe(events.RecordSaved(key), [], at)


@dataclass
class Line:
    """A line that notes what operators ask of it, or refuses it."""

    asked: list[tuple[Any, ...]] = field(default_factory=list)
    refusal: LineError | None = None

    async def halt(self, reason: str, operator: str) -> None:
        self._note("halt", reason, operator)

    async def answer(
        self, halt_id: int, answer: HaltAnswer, worker: int | None, operator: str
    ) -> None:
        self._note("answer", halt_id, answer, worker, operator)

    async def drain(self, operator: str) -> None:
        self._note("drain", operator)

    def _note(self, *asked: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(asked)


@dataclass(frozen=True)
class Answer:
    """What the application answered."""

    status: int
    headers: dict[str, str]
    body: Iterable[bytes]

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def text(self) -> str:
        return b"".join(self.body).decode()


class Board:
    """A board of a line; runs are in `folder`, its own in `folder/7f3a`."""

    def __init__(
        self,
        folder: Path,
        *,
        bind: str = "127.0.0.1",
        encrypts: bool = False,
        run_token: bytes = b"",
        operator_token: bytes = b"",
        kept: int = 64,
    ) -> None:
        own = folder / "7f3a"
        own.mkdir(parents=True, exist_ok=True)
        self.book = Book(own / JOURNAL)
        self.line = Line()
        self.feed = BoardFeed(lambda: 1000.0, kept=kept)
        self.time_s = 0.0
        access = AccessControl(run_id="7f3a", run_token=run_token, operator_token=operator_token)
        self.gate = BoardGate(access, bind, encrypts=encrypts, now=lambda: self.time_s)
        self.late = False
        self.history = RunHistory("7f3a", own, turn_s=0.0)
        self.app = BoardApp(self.feed, self.history, self.gate, self.line, self._run, own)

    def _run(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        if self.late:
            work.close()
            raise TimeoutError
        try:
            work.send(None)
        except StopIteration:
            return
        raise AssertionError("the coroutine waits for something")

    def get(self, path: str, method: str = "GET", **headers: Any) -> Answer:
        """Asks for something; `headers` are of the environment."""
        path, _, query = path.partition("?")
        environ: dict[str, Any] = {
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "HTTP_HOST": "127.0.0.1:9400",
            "REMOTE_ADDR": "127.0.0.1",
            "wsgi.input": io.BytesIO(),
            **headers,
        }
        told: list[Any] = []

        def start_response(status: str, sent: list[tuple[str, str]], *_: Any) -> Any:
            told.extend((int(status.split()[0]), dict(sent)))

        body = self.app({k: v for k, v in environ.items() if v is not None}, start_response)
        return Answer(told[0], told[1], body)

    def post(self, path: str, body: Any = None, **headers: Any) -> Answer:
        """Asks for a change, as the page does; `body` is bytes, or becomes JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        asked = {
            "CONTENT_TYPE": "application/json",
            "CONTENT_LENGTH": str(len(data)),
            "HTTP_X_ANDON_BOARD": "1",
            "wsgi.input": io.BytesIO(data),
            **headers,
        }
        return self.get(f"/board/api/{path}", "POST", **asked)

    def log_in(self, token: bytes, **headers: Any) -> str:
        """Logs in; returns the cookie to send."""
        answer = self.post("login", {"token": token.decode()}, **headers)
        assert answer.status == 200, answer.text
        return answer.headers["Set-Cookie"].partition(";")[0]


MakeBoard = Callable[..., Board]


def nan_halt() -> HaltEvidence:
    """A halt with evidence."""
    return HaltEvidence(
        id=2**60 + 1,
        reason=HaltReason.NON_FINITE_GRADIENT,
        step=3,
        worker=1,
        block=3,
        parameter="blocks.3.weight",
        element=(17, 4),
        value="nan",
        message="worker 1 sent nan in blocks.3.weight[17, 4] (block 3)",
        epoch=0,
        positions=PositionRange(8, 12),
    )
