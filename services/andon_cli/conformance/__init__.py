"""Conformance: whether a server, or a client, in any language keeps the protocol."""
