"""What both ends need of their machine: TLS, keepalive, shared memory, metrics."""
