"""The line as a state machine: events in, effects out; no sockets, clocks or threads."""
