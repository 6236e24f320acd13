"""Help: what `--help` prints, and the reference page that is made of the same schemas.

`python -m andon_cli.help PAGE WORKER` writes the page, where WORKER is the source file with the
worker's configuration; with `--check` it says whether the page is up to date.
"""

from __future__ import annotations

import ast
import enum
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from cyclopts import Argument, Group

from andon.host.settings import Verb
from andon_cli.settings import app_of, settings_of, variables_of
from andon_cli.verbs import OVERVIEW, VERBS, imported

__all__ = ["Row", "help_text", "overview_text", "rows_of", "settings_page", "write_page"]

_RULE = (
    "A flag is also a variable and a key of a settings file: --metrics-port, ANDON_METRICS_PORT, "
    "and metrics-port in andon.toml. A flag overrides the variable, which overrides "
    "the file, which overrides the default."
)
_PLAIN = Group("Flags", sort_key=0)
"""Of commands with few flags."""
_WIDEST = 100
_COLUMN = 30
"""Where the help of a flag begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting, as the help and the reference show it."""

    flags: str
    """Its flags with what they take, such as `--port PORT`; empty: it has none."""
    variables: tuple[str, ...]
    """Its variables; none if it is meant for one command."""
    key: str
    """Its key in a settings file; empty: it has none."""
    text: str
    """What it does, with its default."""
    group: Group


def rows_of(schema: type) -> list[Row]:
    """All settings of a schema, those of its own before those that it has in common with others."""
    arguments = settings_of(app_of(schema).assemble_argument_collection(parse_docstring=True))
    order = [vars(each).get("__annotations__", {}) for each in schema.__mro__]

    def depth(argument: Argument) -> int:
        return next(at for at, names in enumerate(order) if argument.keys[0] in names)

    rows = [_row(argument) for argument in sorted(arguments, key=depth)]
    return sorted(rows, key=lambda row: row.group.sort_key or 0)


def help_text(name: str, verb: Verb, *, everything: bool, width: int = 0) -> str:
    """What `andon NAME --help` prints, or `--help-all`."""
    width = width or min(_WIDEST, shutil.get_terminal_size().columns)
    rows = [row for row in rows_of(imported(verb.schema)) if row.flags]
    shown = [row for row in rows if everything or not verb.shown or row.group.name in verb.shown]
    parts = [f"usage: andon {name} [flags] {verb.words}".rstrip(), _sentence(verb.summary)]
    for title in dict.fromkeys(row.group.name for row in shown):
        members = [row for row in shown if row.group.name == title]
        parts.append("\n".join([f"{title}:", *(_lines(row, width) for row in members)]))
    more = len(rows) - len(shown)
    helps = ["Help:", f"  {'-h, --help':<{_COLUMN - 2}}Show this."]
    if verb.shown:
        helps.append(
            f"  {'--help-all':<{_COLUMN - 2}}Show all flags{f': {more} more' * (more > 0)}."
        )
    parts.append("\n".join(helps))
    return "\n\n".join([*parts, textwrap.fill(_RULE, width), verb.epilog])


def overview_text() -> str:
    """What `andon --help` prints. Commands of other packages are there, too."""
    others = {
        each.name: f"see andon {each.name} --help" for each in entry_points(group="andon.commands")
    }
    summaries = {name: verb.summary for name, verb in VERBS.items()} | others
    lines = [f"  {name:<14}{summary}" for name, summary in summaries.items()]
    about = (
        "Exchanges gradients between PyTorch workers, and stops the line the moment a value is\n"
        "wrong."
    )
    return "\n".join(
        ["usage: andon COMMAND [flags]", "", about, "", "commands:", *lines, "", OVERVIEW]
    )


def settings_page(verbs: Mapping[str, Verb], worker: str = "") -> str:
    """The reference of all settings, in Markdown: each once, with the commands that have it.

    `worker` is the source of the worker's configuration. It is parsed and not imported, since the
    command line knows no worker.
    """
    having: dict[Row, list[str]] = {}
    for name, verb in verbs.items():
        for row in rows_of(imported(verb.schema)):
            having.setdefault(row, []).append(name)
    parts = ["# Settings", _GENERATED, _RULE_IN_MARKDOWN]
    for title in dict.fromkeys(row.group.name for row in having):
        members = [row for row in having if (row.group.name) == title]
        lines = [
            f"## {title}",
            "",
            "| setting | variable | of | what it does |",
            "|---|---|---|---|",
        ]
        for row in members:
            variables = ", ".join(f"`{each}`" for each in row.variables)
            where = ", ".join(f"`{each}`" for each in having[row])
            where = "every command" if len(having[row]) == len(verbs) > 1 else where
            flags = f"`{_escaped(row.flags)}`" if row.flags else ""
            lines.append(f"| {flags} | {variables} | {where} | {_escaped(row.text)} |")
        parts.append("\n".join(lines))
    if found := _variables_of_worker(worker):
        lines = [
            "## Variables of a worker",
            "",
            _WORKER,
            "",
            "| variable | what it does |",
            "|---|---|",
        ]
        lines += [f"| `{variable}` | {_escaped(text)} |" for variable, text in found]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def write_page(path: Path, worker: Path, *, check: bool) -> bool:
    """Writes the page if it is stale, unless `check`. Returns whether it was stale."""
    text = settings_page(VERBS, worker.read_text("utf-8"))
    stale = not path.exists() or path.read_text("utf-8") != text
    if stale and not check:
        path.write_text(text, "utf-8")
    return stale


