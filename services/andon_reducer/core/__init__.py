"""Rounds of exchange as a state machine, and their arithmetic; no sockets, clocks or threads."""
