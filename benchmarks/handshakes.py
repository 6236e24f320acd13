"""Does a TLS server of gRPC live through clients that shake hands at the same time?

    python benchmarks/handshakes.py [--servers 10] [--handshakes 4000] [--json FILE]

Servers are processes of their own, each with the same certificate. Half of them hand gRPC their
certificates at each handshake, which its documentation allows; the other half as Andon's services
do, through `ServerIdentity`. Each is flooded by eight clients without certificates until it ends,
or all handshakes are over. To try another version of grpcio, run this with the Python of an
environment that has it: the JSON says which one it was.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from concurrent import futures
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import grpc
from machine import describe_machine

from andon.host.tls import ServerIdentity
from andon_cli.commands.authority import Authority

CLIENTS = 8
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Flooded:
    """What became of one server."""

    handshakes: int
    """Before it ended; all, if it did not."""
    ended_by: str
    """The name of a signal; empty: it was still there at the end."""


def serve(folder: Path, *, each_time: bool) -> None:
    """Serves nothing, under TLS; prints the port. Does not return."""
    identity = ServerIdentity(folder)
    credentials = identity.credentials()
    if each_time:
        first = identity.configuration
        credentials = grpc.dynamic_ssl_server_credentials(
            first, lambda: identity.configuration, require_client_authentication=True
        )
    server = grpc.server(futures.ThreadPoolExecutor(2))
    print(server.add_secure_port(f"{HOST}:0", credentials), flush=True)
    server.start()
    server.wait_for_termination()


def flood(certificates: Path, *, each_time: bool, handshakes: int) -> Flooded:
    """Floods one server."""
    command = [sys.executable, __file__, "--serve", str(certificates)]
    command += ["--each-time"] if each_time else []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        context = ssl.create_default_context(cafile=certificates / "ca.crt")
        context.set_alpn_protocols(["h2"])
        numbers, done = count(), [0] * CLIENTS

        def shake_hands(client: int) -> None:
            while next(numbers) < handshakes and server.poll() is None:
                try:
                    with (
                        socket.create_connection((HOST, port), timeout=10) as raw,
                        context.wrap_socket(raw, server_hostname=HOST),
                    ):
                        done[client] += 1
                except OSError:
                    continue  # The server is gone, or refuses a client without a certificate.

        with futures.ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(shake_hands, range(CLIENTS)))
        code = server.poll()
        if code is None:
            server.kill()
        return Flooded(sum(done), "" if code is None else signal.Signals(-code).name)


def main() -> None:
    """Floods servers of both kinds in turns, and says how many ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--servers", type=int, default=10, help="how many of each kind")
    parser.add_argument("--handshakes", type=int, default=4000, help="with each server")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--each-time", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, each_time=given.each_time)
        return
    machine = describe_machine()
    rows: dict[str, list[Flooded]] = {"each time": [], "only if they changed": []}
    with tempfile.TemporaryDirectory(prefix="andon-handshakes-") as scratch:
        certificates = Path(scratch) / "certs"
        now = datetime.now(UTC)
        authority, _ = Authority.in_folder(Path(scratch) / "ca", now)
        authority.certify(HOST, certificates, now=now, days=2)
        for _ in range(given.servers):
            for kind, row in rows.items():
                each_time = kind == "each time"
                row.append(flood(certificates, each_time=each_time, handshakes=given.handshakes))
    for kind, row in rows.items():
        ended = [each.handshakes for each in row if each.ended_by]
        print(f"certificates given {kind}: {len(ended)} of {len(row)} servers ended, after {ended}")
    if given.json is not None:
        found = {kind: [asdict(each) for each in row] for kind, row in rows.items()}
        text = json.dumps({"machine": machine, "servers": found}, indent=1)
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
