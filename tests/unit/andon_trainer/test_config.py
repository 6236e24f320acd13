"""A worker's settings, from arguments and environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.host.manifest import CheckpointFacts, Manifest, checkpoint_folder
from andon.protocol.records import Cursor, Key
from andon.protocol.run_settings import RunPlan
from andon_trainer.config import LineConfig

TOKEN = "a-token-of-24-characters"


@pytest.mark.parametrize(
    ("environment", "heard"),
    [
        ({"ANDON_ADDRESS": "127.0.0.1:7070"}, ""),
        ({"ANDON_ADDRESS": "localhost:7070"}, ""),
        ({"ANDON_ADDRESS": "[::1]:7070"}, ""),
        ({"ANDON_ADDRESS": "alpha:7070"}, "the line at alpha:7070 is on another host"),
        ({"ANDON_ADDRESS": "alpha:7070", "ANDON_INSECURE": "1"}, ""),
        ({"ANDON_ADDRESS": "alpha:7070", "ANDON_INSECURE": "0"}, "the line at alpha:7070"),
        ({"ANDON_ADDRESS": "alpha:7070", "ANDON_TLS_DIR": "certs"}, ""),
        ({"ANDON_ADDRESS": "127.0.0.1:7070", "ANDON_RING_BIND": "0.0.0.0"}, "is open to others"),
        ({"ANDON_ADDRESS": "127.0.0.1:7070", "ANDON_RING_BIND": "127.0.0.1:9000"}, ""),
        ({"ANDON_ADDRESS": "127.0.0.1:7070", "ANDON_RING_BIND": "off"}, ""),
        ({}, ""),
    ],
)
def test_what_others_could_hear_is_known_before_anything_is_sent(
    environment: dict[str, str], heard: str
) -> None:
    found = LineConfig.read(environment).heard_by_others

    assert heard in found
    assert bool(found) is bool(heard)


def test_a_token_comes_from_a_file_or_a_text_and_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "token").chmod(0o600)

    file = LineConfig.read({"ANDON_TOKEN_FILE": str(tmp_path / "token")})
    text = LineConfig.read({"ANDON_TOKEN": TOKEN})

    assert file.token == text.token == TOKEN.encode()
    assert TOKEN not in repr(file)


def test_a_short_token_and_an_unclear_consent_are_refused() -> None:
    with pytest.raises(ValueError, match="ANDON_TOKEN holds 5 bytes, and must hold 16 or more"):
        LineConfig.read({"ANDON_TOKEN": "short"})
    with pytest.raises(ValueError, match="ANDON_INSECURE must be 1 or 0, not 'perhaps'"):
        LineConfig.read({"ANDON_INSECURE": "perhaps"})


def test_arguments_beat_the_environment_and_a_bad_number_is_named() -> None:
    found = LineConfig.read({"ANDON_ADDRESS": "a:1", "RANK": "2"}, address="b:2")

    assert (found.address, found.launch_slot, found.solo) == ("b:2", 2, False)
    with pytest.raises(ValueError, match="RANK must be a whole number"):
        LineConfig.read({"RANK": "two"})
    with pytest.raises(ValueError, match="on_halt"):
        LineConfig.read({"ANDON_ON_HALT": "ignore"})


def test_a_launch_is_found_unless_there_is_an_address_and_gives_the_run_a_folder() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "alpha", "MASTER_PORT": "29500"}

    under = LineConfig.read({**env, "ANDON_CHECKPOINT_EVERY": "5", "ANDON_RESUME": "latest"})
    addressed = LineConfig.read({**env, "ANDON_ADDRESS": "a:1"})

    assert under.launch is not None
    assert (under.launch.rank, under.solo, under.checkpoint_every) == (1, False, 5)
    assert addressed.launch is None


def test_the_place_that_mpirun_gives_counts_unless_the_script_says_another() -> None:
    env = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "ANDON_ADDRESS": "a:1",
    }

    found, told = LineConfig.read(env), LineConfig.read(env, launch_slot=7)

    assert (found.launch_slot, found.launch_size, found.local_rank) == (3, 4, 1)
    assert told.launch_slot == 7


def checkpoint(run_dir: Path, step: int, head: Key, content: bytes = b"{}") -> None:
    """A checkpoint whose one file has this content; it is whole with the default."""
    folder = checkpoint_folder(run_dir, step)
    folder.mkdir(parents=True)
    facts = CheckpointFacts(
        head=head,
        step=step,
        cursor=Cursor(0, step),
        digest="",
        plan=RunPlan(global_batch=1, seed=0),
    )
    manifest = Manifest.of(facts, {"model.json": b"{}"})
    (folder / "model.json").write_bytes(content)
    (folder / "state.json").write_bytes(manifest.to_bytes())


def test_the_latest_checkpoint_is_that_of_the_newest_record_not_of_the_greatest_step(
    tmp_path: Path,
) -> None:
    checkpoint(tmp_path, 4, Key(1, 5))
    checkpoint(tmp_path, 8, Key(1, 9))  # The run was resumed at step 4 then.
    checkpoint(tmp_path, 6, Key(2, 3))

    found = LineConfig.read({"ANDON_RESUME": "latest"}, run_dir=str(tmp_path))

    assert found.resume == checkpoint_folder(tmp_path, 6)


def test_the_latest_checkpoint_is_the_newest_whole_one_or_none(tmp_path: Path) -> None:
    run_dir = str(tmp_path)
    for step in (4, 8, 12):
        checkpoint(tmp_path, step, Key(1, step), b"{}" if step < 12 else b"[]")

    found = LineConfig.read({}, resume="latest", run_dir=run_dir)
    chosen = LineConfig.read({"ANDON_RESUME": "chosen", "ANDON_RUN_DIR": run_dir}, resume="latest")
    none = LineConfig.read({"ANDON_RESUME": "latest"}, run_dir=str(tmp_path / "empty"))

    assert found.resume == checkpoint_folder(tmp_path, 8)  # that of step 12 was changed
    assert chosen.resume == Path("chosen")  # `andon run --resume` knows the line's history
    assert none.resume is None


def test_the_latest_checkpoint_of_no_folder_is_refused() -> None:
    with pytest.raises(ValueError, match=r'resume="latest" looks for checkpoints.*pass run_dir'):
        LineConfig.read({}, resume="latest")
