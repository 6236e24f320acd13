"""Gate: who may look at the board, and who may answer.

Theory of operation
===================

A person shows the same tokens as a gRPC call does, and `AccessControl` judges them. What a browser
adds is that other sites' pages run in it, too. They can send requests to this service, and three
checks keep them out:

- **Host.** A page may make its own name point to 127.0.0.1, and then counts as this service's page
  (DNS rebinding). So on loopback the request must name this machine. Beyond loopback everybody has
  to show a token, which a page under another name does not have: the cookie is the browser's, and
  belongs to the name under which somebody logged in.
- **Origin.** Browsers say from which page a request comes. If they do, it must be this service's.
- **A header of our own** and JSON as the content type, where something is changed. A browser sends
  neither for another site without asking this service, and the service never consents.

Nobody tries many tokens: after ten wrong ones an address gets no answer to more of them for the
rest of the minute. A right one passes all the same, and sessions go on: a token is too long to be
guessed, and whoever shares the address (everybody on loopback) must not lock an operator out.

A login gives the browser a cookie that names a session. Only this process knows which token the
session showed; the token itself is not kept in the browser.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit
from wsgiref.types import WSGIEnvironment

from andon.host.endpoint import ENCRYPTED
from andon.host.run_token import BEARER_PREFIX
from andon.host.tls import is_loopback
from andon.host.web_names import name_of, own_names
from andon.protocol.reasons import Reason
from andon_coordinator.transport.access_control import AccessControl
from andon_coordinator.transport.errors import LineError
from andon_server.board.attempts import MOST_WRONG, Attempts

__all__ = ["BoardGate", "RequestRefused", "Visitor"]

log = logging.getLogger(__name__)

_SESSION_S = 12 * 3600.0
"""How long a login lasts."""
_SESSIONS = 256
"""How many there may be; a further one ends the oldest."""
_LONGEST_COOKIES = 8192
"""Characters of a request's cookies. This board's is 60 long; others of the host come along."""


class RequestRefused(Exception):
    """A request that is not answered: its status, and a sentence with the remedy."""

    def __init__(self, status: HTTPStatus, message: str, *, needs_login: bool = False) -> None:
        """`needs_login`: a token would help."""
        super().__init__(message)
        self.status = status
        self.needs_login = needs_login


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Somebody who may look."""

    name: str
    """As the journal will call them: where they are."""
    shown: bytes = field(repr=False)
    is_known: bool
    """Whether that is one of the line's tokens."""
    may_operate: bool
    needs_login: bool
    """Whether a token would let them do more."""


