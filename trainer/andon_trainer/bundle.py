"""Bundles: tensors as one vector of bytes, after a digest of what they are.

The digest is of the call's name and of each tensor's name, type and shape, so that workers whose
calls do not pair find out before a byte is taken over. Any dense type passes, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch

from andon_trainer.core.calls import Bytes

__all__ = ["HEAD_BYTES", "pack", "unpack"]

HEAD_BYTES = 32
"""Length of the digest that a bundle begins with."""


def pack(call: str, tensors: Mapping[str, torch.Tensor], *, filled: bool) -> Bytes:
    """A bundle of `tensors`, or just room for one behind its digest if it is not `filled`.

    Raises:
        ValueError: a tensor is sparse or quantised.
    """
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(f"{name} is sparse or quantised: only dense tensors can be sent")
    outlines = (f"{name} {each.dtype} {tuple(each.shape)}" for name, each in tensors.items())
    head = hashlib.sha256("\n".join((call, *outlines)).encode()).digest()
    bundle = np.zeros(HEAD_BYTES + sum(each.nbytes for each in tensors.values()), dtype=np.uint8)
    bundle[:HEAD_BYTES] = np.frombuffer(head, dtype=np.uint8)
    at = HEAD_BYTES
    for tensor in tensors.values() if filled else ():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        bundle[at : at + plain.nbytes] = plain.reshape(-1).view(torch.uint8).numpy()
        at += plain.nbytes
    return bundle


def unpack(bundle: Bytes, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a bundle into the tensors that it was made for, where they are."""
    at = HEAD_BYTES
    with torch.no_grad():
        for tensor in tensors.values():
            raw = torch.from_numpy(bundle[at : at + tensor.nbytes].copy())
            if tensor.numel():  # no other type's view of nothing
                tensor.copy_(raw.view(tensor.dtype).reshape(tensor.shape))
            at += tensor.nbytes
