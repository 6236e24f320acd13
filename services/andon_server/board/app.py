"""The board's web application: its page, its JSON, its stream of events, and the answers.

It runs on the threads of the service's HTTP port. What it asks of the line goes to the
coordinator's task, through the event loop; what it shows comes from the feed and from journals.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError as FutureCancelled
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs
from wsgiref.types import StartResponse, WSGIEnvironment

from andon.host.logs import LogEvent
from andon.host.strict_json import strict_json
from andon.protocol.halts import HaltAnswer
from andon.protocol.reasons import Reason
from andon_coordinator.transport.errors import LineError
from andon_server.board.feed import BoardFeed, LineNow
from andon_server.board.gate import BoardGate, RequestRefused, Visitor
from andon_server.board.history import MAX_POINTS, HistoryBusy, RunHistory, UnknownRun
from andon_server.board.output import last_lines, user_of_sender
from andon_server.board.pages import Pages
from andon_server.board.stream import EventStream, Viewers
from andon_server.board.view import crash_view
from andon_server.crashes import read_crashes

__all__ = ["MAX_VIEWERS", "BoardApp", "Operated", "on_loop"]

MAX_VIEWERS = 32
"""Streams of events that may be open at once."""

_MAX_BODY = 16 << 10
_ASK_S = 10.0
"""How long the coordinator may take for an answer: the loop may be busy for a moment."""
_POINTS = 600
_API = "/board/api/"
_STARTING = "the line is starting: ask again in a moment"
_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; font-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)

log = logging.getLogger(__name__)


class Operated(Protocol):
    """What operators do with a line, on its event loop; `Coordinator` is one."""

    def halt(self, reason: str, operator: str) -> Coroutine[Any, Any, None]:
        """Halts it."""

    def answer(
        self, halt_id: int, answer: HaltAnswer, worker: int | None, operator: str
    ) -> Coroutine[Any, Any, None]:
        """Answers its halt."""

    def drain(self, operator: str) -> Coroutine[Any, Any, None]:
        """Ends its run after the current step."""


Run = Callable[[Coroutine[Any, Any, None], float], None]
"""Runs a coroutine on the line's event loop, and waits for it for some seconds."""


