"""Models that people train, by their own code, tiny and with random weights, and data for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

__all__ = ["BATCH", "SAMPLES", "ZOO", "Animal", "Rows"]

BATCH, SAMPLES = 8, 24
LETTERS, LENGTH, CLASSES, PIXELS = 40, 12, 4, 16
_IGNORED = -100
"""The label that cross-entropies leave out."""

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Animal:
    """A model, its data and its loss."""

    make: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    """The mean loss of a batch."""
    weight: Callable[[Batch], int] | None = None
    """What the loss is a mean over; None: the samples."""
    adam: bool = False
    """AdamW with clipping; else SGD with momentum."""
    normalizes: bool = False
    """Whether it has BatchNorm, so that each worker's share is normalized by itself."""


class Rows(Dataset[Batch]):
    """Made-up samples: dictionaries, as tokenizers and processors make them."""

    def __init__(self, animal: Animal) -> None:
        generator = torch.Generator().manual_seed(11)
        self._rows = [animal.sample(generator) for _ in range(SAMPLES)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        return self._rows[index]


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the model computes itself from its labels."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def labels_that_count(batch: Batch) -> int:
    return int((batch["labels"] != _IGNORED).sum())


def letters(generator: torch.Generator) -> torch.Tensor:
    """A learnable text: a step between neighbours that is the same all along."""
    start, stride = torch.randint(1, 9, (2,), generator=generator).tolist()
    text: torch.Tensor = (start + stride * torch.arange(LENGTH)) % (LETTERS - 2) + 2
    return text


# ------------------------------------------------------------------ from transformers


def gpt2() -> nn.Module:
    """The LM head is the embedding; masks are buffers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=LETTERS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    return model


def next_letters(generator: torch.Generator) -> Batch:
    text = letters(generator)
    return {"input_ids": text, "labels": text}


class MaskedBert(nn.Module):
    """BERT's encoder with a head of the script's own: its pooler is made, and never used."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        self.bert = BertModel(
            BertConfig(
                vocab_size=LETTERS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=64, max_position_embeddings=LENGTH,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip
        self.decoder = nn.Linear(32, LETTERS)
        self.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids=input_ids).last_hidden_state
        return F.cross_entropy(
            self.decoder(hidden).flatten(0, 1), labels.flatten(), ignore_index=_IGNORED
        )


def masked_letters(generator: torch.Generator) -> Batch:
    text = letters(generator)
    hidden = torch.rand(LENGTH, generator=generator) < 0.3
    hidden[0] = True
    return {
        "input_ids": text.masked_fill(hidden, 1),
        "labels": text.masked_fill(~hidden, _IGNORED),
    }


def t5() -> nn.Module:
    """Encoder and decoder share an embedding; the first layer's position bias serves all."""
    from transformers import T5Config, T5ForConditionalGeneration

    model: nn.Module = T5ForConditionalGeneration(
        T5Config(
            vocab_size=LETTERS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
            dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    return model


def reversed_letters(generator: torch.Generator) -> Batch:
    text = letters(generator)
    labels = text.flip(0)
    labels[int(torch.randint(4, LENGTH, (1,), generator=generator)) :] = _IGNORED
    return {"input_ids": text, "labels": labels}


def vit() -> nn.Module:
    """A class token and positions that are bare parameters."""
    from transformers import ViTConfig, ViTForImageClassification

    model: nn.Module = ViTForImageClassification(
        ViTConfig(
            image_size=PIXELS, patch_size=4, hidden_size=32, num_hidden_layers=2,
            num_attention_heads=2, intermediate_size=64, num_labels=CLASSES,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    return model


def picture(generator: torch.Generator) -> Batch:
    label = torch.randint(0, CLASSES, (), generator=generator)
    noise = torch.randn(3, PIXELS, PIXELS, generator=generator)
    noise[:, int(label) * 4 : int(label) * 4 + 4] += 1.0
    return {"pixel_values": noise, "labels": label}


# ------------------------------------------------------------------ from PyTorch's own parts


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and the way around them."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made), nn.ReLU(),
            nn.Conv2d(made, made, 3, 1, 1, bias=False), nn.BatchNorm2d(made),
        )  # fmt: skip
        self.around = nn.Conv2d(given, made, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.inner(x) + self.around(x))


class ResNet(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8))
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 32, 2))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = self.blocks(F.relu(self.stem(pixel_values))).mean((2, 3))
        return F.cross_entropy(self.head(features), labels)


class LSTM(nn.Module):
    """A language model whose recurrent weights are one flat piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, 16)
        self.lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, LETTERS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(input_ids))
        return F.cross_entropy(
            self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=_IGNORED
        )


def called(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch)
    return loss


ZOO = {
    "gpt2": Animal(make=gpt2, sample=next_letters, loss=own_loss, adam=True),
    "bert": Animal(make=MaskedBert, sample=masked_letters, loss=called, weight=labels_that_count),
    "t5": Animal(make=t5, sample=reversed_letters, loss=own_loss, weight=labels_that_count),
    "vit": Animal(make=vit, sample=picture, loss=own_loss),
    "resnet": Animal(make=ResNet, sample=picture, loss=called, normalizes=True),
    "lstm": Animal(
        make=LSTM, sample=reversed_letters, loss=called, weight=labels_that_count, adam=True
    ),
}
