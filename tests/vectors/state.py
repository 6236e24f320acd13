"""The state of an Andon worker, written as docs/protocol-data.md, section 18, defines it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from vectors.floats import BFLOAT16, FLOAT32

__all__ = ["STATE_FILE", "state_files"]

STATE_FILE = "state.bin"

_WEIGHT = [0.5, -1.25, 3.0, 0.1, -0.0, 65504.0]
_HEAD = [1.0, -2.0]
_TENSORS: dict[str, tuple[str, list[int], bytes]] = {
    "model.w": ("F32", [2, 3], FLOAT32.pack([FLOAT32.of(each) for each in _WEIGHT])),
    "model.head.größe": ("BF16", [2], BFLOAT16.pack([BFLOAT16.of(each) for each in _HEAD])),
    "model.count": ("I64", [], (7).to_bytes(8, "little")),
    "optimizers.0.state.0.momentum_buffer": (
        "F32",
        [2, 3],
        FLOAT32.pack([FLOAT32.of(each / 4) for each in _WEIGHT]),
    ),
}
"""By name: type, shape, bytes."""


def state_files() -> dict[str, bytes]:
    """`state.bin`, and `state.json`, which says what is in it."""
    skeleton = json.dumps(_tree()).encode()
    data = len(skeleton).to_bytes(8, "little") + skeleton + _safetensors()
    about = (
        "A state as one Andon worker sends it to another; docs/protocol-data.md, The state of an "
        "Andon worker. Bytes are hexadecimal. In tree, tensors are named as in tensors."
    )
    said = {
        "description": about,
        "file": STATE_FILE,
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "tensors": [
            {"name": name, "dtype": dtype, "shape": shape, "bytes": raw.hex()}
            for name, (dtype, shape, raw) in _TENSORS.items()
        ],
        "tree": skeleton.decode(),
        "weights_sha256": _digest(),
    }
    return {STATE_FILE: data, "state.json": (json.dumps(said, indent=2) + "\n").encode()}


def _tree() -> Any:
    """One model, SGD with momentum, and a scheduler that waits for a plateau."""
    group = {"lr": 0.125, "momentum": 0.5, "params": [0]}
    return _dict(
        model=_dict(**{name: _tensor(f"model.{name}") for name in ("w", "count", "head.größe")}),
        optimizers=[
            _dict(
                state={"dict": [[0, _dict(momentum_buffer=_tensor(_momentum()))]]},
                param_groups=[_dict(**group)],
            )
        ],
        registered=_dict(scheduler=_dict(best=float("inf"), lrs={"tuple": [0.25, 0.125]})),
    )


def _momentum() -> str:
    return "optimizers.0.state.0.momentum_buffer"


def _dict(**parts: Any) -> Any:
    return {"dict": [[key, part] for key, part in parts.items()]}


def _tensor(name: str) -> Any:
    return {"tensor": name}


def _safetensors() -> bytes:
    header: dict[str, Any] = {}
    data = b""
    # The widest types first, so that each tensor is aligned.
    for name, (dtype, shape, raw) in sorted(_TENSORS.items(), key=lambda each: _width(each[1][0])):
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def _width(dtype: str) -> int:
    return -int(dtype.lstrip("BFI"))


def _digest() -> str:
    """The digest of the parameters, without the buffer `count`."""
    digest = hashlib.sha256()
    for name, kind, shape in (("w", "float32", "2,3"), ("head.größe", "bfloat16", "2")):
        digest.update(f"{name}\0{kind}\0{shape}\0".encode() + _TENSORS[f"model.{name}"][2])
    return digest.hexdigest()
