"""Conformance: plays the other end of `andon.v1`, and judges what it sees on the wire."""
