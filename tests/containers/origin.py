"""Where this machine gets its Python packages from, made reachable from the builds of the images.

The builds ask pip for packages as this machine's own pip would: with its indexes, its bundle of
certificates and its other settings, however they were set (`pip config list` has files and
variables).
Folders and file:// indexes are served over HTTP, because a build can't see the host's files.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

from containers.machine import Namespace

__all__ = ["CERTIFICATES", "PROXIES", "Origin", "has_cpu_build", "origin"]

CERTIFICATES = "/etc/ssl/certs/of-this-machine.crt"
"""Where the images keep this machine's bundle of certificates."""

_CARRIED = ("index-url", "extra-index-url", "no-index", "find-links", "trusted-host",
            "timeout", "default-timeout", "retries")  # fmt: skip
_PLACES = ("index-url", "extra-index-url", "find-links")
_BUNDLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_LOCAL = re.compile(r"[+-]?[0-9.]+\+(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a build needs to get packages as this machine does."""

    pip_conf: str
    """Text of the images' /etc/pip.conf."""
    certificates: Path | None
    """This machine's bundle, if it says that it has one of its own."""
    proxies: tuple[tuple[str, str], ...]
    """Build arguments that Docker knows by itself."""


@contextmanager
def origin(inside: Namespace, host: str) -> Iterator[Origin]:
    """Serves this machine's folders of packages at the address `host` of the namespace."""
    settings = _pip_settings()
    named = [settings.get("cert"), *(os.environ.get(name) for name in _BUNDLES)]
    bundle = next((Path(each) for each in named if each and Path(each).is_file()), None)
    served: set[Path] = set()
    handler = partial(_Served, served)
    server = inside.call(lambda: ThreadingHTTPServer(("0.0.0.0", 0), handler))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        base = f"http://{host}:{server.server_address[1]}"
        yield Origin(
            pip_conf=_conf(settings, base, host, served, with_bundle=bundle is not None),
            certificates=bundle,
            proxies=tuple((name, os.environ[name]) for name in PROXIES if os.environ.get(name)),
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def has_cpu_build(requirement: str, python: str) -> bool:
    """Whether this machine's pip, left to itself, would choose a build of PyTorch without CUDA."""
    done = subprocess.run(
        [*_PIP, "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps",
         "--only-binary", ":all:", "--python-version", python, "--target", tempfile.gettempdir(),
         "--report", "-", requirement],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    # Then the index of Compose's files is asked.
    if done.returncode != 0:
        return False
    chosen = json.loads(done.stdout)["install"]
    return any(each["metadata"]["version"].endswith("+cpu") for each in chosen)


_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def _pip_settings() -> dict[str, str]:
    """pip's settings by name: of its files, then of the environment, which override them."""
    listed = subprocess.run(
        [*_PIP, "config", "list"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    settings: dict[str, str] = {}
    overriding: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, text = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ("global", "install", ":env:"):
            value = str(ast.literal_eval(text))
            (overriding if section == ":env:" else settings)[name] = value
    return settings | overriding


def _conf(
    settings: dict[str, str], base: str, host: str, served: set[Path], *, with_bundle: bool
) -> str:
    """The settings as a pip.conf in which local places have addresses; adds these to `served`."""
    lines = ["[global]"]
    trusted = settings.get("trusted-host", "").split()
    for name in _CARRIED:
        words = settings.get(name, "").split()
        if name in _PLACES:
            words = [_address(word, base, served) for word in words]
        if name == "trusted-host":
            words = [*trusted, *([host] if served else [])]
        if words:
            lines.append(f"{name} = {' '.join(words)}")
    if with_bundle:
        lines.append(f"cert = {CERTIFICATES}")
    return "\n".join([*lines, ""])


def _address(place: str, base: str, served: set[Path]) -> str:
    """An address for a local folder or a file:// URL; other places are reached as they are."""
    parts = urlsplit(place)
    if parts.scheme not in ("", "file"):
        return place
    folder = Path(unquote(parts.path)).resolve()
    # The pages of an index link to files beside it.
    served.add(folder.parent if parts.scheme == "file" else folder)
    return f"{base}{folder}/"


class _Served(SimpleHTTPRequestHandler):
    """Serves some folders of this machine, under their own paths, and nothing else."""

    def __init__(self, served: set[Path], *args: object) -> None:
        self._served = served
        super().__init__(*args, directory="/")  # type: ignore[arg-type]  # as the server calls it

    def translate_path(self, path: str) -> str:
        return str(Path(super().translate_path(path)).resolve())

    def do_GET(self) -> None:
        asked = Path(self.translate_path(self.path))
        if any(asked.is_relative_to(folder) for folder in self._served):
            super().do_GET()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def log_message(self, *args: object) -> None:
        """Says nothing: pip asks for hundreds of pages."""
