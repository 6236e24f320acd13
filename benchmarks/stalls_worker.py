"""A worker of the benchmark of stalls: it trains a small model, and stands still as planned."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any

import torch
from stalls import StallKind, StallSpec
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from andon_trainer import Line

_PAGE = mmap.PAGESIZE


class Stalls:
    """What this worker does in the present step, and how it tells the benchmark."""

    def __init__(self, spec: StallSpec) -> None:
        """Stands still nowhere yet."""
        self.spec = spec
        self.now: StallKind | None = None
        """What is planted in the present step for this worker."""
        self.heavy = False
        """Whether the step has much to compute, for all workers alike."""
        self._lock = threading.Lock()
        # Now, so that the disk is quiet when something is planted.
        paged = any(kind == StallKind.FAULTS.value for kind, _ in spec.planted.values())
        self._pages = _paged_file() if paged else None

    def end(self) -> None:
        """Leaves nothing behind."""
        if self._pages is not None:
            self._pages.unlink()

    def begin(self, step: int) -> None:
        """A step begins."""
        worker = self.spec.slot
        kind, slot = self.spec.planted.get(step, ("", -1))
        self.heavy = kind == StallKind.NEIGHBOUR.value
        self.now = StallKind(kind) if slot == worker else None
        if self.now is not None:
            told = {"worker": worker, "step": step, "kind": kind, "at": time.time()}
            print(json.dumps(told), flush=True)
            if self.now in (StallKind.LINK, StallKind.NEIGHBOUR):
                sys.stdin.readline()  # The benchmark makes the link thin, or the host busy.

    def is_now(self, kind: StallKind) -> bool:
        """Whether this is planted; it is once."""
        if self.now is not kind:
            return False
        self.now = None
        return True

    def is_planted_in_loader(self, index: int) -> bool:
        """Whether the sample is the first that this worker loads for a step of such a stall.

        A loading process is ahead of its worker, and knows of no present step.
        """
        spec = self.spec
        here = spec.loading and get_worker_info() is not None
        first = index % (spec.batch // spec.workers) == 0
        planted = spec.planted.get(index // spec.batch + 1)
        return bool(here and first and planted == (StallKind.LOADER.value, spec.slot))

    def wait_for_lock(self) -> None:
        """Waits for a lock that another thread has."""
        taken = threading.Event()

        def hold() -> None:
            with self._lock:
                taken.set()
                time.sleep(self.spec.stall_s)

        threading.Thread(target=hold, name="another").start()
        taken.wait()
        with self._lock:  # stall: lock
            pass

    def fault(self) -> None:
        """Touches pages that are not in memory, again and again."""
        until = time.monotonic() + self.spec.stall_s
        assert self._pages is not None, "such a stall is planned"
        with self._pages.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while time.monotonic() < until:  # stall: faults
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # stall: faults
                with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as pages:  # stall: faults
                    pages.madvise(mmap.MADV_RANDOM)  # stall: faults
                    touch(pages, until)  # stall: faults


def touch(pages: mmap.mmap, until: float) -> int:
    """Reads one byte of each page."""
    found = 0
    for place in range(0, len(pages), 17 * _PAGE):  # stall: faults
        found += pages[place]  # stall: faults
        if time.monotonic() > until:  # stall: faults
            break
    return found


class Corpus(Dataset[tuple[Tensor, Tensor]]):
    """Random samples, which come late where that is planted."""

    def __init__(self, stalls: Stalls, size: int) -> None:
        """Has `size` samples."""
        self._stalls = stalls
        self._size = size

    def __len__(self) -> int:
        """How many there are."""
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample."""
        stalls = self._stalls
        if stalls.is_now(StallKind.DATA):
            time.sleep(stalls.spec.stall_s)  # stall: data
        if stalls.is_now(StallKind.PIPE):
            read_slowly(stalls.spec.stall_s)
        if stalls.is_planted_in_loader(index):
            time.sleep(stalls.spec.stall_s)  # stall: loader
        return torch.full((64,), float(index % 7)), torch.tensor(index % 4)


