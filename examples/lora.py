"""Adapters of peft (LoRA) are trained in a GPT-2 whose own weights are frozen.

Run it alone, or with `andon run --workers 2 examples/lora.py` to the same result.
Only the adapters' gradients are exchanged: 4 thousand numbers in place of 107 thousand.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2ForSequenceClassification

from andon_trainer import Line


def sentences(count: int) -> TensorDataset:
    """Made-up sentences of 12 words; their class is whether word 7 occurs."""
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(1, 24, (count, 12), generator=draw)
    return TensorDataset(words, (words == 7).any(1).long())


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--out", type=Path, help="folder for the adapters")
options = parser.parse_args()
line = Line(seed=1, total_steps=options.steps)
torch.manual_seed(1)
config = GPT2Config(
    vocab_size=24, n_positions=12, n_embd=64, n_layer=2, n_head=4, num_labels=2,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
base = GPT2ForSequenceClassification(config)  # yours comes from `from_pretrained`
adapters = LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["c_attn"], fan_in_fan_out=True)
model: Any = get_peft_model(base, adapters)
if line.is_main:
    model.print_trainable_parameters()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
loader: Any = DataLoader(sentences(512), batch_size=32, shuffle=True)
model, optimizer, loader = line.prepare(model, optimizer, loader)

for _ in line.epochs(options.steps):  # `total_steps` ends the run, in mid-epoch or not.
    for words, kinds in loader:
        optimizer.zero_grad()
        line.backward(model(input_ids=words, labels=kinds).loss)
        optimizer.step()
        if line.committed and line.is_main and line.step % 20 == 0:
            print(f"step {line.step}: loss {line.loss:.3f}")
if line.is_main:
    print(f"step {line.step}: loss {line.loss:.6f}")
    if options.out is not None:
        model.save_pretrained(options.out)  # the adapters alone
