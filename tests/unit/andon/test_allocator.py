"""Freed memory is used again, and not asked of the system anew for each message."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from andon.allocator import keep_freed_memory

_PROGRAM = """
import resource, sys
from andon.allocator import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def use() -> None:
    # Several at once, so that what is freed is more than glibc would keep by itself.
    held = [b"x" * 2**22 for _ in range(16)]
    del held

use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def has_glibc() -> bool:
    return "CS_GNU_LIBC_VERSION" in os.confstr_names


def faults(how: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not has_glibc(), reason="the C library is not glibc: its malloc is left alone")
def test_pages_that_were_freed_are_not_asked_for_again() -> None:
    asked, kept = faults("as it is"), faults("kept")

    # Ten times sixteen buffers of 1024 pages.
    assert kept < 2000 < asked


def test_it_says_whether_it_could() -> None:
    assert keep_freed_memory() == has_glibc()
