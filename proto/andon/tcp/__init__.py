"""The TCP lane: connections of plain TCP that carry the frames of a stream of the data plane.

Theory of operation. gRPC copies a payload several times, and in Python an event loop or a lock lies
between any two of its messages. A TCP lane is a connection of its own that carries frames one way
only, in order. So one thread owns it at each end, which blocks in the kernel: `sending.TcpSender`
writes from where the numbers lie, and `receiving.TcpReceiver` reads to where they belong.

A lane belongs to a call of gRPC. The call's server offers it (`listening.TcpListener`), its client
opens it (`connecting.connect`), and both prove that they are the two ends of that call (`proof`).
Sessions, refusals and the end of a stream stay in gRPC, which is also the fall-back.
"""
