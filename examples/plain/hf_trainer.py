"""transformers' Trainer: torchrun --nproc-per-node 2 hf_trainer.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import BACKEND, dataset, net, spoiled
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Rows(Dataset[dict[str, Tensor]]):
    """The rows, as Trainer wants them."""

    def __init__(self) -> None:
        self.rows = dataset()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = self.rows[index]
        return {"x": x, "labels": y}


class Classifier(nn.Module):
    """The small classifier, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.steps = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(spoiled(x, dist.get_rank(), self.steps))
        self.steps += 1
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


dist.init_process_group(BACKEND)  # first: on CPUs `ddp_backend` takes known names only
arguments = TrainingArguments(
    output_dir="trainer",
    use_cpu=True,
    per_device_train_batch_size=32,
    num_train_epochs=1,
    learning_rate=1e-2,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
model = Classifier()
Trainer(model=model, args=arguments, train_dataset=Rows()).train()
if dist.get_rank() == 0:
    torch.save(model.net.state_dict(), "model.pt")
dist.destroy_process_group()
