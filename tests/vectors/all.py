"""All generated files under conformance/, by path."""

from __future__ import annotations

from vectors.accepting import accepting
from vectors.attestations import attestations_file
from vectors.averages import averages_file
from vectors.book import files_of
from vectors.disagreeing import faults_file
from vectors.lanes import lanes_file
from vectors.peers import peers_file
from vectors.refusing import refusing
from vectors.shares import shares_file
from vectors.state import state_files
from vectors.strips import strips_file
from vectors.topk import topk_file
from vectors.tree import tree_file

__all__ = ["made"]


def made() -> dict[str, bytes]:
    """The files' contents; the same at every call, on every machine."""
    return {
        **files_of([*accepting(), *refusing()], "messages"),
        "averages.json": averages_file(),
        "faults.json": faults_file(),
        "peers.json": peers_file(),
        "strips.json": strips_file(),
        "tcp.json": lanes_file(),
        "topk.json": topk_file(),
        **shares_file(),
        **state_files(),
        **tree_file(),
        **attestations_file(),
    }
