"""The judge of clients: a scripted line that a client under test joins, and what it saw there.

Theory of operation. Each scenario starts a server of its own on loopback, starts the client with
that server's address, and plays coordinator, reducer and all other workers by a script. Whatever
the client sends, on whichever stream, goes with its time into one transcript; the script waits for
what must come, makes sure that what must not come does not, and decides its checks by that alone.
Averages are the judge's to choose, so that two runs of one client can be made to differ in one
thing; its weights are known by the digests that it tells.
"""
