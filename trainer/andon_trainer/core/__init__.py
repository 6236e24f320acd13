"""The worker's decisions, without I/O: no sockets, clocks, threads or PyTorch."""
