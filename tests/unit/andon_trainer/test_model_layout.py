"""The model's layout: blocks, kinds and order, from any nn.Module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from andon.protocol.layout import BlockKind, DType
from andon_trainer.model.layout import (
    OTHER_BLOCK_ELEMENTS,
    ModelPlan,
    plan_model,
    warn_of_rounding,
)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width)})
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))


class GPT(nn.Module):
    def __init__(self, *, tied: bool = False, layers: int = 3) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 4)
        self.pos_emb = nn.Parameter(torch.zeros(5, 4))
        self.blocks = nn.ModuleList(Layer(4) for _ in range(layers))
        self.ln_f = RMSNorm(4)
        self.lm_head = nn.Linear(4, 11, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


def outline(plan: ModelPlan) -> list[tuple[str, str]]:
    return [(block.kind.name, block.name) for block in plan.layout.blocks]


def layers_of(*layers: nn.Module, head: nn.Module | None = None) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(layers)
    model.register_module("head", head)
    return model


LAYER = Layer(4)
OUTLINES: dict[str, tuple[nn.Module, str]] = {
    "a GPT: head first, embedding last": (
        GPT(),
        "LM_HEAD lm_head, FINAL_NORM ln_f, TRANSFORMER_BLOCK blocks.2, TRANSFORMER_BLOCK blocks.1, "
        "TRANSFORMER_BLOCK blocks.0, EMBEDDING wte, EMBEDDING pos_emb",
    ),
    "a head of another name is recognised by the vocabulary": (
        nn.Sequential(nn.Embedding(11, 4), LAYER, Layer(4), nn.LayerNorm(4), nn.Linear(4, 11)),
        "LM_HEAD 4, FINAL_NORM 3, TRANSFORMER_BLOCK 2, TRANSFORMER_BLOCK 1, EMBEDDING 0",
    ),
    "a head named so is a head of any size": (
        layers_of(LAYER, Layer(4), head=nn.Linear(4, 3)),
        "LM_HEAD head, TRANSFORMER_BLOCK layers.1, TRANSFORMER_BLOCK layers.0",
    ),
    "the outer stack wins over stacks inside its children": (
        nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)),
        "TRANSFORMER_BLOCK 1, TRANSFORMER_BLOCK 0",
    ),
    "a layer that stands in its stack several times is sent once": (
        layers_of(LAYER, LAYER, LAYER),
        "TRANSFORMER_BLOCK layers.0",
    ),
}


@pytest.mark.parametrize(("model", "sent"), OUTLINES.values(), ids=OUTLINES)
def test_a_model_is_sent_block_by_block(model: nn.Module, sent: str) -> None:
    assert ", ".join(map(" ".join, outline(plan_model([model])))) == sent


def test_components_are_in_order_of_registration_and_aligned_with_parameters() -> None:
    model = GPT()

    plan = plan_model([model])

    named = dict(model.named_parameters())
    assert plan.names[3] == tuple(name for name in named if name.startswith("blocks.1."))
    for block, parameters, names in zip(
        plan.layout.blocks, plan.parameters, plan.names, strict=True
    ):
        assert [part.shape for part in block.components] == [tuple(p.shape) for p in parameters]
        assert all(named[n] is p for n, p in zip(names, parameters, strict=True))
    assert sorted(name for names in plan.names for name in names) == sorted(named)


def test_c_embed_001_a_tied_embedding_is_one_block_with_the_embedding_last() -> None:
    plan = plan_model([GPT(tied=True)])

    assert outline(plan)[0] == ("FINAL_NORM", "ln_f")
    assert outline(plan)[-2:] == [("EMBEDDING", "wte"), ("EMBEDDING", "pos_emb")]
    assert plan.names[-2] == ("wte.weight",)


def test_a_cnn_has_no_transformer_blocks_and_no_buffers() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Linear(4, 10)
    )

    plan = plan_model([model])

    assert outline(plan) == [("OTHER", "0.weight..4.bias")]
    assert "1.running_mean" not in plan.names[0]


def test_what_no_structure_cuts_is_cut_by_size_into_whole_parameters() -> None:
    model = nn.ParameterList(
        [
            torch.zeros(size)
            for size in (5, OTHER_BLOCK_ELEMENTS - 5, 1, OTHER_BLOCK_ELEMENTS + 1, 2)
        ]
    )

    plan = plan_model([model])

    assert plan.names == (("4",), ("3",), ("2",), ("0", "1"))


def test_frozen_and_empty_parameters_are_left_out() -> None:
    model = GPT()
    model.wte.weight.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.none = nn.Parameter(torch.zeros(0, 4))

    plan = plan_model([model])

    assert "blocks.1" not in [block.name for block in plan.layout.blocks]
    assert {"wte.weight", "none"}.isdisjoint(name for names in plan.names for name in names)


def test_several_models_have_numbered_names_and_share_a_tied_parameter() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight

    plan = plan_model([first, second])

    assert plan.names == (("1.bias",), ("0.weight", "0.bias"))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, DType.FLOAT64),
        (torch.bfloat16, DType.BFLOAT16),
        (torch.float16, DType.FLOAT16),
    ],
)
def test_a_scalar_of_any_float_type_is_a_component(dtype: torch.dtype, expected: DType) -> None:
    model = nn.ParameterList([torch.zeros((), dtype=dtype)])

    component = plan_model([model]).layout.blocks[0].components[0]

    assert component.shape == ()
    assert component.dtype is expected


def test_a_complex_parameter_is_refused_by_name() -> None:
    model = nn.ParameterDict({"phase": torch.zeros(2, dtype=torch.complex64)})

    with pytest.raises(ValueError, match=r"phase is torch\.complex64.*view_as_real"):
        plan_model([model])


def test_a_lazy_parameter_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="weight has no shape yet"):
        plan_model([nn.LazyLinear(3)])


@pytest.mark.parametrize("modules", [[], [nn.ReLU()], [nn.Linear(2, 2).requires_grad_(False)]])
def test_a_model_without_trained_parameters_is_refused(modules: list[nn.Module]) -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        plan_model(modules)


def test_a_model_that_is_one_embedding_has_a_named_block() -> None:
    plan = plan_model([nn.Embedding(3, 2)])

    assert plan.layout.blocks[0].kind is BlockKind.EMBEDDING
    assert plan.layout.blocks[0].name == "Embedding"


def test_two_processes_plan_the_same_layout() -> None:
    assert plan_model([GPT()]).layout.digest == plan_model([GPT()]).layout.digest


def test_float64_is_said_to_travel_as_float32_and_other_types_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = nn.ModuleDict({"f16": nn.Linear(2, 1).half(), "f32": nn.Linear(2, 1)})
    warn_of_rounding(plan_model([net]).layout)
    assert caplog.messages == []

    net["f64"] = nn.Linear(2, 1).double()
    warn_of_rounding(plan_model([net]).layout)

    assert len(caplog.messages) == 1
    assert "2 parameters are float64, f64." in caplog.messages[0]
