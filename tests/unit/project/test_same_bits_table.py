"""The guide's table of what keeps bits: each row has tests, or says that nothing is kept.

And its drawing is of the tree that the protocol has.
"""

from __future__ import annotations

import re

import pytest
from tree_drawing import drawing

from unit.project.documents import ROOT, Document

GUIDE = Document(ROOT / "docs/guide/same-bits.md")
_SECTION = re.compile(r"^## What keeps bits.*?(?=^## )", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| (?P<what>.+?) \| (?P<with>.+?) \|$", re.MULTILINE)

LINES = "integration/test_same_bits.py::"
STORM = (
    "chaos/test_same_bits_storm.py::"
    "test_whatever_dies_joins_or_freezes_every_step_has_the_bits_of_a_script_alone"
)
ANY_NUMBER = f"{LINES}test_any_number_of_workers_trains_the_same_bits"
HOWEVER = f"{LINES}test_however_samples_come_the_bits_are_the_same"
TRAINER = "unit/andon_trainer/"
ALONE = f"{TRAINER}test_same_bits.py::"

TESTS: dict[str, tuple[str, ...]] = {
    "workers that are lost": (
        STORM,
        ANY_NUMBER,
        f"{LINES}test_a_host_whose_only_other_worker_is_killed_changes_no_bit",
    ),
    "equal shares": (STORM, ANY_NUMBER),
    "a checkpoint": (STORM, f"{LINES}test_a_run_goes_on_from_a_checkpoint_with_fewer_workers"),
    "gRPC": (
        STORM,
        "integration/andon_trainer/test_nodes.py::test_the_mean_has_the_bits_of_the_fold",
        "unit/andon_reducer/test_rounds.py::"
        "test_nodes_give_the_tree_of_all_grains_for_any_shares_order_and_streams",
    ),
    "dropout": (STORM, ANY_NUMBER),
    "BatchNorm": (
        STORM,
        f"{TRAINER}test_grain_buffers.py::"
        "test_the_commit_sets_the_mean_of_the_values_that_grains_made",
    ),
    "any other buffer": (
        f"{TRAINER}test_grain_buffers.py::test_a_buffer_that_forward_changes_is_refused_by_name",
    ),
    "weights of a loss": (ANY_NUMBER, f"{ALONE}test_a_grain_of_no_weight_is_absent"),
    "a GradScaler": (STORM, ANY_NUMBER, HOWEVER),
    "samplers": (
        STORM,
        HOWEVER,
        f"{ALONE}test_a_batch_larger_than_those_of_the_first_epoch_is_refused",
    ),
    "frozen parts": (
        ANY_NUMBER,
        HOWEVER,
        f"{TRAINER}test_node_sums.py::test_a_scaled_leaf_is_rounded_without_its_scale_first",
    ),
    "`line.loss`": (STORM, ANY_NUMBER),
    "evaluation": (
        STORM,
        f"{LINES}test_others_compute_the_batches_of_a_worker_that_dies_evaluating",
    ),
    "`line.mean`": (
        f"{ALONE}test_a_mean_by_workers_is_refused_with_the_remedy",
        f"{ALONE}test_rows_of_other_grains_are_refused_in_a_loop_body",
    ),
    "`Trainer`": (f"{LINES}test_a_trainer_gives_the_same_bits_alone_and_on_a_line",),
    "`model = torch.compile": (
        f"{ALONE}test_each_size_of_a_compiled_model_has_a_graph_of_its_own",
    ),
    "`torch.compile` with": (f"{ALONE}test_a_model_whose_kernels_may_differ_is_refused",),
    "a model that is compiled after": (
        f"{ALONE}test_each_size_of_a_compiled_model_has_a_graph_of_its_own",
    ),
    "[hosts whose processes": (
        f"{LINES}test_a_host_of_two_processes_beside_a_worker_trains_the_same_bits",
        f"{LINES}test_a_host_whose_only_other_worker_is_killed_changes_no_bit",
        f"{TRAINER}test_host_grains.py::"
        "test_a_host_sends_the_sums_of_one_process_and_ends_with_its_statistics",
    ),
    "SyncBatchNorm": (
        f"{ALONE}test_what_is_no_grain_is_refused_by_name",
        f"{ALONE}test_manual_steps_are_refused",
    ),
    "a ring": (
        "unit/andon_coordinator/test_config.py::"
        "test_what_makes_bits_depend_on_workers_is_refused_beside_same_bits",
    ),
    "an answer in bfloat16": (
        f"{LINES}test_averages_that_are_rounded_are_the_same_bits_on_every_line",
    ),
    "an operation without": (
        f"{TRAINER}test_arithmetic.py::test_switches_are_set_for_as_long_as_the_line_is_open",
    ),
    "another number of threads": (
        f"{LINES}test_a_worker_with_another_number_of_threads_is_refused_or_told",
        f"{TRAINER}test_arithmetic.py::"
        "test_a_checkpoint_of_another_arithmetic_is_refused_unless_that_is_meant",
    ),
}
"""By how a row begins: what shows it."""


def rows() -> dict[str, str]:
    (section,) = _SECTION.findall(GUIDE.text)
    return {found["what"]: found["with"] for found in _ROW.finditer(section)}


def test_each_row_has_tests_or_says_that_nothing_is_kept() -> None:
    kept = [what for what, outcome in rows().items() if not outcome.startswith("**not kept")]

    for begin in TESTS:
        assert sum(what.startswith(begin) for what in kept) == 1, begin
    without = [what for what in kept if not what.startswith(tuple(TESTS))]
    assert without == []


@pytest.mark.parametrize("name", sorted({each for tests in TESTS.values() for each in tests}))
def test_what_shows_a_row_exists(name: str) -> None:
    file, _, function = name.partition("::")

    assert f"\ndef {function}(" in (ROOT / "tests" / file).read_text("utf-8")


def test_the_drawing_shows_the_protocols_tree() -> None:
    drawn = (ROOT / "docs/assets/grains.svg").read_text("utf-8")

    assert drawn == drawing(), "python docs/tree_drawing.py docs/assets/grains.svg"
