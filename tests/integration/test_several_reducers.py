"""PyTorch workers with several reducer processes that share the model."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from chaos.reducers import SECRET, Reducer
from integration.harness import Service, fetch, finish, on_line, start_worker, start_workers

pytestmark = pytest.mark.integration


def run(folder: Path, reducers: int, *flags: str, **spec: Any) -> list[dict[str, Any]]:
    """Runs two workers and `reducers` reducer processes; returns what each worker saw."""
    folder.mkdir()
    (folder / "secret").write_text(SECRET)
    more = ("--reducers", str(reducers + 1), "--secret-file", str(folder / "secret"), *flags)
    with Service(folder / "run", 2, *more) as service, ExitStack() as stack:
        for _ in range(reducers):
            other = Reducer(service.address, folder)
            stack.callback(other.close)
            other.start()
        workers = stack.enter_context(start_workers(folder, service, spec, 2, script="gan.py"))
        return finish(workers)


def test_c_ddp_001_models_that_several_reducers_average_in_16_bits_train_to_the_bits_of_one(
    tmp_path: Path,
) -> None:
    flags = ("--encoding", "bfloat16", "--digest-every", "1")

    one = run(tmp_path / "one", 0, *flags, steps=6)
    three = run(tmp_path / "three", 2, *flags, steps=6)

    assert three[0]["step"] == 6
    assert three[0]["digests"] == three[1]["digests"] == one[0]["digests"]


def test_a_worker_sends_nothing_in_the_clear_to_a_reducer_on_another_host(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    flags = ("--reducers", "2", "--secret-file", str(tmp_path / "secret"))
    with Service(tmp_path / "run", 1, *flags) as service:
        elsewhere = Reducer(service.address, tmp_path, ("--advertise", "andon.invalid:7071"))
        elsewhere.start()
        try:
            spec, where = {"steps": 2}, on_line(service, 0, 1)
            refused = start_worker(tmp_path, spec, slot=0, script="gan.py", **where)
            code = refused.wait()
            scraped = json.loads(fetch(service.metrics_url.replace("/metrics", "/sd")))
        finally:
            elsewhere.close()

    assert code == 4, refused.output
    assert "the reducer at andon.invalid:7071 is on another host" in refused.output
    assert "ANDON_INSECURE=1" in refused.output
    [reducer] = [each for each in scraped if "reducer" in each["labels"]]
    assert reducer["labels"] == {"run": service.run_id, "reducer": "andon.invalid:7071"}
    assert reducer["targets"] == [f"andon.invalid:{elsewhere.metrics_port}"]
