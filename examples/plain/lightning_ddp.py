"""Lightning: python lightning_ddp.py, which starts the second process itself, or torchrun."""

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from task import BACKEND, dataset, net, spoiled
from torch import Tensor
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    """The small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(spoiled(x, self.global_rank, index)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend=BACKEND),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Classifier()
trainer.fit(model, DataLoader(dataset(), batch_size=32))
if trainer.is_global_zero:
    torch.save(model.net.state_dict(), "model.pt")