def on_loop(loop: asyncio.AbstractEventLoop) -> Run:
    """Runs coroutines on `loop`, from another thread."""

    def run(work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        try:
            future = asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise TimeoutError("the event loop is gone") from None
        try:
            future.result(timeout_s)
        except (TimeoutError, FutureCancelled):
            future.cancel()
            raise TimeoutError("the event loop is busy, or going away") from None

    return run


_OUTPUT_IS_PRIVATE = (
    "what workers print is shown to the user who runs them, and to whoever logs in with a token of "
    "the line: start it with --viewer-token-file, or read runs/<id>/worker-N.log as that user"
)


class BoardApp:
    """The WSGI application. Every method may be called on several threads at once."""

    def __init__(
        self,
        feed: BoardFeed,
        history: RunHistory,
        gate: BoardGate,
        line: Operated,
        run: Run,
        outputs: Path | None = None,
    ) -> None:
        """Serves a line's board.

        Args:
            feed: what the line does, and what happens.
            history: what journals say.
            gate: who may look and who may answer.
            line: is halted, answered and drained.
            run: does that on the line's event loop.
            outputs: the folder in which `andon run` keeps what workers print; None: nobody does.
        """
        self._feed = feed
        self._history = history
        self._gate = gate
        self._line = line
        self._run = run
        self._outputs = outputs
        self._pages = Pages()
        self._viewers = Viewers(MAX_VIEWERS)
        self._closing = threading.Event()
        self._describe = lru_cache(maxsize=8)(_described)
        self._gets: Mapping[str, Callable[[Visitor], Any]] = {
            "state": lambda visitor: self._state(visitor),
            "runs": lambda visitor: self._history.runs(),
        }
        self._posts: Mapping[str, Callable[[Visitor, dict[str, Any]], None]] = {
            "answer": self._answer_halt,
            "halt": self._halt,
            "drain": self._drain,
        }

    def close(self, timeout_s: float = 1.0) -> None:
        """Ends every stream, after what the feed has; waits for slow viewers for `timeout_s`."""
        self._closing.set()
        self._viewers.wait_until_gone(timeout_s)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answers one request."""
        try:
            return self._answer(environ, start_response)
        except RequestRefused as refusal:
            body: dict[str, Any] = {"error": str(refusal)}
            if refusal.needs_login:
                body |= {"needs_login": True}
            return _json(start_response, refusal.status, body)
        except HistoryBusy as busy:
            return _json(start_response, HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(busy)})
        except Exception:  # the boundary of this request: the next one is answered
            log.exception(LogEvent("board_failed"))
            text = "the board failed; the service's log says how"
            return _json(start_response, HTTPStatus.INTERNAL_SERVER_ERROR, {"error": text})

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        # WSGI hands bytes over as Latin-1.
        path = environ.get("PATH_INFO", "").encode("latin-1", "replace").decode(errors="replace")
        if path == "/" and method == "GET" and self._gate.wants_encryption(environ):
            return _redirected(environ, start_response)
        self._gate.check(environ)
        if not path.startswith(_API):
            return self._page(path, method, environ, start_response)
        name = path[len(_API) :]
        if method == "POST":
            return self._post(name, environ, start_response)
        if method != "GET":
            raise RequestRefused(
                HTTPStatus.METHOD_NOT_ALLOWED, f"{method[:16]} is not known here: use GET or POST"
            )
        visitor = self._gate.admit(environ)
        if name == "live":
            return self._live(visitor, start_response)
        return _sent(start_response, HTTPStatus.OK, self._get(name, visitor, environ))

    def _page(
        self, path: str, method: str, environ: WSGIEnvironment, start_response: StartResponse
    ) -> Iterable[bytes]:
        if method not in ("GET", "HEAD"):
            raise RequestRefused(HTTPStatus.METHOD_NOT_ALLOWED, "pages are read with GET")
        page = self._pages.page(path)
        if page is None:
            raise RequestRefused(
                HTTPStatus.NOT_FOUND,
                "there is no such page: the board is at /, metrics are at /metrics and /sd",
            )
        headers = [("ETag", page.tag), ("Cache-Control", "no-cache")]
        if environ.get("HTTP_IF_NONE_MATCH") == page.tag:
            _start(start_response, HTTPStatus.NOT_MODIFIED, headers)
            return []
        headers += [("Content-Type", page.kind), ("Content-Length", str(len(page.content)))]
        _start(start_response, HTTPStatus.OK, headers)
        return [] if method == "HEAD" else [page.content]

    # ------------------------------------------------------------------------- reading

    def _get(self, name: str, visitor: Visitor, environ: WSGIEnvironment) -> str:
        """What is asked for, as JSON."""
        if name in self._gets:
            return strict_json(self._gets[name](visitor))
        try:
            match name.split("/"):
                case ["runs", run_id]:
                    return self._history.run(run_id)
                case ["workers", worker, "output"]:
                    # The logs are their user's alone, and on loopback anybody may look at the rest.
                    # Root may read them anyway.
                    owns = user_of_sender(environ) in (0, os.geteuid())
                    if not (visitor.is_known or owns):
                        raise RequestRefused(HTTPStatus.FORBIDDEN, _OUTPUT_IS_PRIVATE)
                    return strict_json(self._output(worker))
                case ["runs", run_id, "curves"]:
                    return self._history.curves(run_id, _points_of(environ))
        except UnknownRun as unknown:
            raise RequestRefused(HTTPStatus.NOT_FOUND, str(unknown)) from unknown
        raise RequestRefused(HTTPStatus.NOT_FOUND, "the board's API has no such part")

    def _output(self, worker: str) -> dict[str, Any]:
        """The last lines of a worker, and how its processes failed."""
        # A number, and no part of a path.
        known = worker.isascii() and worker.isdigit() and len(worker) <= 9
        if self._outputs is not None and known:
            lines = last_lines(self._outputs, int(worker))
            if lines is not None:
                of_worker = [
                    each for each in read_crashes(self._outputs) if each.slot == int(worker)
                ]
                return {"lines": lines, "crashes": [crash_view(each) for each in of_worker]}
        raise RequestRefused(
            HTTPStatus.NOT_FOUND, "what this worker prints is not kept beside its service"
        )

    def _state(self, visitor: Visitor) -> dict[str, Any]:
        now = self._feed.now
        if now is None:
            raise RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, _STARTING)
        return now.view() | _rights(visitor.may_operate, visitor.needs_login)

    def _live(self, visitor: Visitor, start_response: StartResponse) -> Iterable[bytes]:
        if self._closing.is_set():
            raise RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, "the service is going away")
        if not self._viewers.enter():
            raise RequestRefused(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{self._viewers.most} viewers watch this board already: close one of them",
            )
        stream = EventStream(
            self._feed,
            self._viewers,
            self._closing,
            lambda now: self._describe(now, visitor.may_operate, visitor.needs_login),
        )
        try:
            headers = [("Content-Type", "text/event-stream"), ("X-Accel-Buffering", "no")]
            _start(start_response, HTTPStatus.OK, [*headers, ("Cache-Control", "no-store")])
        except BaseException:
            stream.close()
            raise
        return stream

    # ----------------------------------------------------------------------- answering

    def _post(
        self, name: str, environ: WSGIEnvironment, start_response: StartResponse
    ) -> Iterable[bytes]:
        _check_intent(environ)
        body = _body_of(environ)
        if name == "login":
            token = _text(body, "token")
            cookie = self._gate.log_in(token, environ)
            return _json(start_response, HTTPStatus.OK, {"ok": True}, ("Set-Cookie", cookie))
        if name == "logout":
            cookie = self._gate.log_out(environ)
            return _json(start_response, HTTPStatus.OK, {"ok": True}, ("Set-Cookie", cookie))
        if name not in self._posts:
            raise RequestRefused(HTTPStatus.NOT_FOUND, "the board's API has no such part")
        visitor = self._gate.admit(environ)
        self._gate.check_operator(visitor)
        try:
            self._posts[name](visitor, body)
        except LineError as error:
            leaving = error.reason is Reason.SERVICE_LEAVING
            status = HTTPStatus.SERVICE_UNAVAILABLE if leaving else HTTPStatus.CONFLICT
            raise RequestRefused(status, str(error)) from error
        except TimeoutError as error:
            raise RequestRefused(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the service is busy, and may still do it: look at the line's state before you "
                "try again",
            ) from error
        return _json(start_response, HTTPStatus.OK, {"ok": True})

    def _answer_halt(self, visitor: Visitor, body: dict[str, Any]) -> None:
        halt_id, name, worker = _text(body, "halt_id"), _text(body, "answer"), body.get("worker")
        if not (halt_id.isascii() and halt_id.isdigit() and len(halt_id) <= 20):
            raise _bad("halt_id is the id of the halt that you saw, as text")
        if name not in _ANSWERS:
            raise _bad(f"answer is one of {', '.join(_ANSWERS)}")
        known = isinstance(worker, int) and not isinstance(worker, bool) and 0 <= worker < 2**32
        if worker is not None and not known:
            raise _bad("worker is a number, or null")
        self._run(self._line.answer(int(halt_id), _ANSWERS[name], worker, visitor.name), _ASK_S)

    def _halt(self, visitor: Visitor, body: dict[str, Any]) -> None:
        reason = _text(body, "reason") if "reason" in body else ""
        self._run(self._line.halt(reason, visitor.name), _ASK_S)

    def _drain(self, visitor: Visitor, body: dict[str, Any]) -> None:
        self._run(self._line.drain(visitor.name), _ASK_S)


def starting(_environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
    """Answers in the place of a board until there is one: a page that asks again finds it."""
    status, again = HTTPStatus.SERVICE_UNAVAILABLE, ("Retry-After", "1")
    return _json(start_response, status, {"error": _STARTING}, again)


_ANSWERS = {each.name.lower(): each for each in HaltAnswer}


def _described(now: LineNow, may_operate: bool, needs_login: bool) -> str:  # noqa: FBT001
    return strict_json(now.view() | _rights(may_operate, needs_login))


def _rights(may_operate: bool, needs_login: bool) -> dict[str, bool]:  # noqa: FBT001
    return {"may_operate": may_operate, "needs_login": needs_login}


def _check_intent(environ: WSGIEnvironment) -> None:
    """Refuses what a page of another site could send without asking this service first."""
    kind = environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestRefused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the board takes JSON: send Content-Type: application/json",
        )
    if environ.get("HTTP_X_ANDON_BOARD") != "1":
        raise RequestRefused(
            HTTPStatus.FORBIDDEN, "what changes the line needs the header X-Andon-Board: 1"
        )


def _body_of(environ: WSGIEnvironment) -> dict[str, Any]:
    length = environ.get("CONTENT_LENGTH", "")
    if not (length.isascii() and length.isdigit()):
        raise RequestRefused(HTTPStatus.LENGTH_REQUIRED, "the request needs a Content-Length")
    if len(length) > 9 or int(length) > _MAX_BODY:
        raise RequestRefused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {_MAX_BODY} bytes"
        )
    data = environ["wsgi.input"].read(int(length))
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _bad("the body is no JSON") from error
    if not isinstance(body, dict):
        raise _bad("the body is a JSON object")
    return body


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    # JSON can say half of a character (a lone surrogate), which no file and no message can hold.
    if not isinstance(value, str) or not _is_utf8(value):
        raise _bad(f"{name} is missing, or is no text")
    return value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _points_of(environ: WSGIEnvironment) -> int:
    try:
        asked = parse_qs(environ.get("QUERY_STRING", ""), max_num_fields=16)
    except ValueError as error:
        raise _bad("the address has too many questions") from error
    text = asked.get("points", [""])[-1]
    if not text:
        return _POINTS
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= MAX_POINTS):
        raise _bad(f"points is a number from 1 to {MAX_POINTS}")
    return int(text)


def _bad(message: str) -> RequestRefused:
    return RequestRefused(HTTPStatus.BAD_REQUEST, message)


def _json(
    start_response: StartResponse, status: HTTPStatus, value: Any, *more: tuple[str, str]
) -> list[bytes]:
    return _sent(start_response, status, strict_json(value), *more)


def _sent(
    start_response: StartResponse, status: HTTPStatus, text: str, *more: tuple[str, str]
) -> list[bytes]:
    body = text.encode()
    headers = [
        ("Content-Type", "application/json; charset=utf-8"),
        ("Content-Length", str(len(body))),
        ("Cache-Control", "no-store"),
        *more,
    ]
    _start(start_response, status, headers)
    return [body]


def _redirected(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
    host = environ.get("HTTP_HOST", "")
    if not _is_plain(host):
        raise _bad("the Host header is no host")
    headers = [("Location", f"https://{host}/"), ("Content-Length", "0")]
    _start(start_response, HTTPStatus.TEMPORARY_REDIRECT, headers)
    return []


def _is_plain(host: str) -> bool:
    return (
        0 < len(host) <= 300
        and host.isascii()
        and all(each.isalnum() or each in ".-:[]" for each in host)
    )


def _start(
    start_response: StartResponse, status: HTTPStatus, headers: list[tuple[str, str]]
) -> None:
    start_response(f"{status.value} {status.phrase}", [*headers, *_HEADERS])
