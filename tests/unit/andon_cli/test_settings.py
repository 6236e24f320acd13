"""Settings: where a value comes from, what is said of a mistake, and which words are ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from andon.host.access import Access
from andon.host.errors import UsageError
from andon.host.settings import Count, Verb
from andon.protocol.run_settings import Topology
from andon_cli.app import read_config
from andon_cli.config import RunSettings
from andon_cli.help import help_text, settings_page
from andon_cli.settings import as_flags, as_table, read_schema, split_words
from andon_cli.verbs import VERBS
from andon_coordinator.config import LineOptions
from andon_server.serve import coordinator_config
from andon_server.settings import ServeConfig


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def serve(*tokens: str, **environment: str) -> ServeConfig:
    return read_schema(ServeConfig, tokens, environment, "serve").settings


def refusal(*tokens: str, **environment: str) -> str:
    with pytest.raises(UsageError) as refused:
        serve(*tokens, **environment)
    return str(refused.value)


# A new setting is one field in one place


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUpOptions(LineOptions):
    """Options of a line, and one that nobody has heard of."""

    tea_breaks: Count = 2
    """Stop N times a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUpService(ServeConfig):
    """A service of such a line."""

    line: MadeUpOptions = field(default_factory=MadeUpOptions)
    """How the line works."""


MADE_UP = Verb(
    summary="serve tea", epilog="", run="", schema=f"{__name__}:MadeUpService", shown=("Common",)
)


def made_up(*tokens: str, **environment: str) -> MadeUpService:
    return read_schema(MadeUpService, tokens, environment, "serve").settings


def test_a_new_setting_is_in_the_help_and_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("andon_cli.help.imported", lambda _: MadeUpService)

    assert "--tea-breaks" not in help_text("serve", MADE_UP, everything=False)
    assert "--tea-breaks N              Stop N times a day. Default: 2." in help_text(
        "serve", MADE_UP, everything=True, width=100
    )
    assert (
        "| `--tea-breaks N` | `ANDON_TEA_BREAKS` | `serve` | Stop N times a day. Default: 2. |"
        in settings_page({"serve": MADE_UP})
    )


def test_help_names_the_words_that_a_setting_takes_even_if_it_may_be_left_out() -> None:
    assert "--output all|last|off" in help_text("run", VERBS["run"], everything=False, width=80)


def test_the_reference_has_the_variables_of_a_worker_without_importing_one() -> None:
    source = '''
class LineConfig:
    seed: int = field(default=0, metadata=_from("ANDON_SEED", int))
    """Seeds the order
    of the samples."""
    device: str = ""
    """An argument only."""
'''

    page = settings_page({}, source)

    assert "| `ANDON_SEED` | Seeds the order of the samples. |" in page
    assert "An argument only" not in page


def test_a_new_setting_is_read_from_everywhere_and_checked(folder: Path) -> None:
    assert made_up().line.tea_breaks == 2
    (folder / "andon.toml").write_text("tea-breaks = 3")
    assert made_up().line.tea_breaks == 3
    assert made_up(ANDON_TEA_BREAKS="4").line.tea_breaks == 4
    assert made_up("--tea-breaks", "5", ANDON_TEA_BREAKS="4").line.tea_breaks == 5
    with pytest.raises(UsageError, match="ANDON_TEA_BREAKS must be at least 1, not 0"):
        made_up(ANDON_TEA_BREAKS="0")


def test_a_new_setting_reaches_the_service_and_its_coordinator() -> None:
    started = made_up(*as_flags(made_up("--tea-breaks", "5", "--run-id", "x")))

    line: Any = coordinator_config(started).line
    assert line.tea_breaks == 5


