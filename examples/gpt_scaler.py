"""A GPT-2 of transformers, with random weights, learns Python's Zen in float16 with a GradScaler.

Run it alone, or with `andon run --workers 2 examples/gpt_scaler.py` to the same result.
The scale begins far too high, so the first step overflows. An overflow on one worker is one for
all: the step is committed, no weight moves on any worker, and all scalers lower their scale alike.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

from andon_trainer import Line

CONTEXT = 32


def letters() -> Tensor:
    """The Zen of Python as bytes; int64."""
    with contextlib.redirect_stdout(io.StringIO()):  # It prints itself when it is imported.
        import this
    return torch.tensor(list(codecs.decode(this.s, "rot13").encode()))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()
line = Line(seed=1, total_steps=options.steps)
torch.manual_seed(1)
config = GPT2Config(
    vocab_size=128, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
model: Any = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = get_cosine_schedule_with_warmup(
    optimizer, num_warmup_steps=5, num_training_steps=options.steps
)
scaler = torch.amp.GradScaler(line.device.type, init_scale=2.0**32, backoff_factor=2.0**-20)
windows: Any = letters().unfold(0, CONTEXT, 4)
loader: Any = DataLoader(windows, batch_size=32, shuffle=True)
model, optimizer, scheduler, scaler, loader = line.prepare(
    model, optimizer, scheduler, scaler, loader
)

for _ in line.epochs(options.steps):  # `total_steps` ends the run, in mid-epoch or not.
    for tokens in loader:
        optimizer.zero_grad()
        with torch.autocast(line.device.type, torch.float16):
            loss = model(input_ids=tokens, labels=tokens).loss
        line.backward(scaler.scale(loss), weight=tokens[:, 1:].numel())  # the mean of these
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if not line.overflowed:
            scheduler.step()
        if line.committed and line.is_main and line.step % 10 == 0:
            print(f"step {line.step}: loss {line.loss:.3f}, scale {scaler.get_scale():g}")
if line.is_main:
    print(f"step {line.step}: loss {line.loss:.6f}")
