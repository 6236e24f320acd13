"""The protocol as plain values and pure functions: no sockets, files or clocks."""
