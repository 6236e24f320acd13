"""The runner: plays workers against a server, and judges it by what it sends."""
