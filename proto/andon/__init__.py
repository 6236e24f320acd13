"""The contract: what a worker, the coordinator and a reducer must agree on."""

__version__ = "0.1.0"

__all__ = ["__version__"]
