"""Sessions, and collectives between their ranks: lanes, memory that neighbours share, calls.

`core.collectives` decides; this package moves bytes. It knows nothing of PyTorch.
"""
