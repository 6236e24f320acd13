"""Generated messages and services of the protocol, version 1."""
