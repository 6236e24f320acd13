"""Where ranks find their coordinator."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import torch

from andon_torch.places import Meeting, configuration, located
from andon_trainer.errors import JoinRefused

HashStore: Any = torch.distributed.HashStore  # type: ignore[attr-defined]  # by a star


def meeting(store: Any, rank: int, *, whole: bool = True) -> Meeting:
    return Meeting(
        store=store,
        rank=rank,
        ranks=(0, 1),
        whole=whole,
        timeout=timedelta(seconds=5),
        prefix="andon/0",
    )


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "ANDON_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_an_address_is_taken_as_it_is() -> None:
    config = configuration({"ANDON_ADDRESS": "alpha:5000", "ANDON_RUN_ID": "r"})

    with located(config, meeting(HashStore(), 1)) as place:
        assert (place.address, place.run_id) == ("alpha:5000", "r")


def test_what_a_launcher_says_of_the_place_is_not_asked() -> None:
    config = configuration({"RANK": "3", "WORLD_SIZE": "8", "ANDON_INSECURE": "1"})

    assert (config.launch_slot, config.launch_size, config.insecure) == (None, 1, True)


def test_several_hosts_without_encryption_are_refused() -> None:
    store = HashStore()
    store.set("andon/0/hosts", json.dumps([False, "alpha"]))

    with (
        pytest.raises(JoinRefused, match=r"several hosts.*ANDON_TLS_DIR.*ANDON_INSECURE"),
        located(configuration({}), meeting(store, 1)),
    ):
        pass


def test_the_others_get_the_answer_to_their_ticket() -> None:
    store = HashStore()
    store.set("andon/0/hosts", json.dumps([True, "alpha"]))
    served = {"port": 7, "run_id": "ab12", "run_dir": "/runs/ab12"}
    # Of a rank 0 that lives: an earlier one answered tickets before it.
    store.add("andon/0/tickets", 1)
    store.set("andon/0/answer/1", json.dumps({"served": json.dumps({**served, "port": 6})}))
    store.set("andon/0/answer/2", json.dumps({"served": json.dumps(served)}))

    with located(configuration({}), meeting(store, 1)) as place:
        assert (place.address, place.run_id) == ("127.0.0.1:7", "ab12")