class BoardGate:
    """Admits requests to the board of one service. Any thread may ask."""

    def __init__(
        self,
        access: AccessControl,
        bind: str,
        *,
        encrypts: bool,
        count: Callable[[Reason], None] = lambda reason: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Guards the board of a service.

        Args:
            access: judges tokens, as for gRPC calls.
            bind: the address on which browsers find it: the one that the service listens on, or
                that of a container's host on which its port is published.
            encrypts: whether its port answers TLS.
            count: called with the reason of each refused token.
            now: a monotonic time, in seconds.
        """
        self._access = access
        self._beyond = not is_loopback(bind)
        self._names = own_names(bind)
        self._encrypts = encrypts
        self._count = count
        self._now = now
        self._cookie = f"andon-{access.run_id}"
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._attempts = Attempts()

    def url(self, host: str, port: int) -> str:
        """Where people find it who know this machine as `host`; empty: nobody may look."""
        if self._beyond and not self._has_tokens:
            return ""
        return f"http{'s' if self._beyond and self._encrypts else ''}://{host}:{port}/"

    def check(self, environ: WSGIEnvironment) -> None:
        """Checks where a request comes from, whatever it asks for.

        Raises:
            RequestRefused: another site sent it, it is not encrypted, or nobody may look.
        """
        host = environ.get("HTTP_HOST", "")
        if self._beyond:
            self._check_beyond(environ)
        elif name_of(host) not in self._names:
            raise RequestRefused(
                HTTPStatus.FORBIDDEN,
                f"this board is not at {host[:100]!r}: open it as http://127.0.0.1 or "
                "http://localhost, with its port",
            )
        origin = environ.get("HTTP_ORIGIN")
        if origin is not None and not _is_own(origin, host, environ):
            raise RequestRefused(
                HTTPStatus.FORBIDDEN,
                f"a page of {origin[:100]!r} sent this, not the board's own: open the board itself",
            )

    def wants_encryption(self, environ: WSGIEnvironment) -> bool:
        """Whether the request must be made again over TLS."""
        return self._beyond and self._encrypts and not environ.get(ENCRYPTED, False)

    def admit(self, environ: WSGIEnvironment) -> Visitor:
        """The visitor who sent a request that was checked.

        Raises:
            RequestRefused: the request shows no token that lets one look.
        """
        bearer = self._bearer(environ)
        shown = bearer or self._of_session(environ)
        try:
            self._access.check_looking(shown)
            if self._beyond and not self._knows(shown):
                raise LineError(Reason.TOKEN, "")
        except LineError as error:
            if bearer:
                self._note_wrong(environ)
            self._count(error.reason)
            raise RequestRefused(
                HTTPStatus.UNAUTHORIZED,
                "this board asks for a token: log in with the run's token, the viewers' or a "
                "worker's own to look, or with the operators' to answer as well (the files of "
                "--token-file, --viewer-token-file, --operator-token-file)",
                needs_login=True,
            ) from error
        operates = self._operates(shown)
        return Visitor(
            name=f"board@{environ.get('REMOTE_ADDR', '')}",
            shown=shown,
            is_known=self._knows(shown),
            may_operate=operates,
            needs_login=not operates,
        )

    def check_operator(self, visitor: Visitor) -> None:
        """Lets operators pass.

        Raises:
            RequestRefused: the visitor may only look.
        """
        if not visitor.may_operate:
            self._count(Reason.OPERATOR_TOKEN)
            raise RequestRefused(
                HTTPStatus.FORBIDDEN,
                "this line's operators have a token: log in with it (the file of "
                "--operator-token-file), or ask an operator",
                needs_login=True,
            )

    def log_in(self, token: str, environ: WSGIEnvironment) -> str:
        """Begins a session for somebody who shows a token. Returns the Set-Cookie header.

        Raises:
            RequestRefused: it is none of the line's tokens.
        """
        shown = token.strip().encode()
        if not self._has_tokens:
            raise RequestRefused(HTTPStatus.CONFLICT, "this board asks for no token: just look")
        if not self._knows(shown):
            self._note_wrong(environ)
            self._count(Reason.TOKEN)
            raise RequestRefused(
                HTTPStatus.UNAUTHORIZED,
                "that is none of this line's tokens (the run's, the operators', the viewers', a "
                "worker's own): copy the content of the file that --token-file, "
                "--operator-token-file or --viewer-token-file of the service names",
                needs_login=True,
            )
        session = secrets.token_urlsafe(32)
        with self._lock:
            self._sessions[session] = self._now() + _SESSION_S, shown
            while len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)
        return self._set_cookie(session, int(_SESSION_S), environ)

    def log_out(self, environ: WSGIEnvironment) -> str:
        """Ends the session of a request, if it has one. Returns the Set-Cookie header."""
        with self._lock:
            self._sessions.pop(self._session_of(environ), None)
        return self._set_cookie("", 0, environ)

    @property
    def _has_tokens(self) -> bool:
        return bool(self._access.run_token or self._access.operator_token)

    def _check_beyond(self, environ: WSGIEnvironment) -> None:
        if not self._has_tokens:
            raise RequestRefused(
                HTTPStatus.FORBIDDEN,
                "this service listens beyond this host and has no tokens, so its board shows "
                "nothing to anybody: start it with --token-file (and --operator-token-file for "
                "those who may answer), or with --bind 127.0.0.1 (in a container whose port is "
                "published on loopback: --published-on 127.0.0.1)",
            )
        if self.wants_encryption(environ):
            raise RequestRefused(
                HTTPStatus.FORBIDDEN,
                "beyond its host this board answers over TLS only: open it with https://",
            )

    def _knows(self, shown: bytes) -> bool:
        """Whether it is one of the line's tokens."""
        try:
            return self._access.knows(shown)
        except LineError:
            return False

    def _operates(self, shown: bytes) -> bool:
        try:
            self._access.check_operating(shown)
        except LineError:
            return False
        return True

    def _note_wrong(self, environ: WSGIEnvironment) -> None:
        """Counts a wrong token.

        Raises:
            RequestRefused: so many came from its address that this one is not even answered.
        """
        address, is_told = environ.get("REMOTE_ADDR", ""), False
        with self._lock:
            wait_s = self._attempts.wait_s(address, self._now())
            if wait_s <= 0:
                is_told = self._attempts.note(address, self._now())
        if wait_s > 0:
            raise RequestRefused(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{MOST_WRONG} wrong tokens came from your address: try again in {wait_s:.0f} s",
                needs_login=True,
            )
        if is_told:
            log.warning("board_login_refused from=%s", address)

    @staticmethod
    def _bearer(environ: WSGIEnvironment) -> bytes:
        """The token that a request shows itself; empty: none."""
        bearer: str = environ.get("HTTP_AUTHORIZATION", "")
        return bearer.removeprefix(BEARER_PREFIX).strip().encode() if _is_bearer(bearer) else b""

    def _of_session(self, environ: WSGIEnvironment) -> bytes:
        """The token that a request's session showed; empty: it has none."""
        with self._lock:
            until, shown = self._sessions.get(self._session_of(environ), (0.0, b""))
        return shown if self._now() < until else b""

    def _session_of(self, environ: WSGIEnvironment) -> str:
        text: str = environ.get("HTTP_COOKIE", "")
        if len(text) > _LONGEST_COOKIES:  # reading them may take time with the square of the length
            return ""
        try:
            cookies = SimpleCookie(text)
        except CookieError:
            return ""
        found = cookies.get(self._cookie)
        return "" if found is None else found.value

    def _set_cookie(self, value: str, seconds: int, environ: WSGIEnvironment) -> str:
        secure = "; Secure" if environ.get(ENCRYPTED, False) else ""
        # Only the API needs it. Cookies don't know ports: what else this host serves gets it, too,
        # under the same path.
        where = f"Path=/board/api; Max-Age={seconds}"
        return f"{self._cookie}={value}; {where}; HttpOnly; SameSite=Strict{secure}"


def _is_bearer(authorization: str) -> bool:
    return authorization.startswith(BEARER_PREFIX)


def _is_own(origin: str, host: str, environ: WSGIEnvironment) -> bool:
    """Whether a page of `origin` is this service's, which the request calls `host`."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    # A page that came in the clear is not one of ours if this request is encrypted. The other way
    # round, a proxy may have decrypted it.
    weaker = bool(environ.get(ENCRYPTED, False)) and parts.scheme != "https"
    return parts.netloc.lower() == host.lower() and not weaker