_GENERATED = "<!-- `make settings` writes this page from the schemas of the commands. -->"
_WORKER = (
    "A training script reads these when it makes its `Line`. An argument of `Line` overrides the "
    "variable.\n`andon run` sets most of them for its workers."
)
_RULE_IN_MARKDOWN = """\
Every setting of a command is a flag, a variable and a key of a settings file.
`--metrics-port` is `ANDON_METRICS_PORT`, and `metrics-port = 9400` in the file.
A flag overrides the variable, which overrides the file, which overrides the default.
A variable that is set to nothing counts as unset.

The file is `andon.toml` in the current folder, or what `--config FILE` names.
Keys at its top level apply to every command.
A table such as `[run]` or `[serve]` applies to that command only.
A setting without a variable is meant for one command: it is a flag only."""


def _row(argument: Argument) -> Row:
    secret, flag_only = argument.parameter.show is False, not argument.parameter.show_env_var
    names = ", ".join(reversed(argument.names))
    metavar = _metavar(argument)
    return Row(
        flags="" if secret else f"{names} {metavar}".rstrip(),
        variables=() if flag_only else variables_of(argument),
        key="" if secret or flag_only else argument.name.lstrip("-"),
        text=_text(argument),
        group=_group(argument),
    )


def _variables_of_worker(source: str) -> list[tuple[str, str]]:
    """The variables that the fields of a worker's configuration name, with their docstrings."""
    found = []
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for field, text in (pair for each in classes for pair in pairwise(each.body)):
        if not (isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)):
            continue
        constants = [each.value for each in ast.walk(field) if isinstance(each, ast.Constant)]
        names = [str(each) for each in constants if str(each).startswith("ANDON_")]
        if names and isinstance(text.value, ast.Constant):
            found.append((names[0], " ".join(str(text.value.value).split())))
    return found


def _group(argument: Argument) -> Group:
    groups: Any = argument.parameter.group
    named = [each for each in groups or () if isinstance(each, Group) and each.sort_key]
    return named[0] if named else _PLAIN


def _metavar(argument: Argument) -> str:
    if argument.is_flag():
        return ""
    choices = _choices(argument.hint)
    return "|".join(choices) if choices else argument.parameter.metavar or "TEXT"


def _choices(hint: Any) -> Sequence[str]:
    """The words that a setting takes; none if it takes others."""
    if get_origin(hint) in (Union, UnionType):  # one of them, or None: the default is said in words
        hints = [each for each in get_args(hint) if each is not type(None)]
        return _choices(hints[0]) if len(hints) == 1 else ()
    if get_origin(hint) is Literal:
        return [str(each) for each in get_args(hint)]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [name.lower() for name in hint.__members__]
    return ()


def _text(argument: Argument) -> str:
    text = " ".join((argument.parameter.help or "").split())
    default = argument.field_info.default
    if isinstance(default, enum.Enum):
        default = default.name.lower()
    if default in (None, "", False, ()) or default is argument.field_info.empty:
        return text
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"{text} Default: {shown}."


def _lines(row: Row, width: int) -> str:
    """A setting in the help: its flags, and beside or below them what it does."""
    wrapped = textwrap.wrap(row.text, max(width - _COLUMN, 40))
    flags = f"  {row.flags}"
    if len(flags) + 2 > _COLUMN:
        return "\n".join([flags, *(" " * _COLUMN + line for line in wrapped)])
    first, *rest = wrapped or [""]
    return "\n".join([f"{flags:<{_COLUMN}}{first}", *(" " * _COLUMN + line for line in rest)])


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    page, checks = Path(sys.argv[1]), "--check" in sys.argv
    stale = write_page(page, Path(sys.argv[2]), check=checks)
    if stale:
        print(f"{page} is not what the schemas say: make settings" if checks else f"wrote {page}")
    sys.exit(checks and stale)