def read_slowly(seconds: float) -> None:
    """Reads from a pipe into which the bytes come late, as from a slow disk."""
    reads, writes = os.pipe()
    threading.Timer(seconds, os.write, (writes, b"x")).start()
    os.read(reads, 1)  # stall: pipe
    os.close(reads)


class Model(nn.Module):
    """Three layers, with a place to stand still."""

    def __init__(self, stalls: Stalls, width: int) -> None:
        """Has about `width` times `width` parameters."""
        super().__init__()
        self._stalls = stalls
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )
        self._ballast = torch.randn(700, 700)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        stalls = self._stalls
        if stalls.is_now(StallKind.LOCK):
            stalls.wait_for_lock()
        if stalls.is_now(StallKind.FAULTS):
            stalls.fault()
        if stalls.now is StallKind.CLOCK:
            time.sleep(stalls.spec.stall_s)  # stall: clock
            stalls.now = None
        if stalls.heavy:
            self.compute()
        found: Tensor = self.layers(x)
        return found

    def compute(self) -> None:
        """A quarter of a second of one core, whoever else is there."""
        began = time.thread_time()
        while time.thread_time() - began < 0.25:  # stall: neighbour
            self._ballast @ self._ballast  # stall: neighbour


def work(spec: StallSpec) -> None:
    """Trains to the end of the plan."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    stalls = Stalls(spec)
    _stand_in_for_nvml(stalls)
    model: Any = Model(stalls, spec.width)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    line = Line(address=spec.address, run_id=spec.run_id)
    # Before the line's own hooks, as a script that has hooks of its own.
    model.layers[2].weight.register_hook(lambda gradient: _hook(stalls, gradient))
    optimizer.register_step_pre_hook(lambda *_: _before_step(stalls))
    corpus = Corpus(stalls, spec.batch * spec.steps)
    model, optimizer, loader = line.prepare(
        model, optimizer, DataLoader(corpus, batch_size=spec.batch, num_workers=spec.loading)
    )
    step = 0
    stalls.begin(1)
    for _ in line.epochs(1):
        for x, y in loader:
            step += 1
            time.sleep(spec.calm_s)
            if stalls.is_now(StallKind.GIL):
                keep_lock(spec.stall_s)
            loss = nn.functional.cross_entropy(model(x), y)
            model.zero_grad()
            line.backward(loss)
            optimizer.step()
            if stalls.is_now(StallKind.SCRIPT):
                with line.busy("upload"):
                    time.sleep(spec.stall_s)  # stall: script
            stalls.begin(step + 1)
    line.close()
    stalls.end()


def keep_lock(seconds: float) -> None:
    """A call into C that does not give the interpreter's lock up, and goes on after a signal."""
    ctypes.PyDLL(None).system(f"sleep {seconds}".encode())  # stall: gil


def _hook(stalls: Stalls, gradient: Tensor) -> Tensor:
    if stalls.is_now(StallKind.HOOK):
        time.sleep(stalls.spec.stall_s)  # stall: hook
    return gradient


def _before_step(stalls: Stalls) -> None:
    if stalls.is_now(StallKind.OPTIMIZER):
        time.sleep(stalls.spec.stall_s)  # stall: optimizer


def _paged_file() -> Path:
    path = Path(tempfile.gettempdir()) / f"stalls-{os.getpid()}"
    path.write_bytes(os.urandom(2**20) * 64)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def _stand_in_for_nvml(stalls: Stalls) -> None:
    """A GPU that is throttled as long as that is planted."""
    mine = types.SimpleNamespace(pid=os.getpid())
    sys.modules["pynvml"] = types.SimpleNamespace(  # type: ignore[assignment]  # a stand-in
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [mine],
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: (
            0x20 if stalls.now is StallKind.CLOCK else 0
        ),
        nvmlDeviceGetClockInfo=lambda *_: 600 if stalls.now is StallKind.CLOCK else 1980,
        nvmlDeviceGetMaxClockInfo=lambda *_: 1980,
    )


if __name__ == "__main__":
    work(StallSpec.from_json(sys.stdin.readline()))
