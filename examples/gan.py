"""A GAN by hand: two models, two optimizers, and the script says what is exchanged and when.

Run it alone, or with `andon run --workers 2 examples/gan.py` to the same result.
The generator learns to draw from a normal distribution around 3 with a deviation of 0.5.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from andon_trainer import Line

BATCH = 64


def network(inputs: int) -> nn.Module:
    """Two layers with one output."""
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 1))


def score(scores: Tensor, *, real: bool) -> Tensor:
    """How wrong it is to take these for real or for made up; the mean."""
    return F.softplus(-scores if real else scores).mean()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=600)
options = parser.parse_args()
line = Line(seed=1)
torch.manual_seed(1)
generator, critic = network(4), network(1)
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.99))
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.0, 0.99))
line.register("opt_g", opt_g)  # for checkpoints, and for workers that come later
line.register("opt_c", opt_c)
line.join(generator, critic)

while line.step < options.steps and not line.complete:
    draw = torch.Generator().manual_seed(line.step)  # the whole batch, alike on all workers
    everything = 3 + 0.5 * torch.randn(BATCH, 1, generator=draw)
    noise = torch.randn(BATCH, 4, generator=draw)
    mine = slice(line.rank, None, line.world_size)
    real, fake = everything[mine].to(line.device), generator(noise[mine].to(line.device))

    opt_c.zero_grad()
    loss_c = score(critic(real), real=True) + score(critic(fake.detach()), real=False)
    loss_c.backward()  # type: ignore[no-untyped-call]  # torch's own
    line.all_reduce_gradients(critic, weight=len(real))  # p.grad is the mean over all workers

    opt_g.zero_grad()
    loss_g = score(critic(fake), real=True)
    loss_g.backward(inputs=list(generator.parameters()))  # type: ignore[no-untyped-call]
    line.all_reduce_gradients(generator, weight=len(real))

    if line.should_commit():  # True on all workers or on none; False: compute it again
        opt_c.step()
        opt_g.step()

with torch.no_grad():
    made = generator(
        torch.randn(1000, 4, generator=torch.Generator().manual_seed(0)).to(line.device)
    )
if line.is_main:
    print(f"around {made.mean():.2f}, deviation {made.std():.2f}")
    print(f"step {line.step}: loss {F.mse_loss(made, torch.full_like(made, 3.0)):.6f}")
