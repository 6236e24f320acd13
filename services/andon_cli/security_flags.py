"""Flags of certificates and tokens, and those of `andon certs`, which makes the certificates."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

__all__ = ["add_access_flags", "add_certs"]

if TYPE_CHECKING:
    _Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_CERTS = """\
example:
  andon certs alpha beta 10.0.0.7     then copy certs/beta to beta, certs/10.0.0.7 to 10.0.0.7
  andon certs gamma                   later: the CA stays, one more host
  andon certs --renew alpha beta      new certificates before the old ones expire

Makes a private CA in DIR/ca, and for each host DIR/HOST/{tls.crt,tls.key,ca.crt}: what --tls takes.
DIR/ca/ca.key signs whatever it is asked to: keep it on this host. Each certificate is for its host,
localhost and the addresses of loopback, as a server and as a client. Needs the library cryptography
(pip install 'andon[certs]').
"""


def add_access_flags(verb: argparse.ArgumentParser, *, insecure: str) -> None:
    """Adds the flags that `andon_server.security` reads; `insecure` is that one's help."""
    verb.add_argument(
        "--tls",
        dest="tls_dir",
        metavar="DIR",
        help="encrypt, with DIR/tls.crt, tls.key and ca.crt (ANDON_TLS_DIR; see `andon certs`)",
    )
    verb.add_argument(
        "--token-file", metavar="FILE", help="the run's token, which workers and people show"
    )
    verb.add_argument(
        "--operator-token-file",
        metavar="FILE",
        help="the token that halt, resume and drain need (default: the run's)",
    )
    verb.add_argument("--insecure", action="store_true", default=None, help=insecure)


def add_certs(verbs: _Verbs) -> None:
    """Adds the verb `certs`."""
    summary = "make a private CA, and a certificate for each host"
    verb = verbs.add_parser(
        "certs",
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=_CERTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.add_argument("hosts", nargs="+", metavar="HOST", help="a host's name or address")
    verb.add_argument("--out", metavar="DIR", help="keep them there (default: certs)")
    verb.add_argument("--days", metavar="N", help="certificates are valid for N days (default: 90)")
    verb.add_argument("--renew", action="store_true", default=None,
                      help="make the hosts' keys and certificates anew")  # fmt: skip
