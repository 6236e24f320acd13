"""What the library's logs are in a script's process."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from andon_trainer.process.logs import write_logs


@contextmanager
def bare_logging() -> Iterator[None]:
    """Logging as a script finds it: nobody has set it up, pytest neither."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


@bare_logging()
def test_as_json_the_scripts_own_records_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    end = write_logs("json", lambda: {"run": "7f3a", "worker": 1, "step": 3}, marked=True)

    logging.getLogger("andon_trainer.x").info("of the library")
    logging.getLogger("script").warning("of the script")
    end()

    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(each["message"], each["run"], each["worker"], each["step"]) for each in lines] == [
        ("of the library", "7f3a", 1, 3),
        ("of the script", "7f3a", 1, 3),
    ]


@bare_logging()
def test_a_script_that_has_set_up_logging_keeps_its_own_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = logging.StreamHandler()
    own.setFormatter(logging.Formatter("own: %(message)s"))
    logging.getLogger().addHandler(own)
    end = write_logs("json", dict, marked=True)

    logging.getLogger("andon_trainer.x").warning("of the library")
    logging.getLogger("script").warning("of the script")
    end()

    first, second = capsys.readouterr().err.splitlines()
    assert json.loads(first)["message"] == "of the library"
    assert second == "own: of the script"


@bare_logging()
def test_under_a_launcher_a_warning_as_text_says_that_it_is_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    end = write_logs("text", dict, marked=True)

    logging.getLogger("andon_trainer.x").warning("slow")
    logging.getLogger("andon_trainer.x").info("not shown")
    logging.getLogger("andon_trainer.x").error("stopped")
    end()

    assert capsys.readouterr().err == "WARNING: slow\nstopped\n"


@pytest.mark.parametrize("marked", [True, False])
@bare_logging()
def test_text_is_as_python_prints_it_once_a_script_sets_up_logging_or_runs_by_itself(
    capsys: pytest.CaptureFixture[str], marked: bool
) -> None:
    end = write_logs("text", dict, marked=marked)
    if marked:
        logging.getLogger().addHandler(logging.StreamHandler())

    logging.getLogger("andon_trainer.x").warning("slow")
    end()

    assert capsys.readouterr().err == "slow\n"


@pytest.mark.parametrize("form", ["text", "json"])
@bare_logging()
def test_the_end_leaves_nothing_behind(form: str) -> None:
    loggers = [logging.getLogger(name) for name in ("", "andon", "andon_trainer")]
    before = [(each.level, each.propagate, list(each.handlers)) for each in loggers]

    write_logs(form, dict, marked=True)()  # type: ignore[arg-type]  # one of the two

    assert [(each.level, each.propagate, each.handlers) for each in loggers] == before
