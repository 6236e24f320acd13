"""`andon serve` with chunks of three elements, so that even a small model has several."""

import runpy
import sys

import andon.protocol.limits

if __name__ == "__main__":
    andon.protocol.limits.CHUNK_ELEMENTS = 3  # before any other module imports it
    sys.argv[0] = "andon"
    runpy.run_module("andon_cli", run_name="__main__")
