"""The same script with Line: andon run --workers 2 with_line.py, or alone, or by torchrun."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

line = Line()

torch.manual_seed(0)
x = torch.randn(1024, 20)
dataset = TensorDataset(x, x[:, :4].argmax(1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(dataset, batch_size=64, shuffle=True)
model, optimizer, loader = line.prepare(model, optimizer, loader)

for epoch in line.epochs(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        line.backward(loss)
        optimizer.step()
    if line.is_main:
        torch.save(model.state_dict(), "model.pt")
        print(f"epoch {epoch}: loss {line.loss:.6f}")