@pytest.mark.parametrize("content", [None, b"# two of them:\nbeta, gamma\n", b"\xff"])
def test_a_service_does_not_start_without_knowing_which_tokens_are_withdrawn(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "withdrawn"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(UsageError, match=f"--withdrawn-file: .*{file}"):
        coordinator_config(serve("--withdrawn-file", str(file)))


def test_a_report_has_what_was_chosen_and_no_token() -> None:
    chosen = serve("--port", "7", "--insecure", ANDON_TOPOLOGY="ring", ANDON_TOKEN="secret")

    assert as_table(chosen) == {"port": "7", "insecure": "true", "topology": "ring"}


# Where a value comes from


def test_a_flag_beats_its_variable_which_beats_the_file_which_beats_the_default(
    folder: Path,
) -> None:
    assert serve().line_port == 7070
    (folder / "andon.toml").write_text("port = 1\nmax_calls = 7\n")
    assert (serve().port, serve().limits.max_calls) == (1, 7)
    assert serve(ANDON_PORT="2").port == 2
    assert serve("--port", "3", ANDON_PORT="2").port == 3


def test_a_commands_own_table_beats_the_top_of_the_file_and_leaves_other_commands_alone(
    folder: Path,
) -> None:
    (folder / "andon.toml").write_text("workers = 2\n[run]\nworkers = 3\n[serve]\nworkers = 4\n")

    assert serve().workers == 4
    assert read_schema(RunSettings, [], {}, "run").settings.workers == 3


def test_another_file_may_be_named(folder: Path) -> None:
    (folder / "other.toml").write_text("port = 1")

    assert serve("--config", "other.toml").port == 1
    assert serve(ANDON_CONFIG="other.toml").port == 1
    assert "there is no such file" in refusal("--config", "missing.toml")


def test_a_variable_that_is_set_to_nothing_counts_as_unset() -> None:
    assert serve(ANDON_PORT="", ANDON_INSECURE=" ").line_port == 7070


@pytest.mark.parametrize(
    ("text", "insecure"),
    [("1", True), ("yes", True), ("on", True), ("TRUE", True), ("0", False), ("off", False)],
)
def test_a_switch_is_on_or_off(text: str, insecure: bool) -> None:
    assert serve(ANDON_INSECURE=text).access.insecure is insecure


def test_a_flag_of_two_names_has_two_variables() -> None:
    values = [
        serve("--steps", "3"), serve("--max-steps", "3"), serve(ANDON_STEPS="3"),
        serve(ANDON_MAX_STEPS="3"),
    ]  # fmt: skip

    assert [value.line.max_steps for value in values] == [3, 3, 3, 3]


def test_a_token_comes_from_its_variable_alone(folder: Path) -> None:
    assert serve(ANDON_TOKEN="secret").access == Access(token="secret")
    assert (
        refusal("--token", "secret") == "ANDON_TOKEN is a variable only: others could read a flag"
    )
    (folder / "andon.toml").write_text("token = 'secret'")
    assert "token in andon.toml is not a setting" in refusal()


def test_what_is_meant_for_one_command_comes_from_no_file(folder: Path) -> None:
    (folder / "andon.toml").write_text("[resume]\nskip = true\n")

    with pytest.raises(UsageError, match=r"^skip in andon.toml is not a setting, or only a flag"):
        read_config(["resume"], {})


# In which words a mistake is told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port = 70000", "port in andon.toml must be from 0 to 65535, not 70000"),
        ("port = 'x'", "port in andon.toml must be a whole number, not 'x'"),
        ("port = [1]", "port in andon.toml must be one value, not [1]"),
        ("prot = 1", "prot in andon.toml is not a setting"),
        ("[serve]\nsteps = 1\ndrop = 2", "drop in andon.toml is not a setting"),
        ("[sevre]\nport = 1", "[sevre] in andon.toml is no command"),
        ("port = ", "andon.toml can't be read"),
        ("serve = 1", "serve in andon.toml is not a setting"),
    ],
)
def test_a_mistake_in_the_file_is_told_by_its_key(folder: Path, text: str, said: str) -> None:
    (folder / "andon.toml").write_text(text)

    assert said in refusal()


def test_a_setting_of_another_command_is_no_mistake_in_the_file(folder: Path) -> None:
    (folder / "andon.toml").write_text("checkpoint-every = 10")

    assert serve() == ServeConfig()


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("--wrokers=2", "there is no flag --wrokers. Did you mean --workers?"),
        ("--workers", "--workers needs a value"),
        ("train.py", "train.py is no flag and belongs to none: see --help"),
        ("--topology=tree", "--topology must be star or ring, not 'tree'"),
        ("--insecure=maybe", "--insecure must be 1 or 0, not 'maybe'"),
    ],
)
def test_a_mistake_on_the_command_line_is_told_by_its_flag(token: str, said: str) -> None:
    assert refusal(token) == said


def test_of_a_flag_that_is_given_twice_the_last_counts() -> None:
    given = serve("--port", "1", "--topology", "ring", "--port=2", "--topology", "star")

    assert (given.port, given.line.topology) == (2, Topology.STAR)


# What is ours of a command line


@pytest.mark.parametrize(
    ("line", "flags", "words"),
    [
        ("--workers 2 train.py --workers 7 -m", "--workers 2", "train.py --workers 7 -m"),
        ("-m pkg.train --help", "-m", "pkg.train --help"),
        ("--insecure train.py", "--insecure", "train.py"),
        ("--workers=2 train.py", "--workers=2", "train.py"),
        ("--workers 2 -- --odd.py", "--workers 2", "--odd.py"),
        ("--help", "--help", ""),
    ],
)
def test_a_script_and_what_follows_it_are_not_ours(line: str, flags: str, words: str) -> None:
    assert split_words(RunSettings, line.split()) == (flags.split(), words.split())
