"""Settings: reads a schema from flags, the environment and andon.toml.

Theory of operation. Cyclopts parses the flags, converts and checks the values, and builds the
schema; `andon.host.settings` says what a schema is. Three things are ours: where a training
script's own arguments begin, what comes from the environment and from the file, and how mistakes
are reported.

A flag overrides its variable, which overrides the file, which overrides the default.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from cyclopts import App, Argument, ArgumentCollection, CycloptsError, Parameter, Token
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    UnusedCliTokensError,
    ValidationError,
)

from andon.host.errors import UsageError
from andon.host.settings import FieldPath, GivenSettings, flag_of, flag_with, text_of
from andon_cli.verbs import VERBS, imported

__all__ = [
    "FILE",
    "SettingsFile",
    "app_of",
    "arguments_of",
    "as_flags",
    "as_table",
    "read_schema",
    "settings_of",
    "split_words",
    "variables_of",
]

FILE = Path("andon.toml")
"""The settings file that is read if it exists and `--config` names no other."""

_Schema = TypeVar("_Schema")
_ON = frozenset({"1", "true", "yes", "on"})
_OFF = frozenset({"0", "false", "no", "off"})
_KINDS: dict[object, str] = {int: "a whole number", float: "a number", bool: "1 or 0"}


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A settings file, as one command reads it: its own table overrides the top level."""

    path: Path
    shared: Mapping[str, Any]
    """The top level, for every command."""
    own: Mapping[str, Any]
    """The command's table."""

    @classmethod
    def read(cls, path: Path, verb: str, *, required: bool) -> SettingsFile:
        """Reads the file. A missing one is an error only if it is `required`; else nothing is set.

        Raises:
            UsageError: the file can't be read, or is not TOML.
        """
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError as error:
            if required:
                raise UsageError(f"--config {path}: there is no such file") from error
            return cls(path, {}, {})
        except OSError as error:
            raise UsageError(f"{path} can't be read: {error.strerror}") from error
        import tomllib  # Most commands have no file, and `andon health` should start at once.

        try:
            content = tomllib.loads(text)
        except ValueError as error:
            raise UsageError(f"{path} can't be read: {error}") from error
        tables = {name: value for name, value in content.items() if isinstance(value, dict)}
        for name in sorted(tables.keys() - VERBS.keys()):
            raise UsageError(f"[{name}] in {path} is no command of andon: correct its name")
        shared = {name: value for name, value in content.items() if name not in tables}
        return cls(path, _dashed(shared), _dashed(tables.get(verb, {})))

    def text(self, argument: Argument) -> tuple[str, str] | None:
        """The key and the value of a setting, if the file has it.

        Raises:
            UsageError: the value is a list or a table.
        """
        for key in _keys_of(argument):
            value = self.own.get(key, self.shared.get(key))
            if isinstance(value, str | int | float):
                return f"{key} in {self.path}", str(value)
            if value is not None:
                raise UsageError(f"{key} in {self.path} must be one value, not {value!r}")
        return None

    def refuse_unknown(self, settings: Sequence[Argument]) -> None:
        """Refuses top-level keys that no command has, and keys of the table that this one lacks.

        Raises:
            UsageError: there is one. It is misspelt, or may only be a flag.
        """
        if not self.own and not self.shared:
            return
        known = _known(settings)
        unknown = self.own.keys() - known
        if not unknown and not self.shared.keys() <= known:
            # Only now, since this imports the schemas of all commands.
            schemas = [imported(verb.schema) for verb in VERBS.values()]
            known = known.union(*(_known(settings_of(arguments_of(each))) for each in schemas))
            unknown = self.shared.keys() - known
        for key in sorted(unknown):
            raise UsageError(f"{key} in {self.path} is not a setting, or only a flag")


def read_schema(
    schema: type[_Schema], tokens: Sequence[str], environment: Mapping[str, str], verb: str = ""
) -> GivenSettings[_Schema]:
    """Reads a schema from flags, environment, file and defaults.

    Args:
        schema: a dataclass whose fields are settings.
        tokens: the command line behind the verb, without a script's own arguments.
        environment: the variables.
        verb: names the table of the file that belongs to this command alone.

    Raises:
        UsageError: a value can't be read, or two contradict each other.
    """
    sources: dict[FieldPath, str] = {}

    def fill(_app: App, _commands: object, arguments: ArgumentCollection) -> None:
        # Cyclopts calls this after it has parsed the flags and before it converts anything. So
        # values from elsewhere pass the same checks, and mistakes in them name their source.
        settings = settings_of(arguments)
        file = _file(settings, environment, verb)
        file.refuse_unknown(settings)
        for argument in settings:
            if not argument.tokens:
                _fill_in(argument, environment, file)
            elif argument.parameter.show is False:
                raise UsageError(
                    f"{variables_of(argument)[0]} is a variable only: others could read a flag"
                )
            if argument.tokens:
                sources[argument.keys] = argument.tokens[0].keyword or argument.name

    try:
        settings = app_of(schema, fill)(list(tokens), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise UsageError(_words(error)) from error
    return GivenSettings(settings, sources)


class _Parser(App):
    """An app with arguments that are made once for each schema: that takes longer than to parse."""

    def assemble_argument_collection(self, **options: Any) -> ArgumentCollection:
        if options or self.default_command is None:
            return super().assemble_argument_collection(**options)
        # Parsing writes into arguments: each app has its own.
        schema: Any = type(self.default_command())
        own = {id(each): copy(each) for each in arguments_of(schema)}
        for each in own.values():
            each.tokens = []
            each.children = ArgumentCollection(  # type: ignore[no-untyped-call]  # Cyclopts' own
                own[id(child)] for child in each.children
            )
        return ArgumentCollection(own.values())  # type: ignore[no-untyped-call]  # Cyclopts' own


def app_of(schema: Any, fill: Callable[..., None] | None = None) -> App:
    """The Cyclopts app that parses the flags of a schema and returns it."""

    def build(settings: Any = schema()) -> Any:  # noqa: B008 - it is immutable
        return settings

    build.__annotations__ = {"settings": Annotated[schema, Parameter(name="*")]}
    _evaluate_annotations(schema)
    app = _Parser(
        "andon",
        config=() if fill is None else (fill,),
        default_parameter=Parameter(allow_repeating=True, negative=(), name_transform=_flag_name),
        help_flags=(),
        version_flags=(),
        help_format="plaintext",
        result_action="return_value",
    )
    app.default(build)
    return app


@cache
def _evaluate_annotations(schema: Any) -> None:
    """Evaluates the annotations of a schema's fields.

    Cyclopts would evaluate them in the schema's own module. Those of inherited fields may name
    types that only the base class's module knows.
    """
    hints = get_type_hints(schema, include_extras=True)
    schema.__init__.__annotations__ = hints
    nested: list[Any] = [hint for hint in hints.values() if is_dataclass(hint)]
    for each in nested:
        _evaluate_annotations(each)


def settings_of(arguments: ArgumentCollection) -> list[Argument]:
    """The settings among a schema's arguments, without the schemas that it contains."""
    return [each for each in arguments if each.keys and each.parse and each.names != ("*",)]


def variables_of(argument: Argument) -> tuple[str, ...]:
    """The variables of a setting: one named after its field, and one for each further flag."""
    names = (flag_of(argument.keys[-1]), *argument.names[1:])
    return tuple("ANDON_" + name.lstrip("-").replace("-", "_").upper() for name in names)


def split_words(
    schema: Any, tokens: Sequence[str], *, interleaved: bool = False
) -> tuple[list[str], list[str]]:
    """Splits a command line into flags with their values, and other words.

    The first word is the training script, and everything after it belongs to the script, even if it
    looks like one of our flags. If words and flags are `interleaved`, flags may follow words.
    """
    valued = {
        name
        for argument in settings_of(arguments_of(schema))
        if not argument.is_flag()
        for name in argument.names
    }
    flags: list[str] = []
    words: list[str] = []
    place = 0
    while place < len(tokens):
        token = tokens[place]
        if token == "--":
            return flags, [*words, *tokens[place + 1 :]]
        if token.startswith("-"):
            end = place + (2 if token in valued else 1)
            flags += tokens[place:end]
            place = end
        elif interleaved:
            words.append(token)
            place += 1
        else:
            return flags, list(tokens[place:])
    return flags, words


def as_flags(settings: object, only: Collection[str] | None = None) -> list[str]:
    """Flags that yield the same settings again, except those that may only be variables.

    Args:
        settings: an instance of a schema.
        only: the names of its fields that count. None: all.
    """
    return [flag_with(name, value) for name, value in _chosen(settings, only)]


def as_table(settings: object) -> dict[str, str]:
    """The settings that are not at their defaults, by their keys in a file. Has no tokens."""
    return {
        name.lstrip("-"): "true" if value is True else text_of(value)
        for name, value in _chosen(settings)
    }


def _chosen(settings: object, only: Collection[str] | None = None) -> list[tuple[str, Any]]:
    """Flag and value of each setting that is not at its default."""
    schema: Any = type(settings)
    chosen = []
    for argument in settings_of(arguments_of(schema)):
        if only is not None and argument.keys[0] not in only:
            continue
        value: Any = settings
        for name in argument.keys:
            value = getattr(value, name)
        if argument.parameter.show is not False and value != argument.field_info.default:
            chosen.append((argument.name, value))
    return chosen


@cache
def arguments_of(schema: Any) -> ArgumentCollection:
    """The arguments of a schema, without tokens; a process makes them once."""
    return app_of(schema).assemble_argument_collection(parse_docstring=False)


def _file(settings: Sequence[Argument], environment: Mapping[str, str], verb: str) -> SettingsFile:
    chosen = next((each for each in settings if each.keys == ("config",)), None)
    if chosen is not None:
        _fill_in(chosen, environment, None)
        if chosen.tokens:
            return SettingsFile.read(Path(chosen.tokens[0].value), verb, required=True)
    return SettingsFile.read(FILE, verb, required=False)


def _fill_in(argument: Argument, environment: Mapping[str, str], file: SettingsFile | None) -> None:
    """Gives a setting without a flag the value of its variable, or of the file."""
    if argument.parameter.show_env_var is False:
        return
    found: tuple[str, str] | None = None
    for variable in variables_of(argument):
        # A variable that is set to nothing counts as unset: Compose passes `${NAME:-}` on.
        if text := environment.get(variable, "").strip():
            found = variable, text
            break
    if found is None and file is not None and argument.parameter.show is not False:
        found = file.text(argument)
    if found is not None:
        source, text = found
        argument.append(Token(keyword=source, value=_switch(argument, text), source="elsewhere"))


def _switch(argument: Argument, text: str) -> str:
    """Translates `on` and `off`, which Cyclopts does not know."""
    if argument.is_flag() and text.lower() in _ON | _OFF:
        return "true" if text.lower() in _ON else "false"
    return text


def _flag_name(field: str) -> str:
    return flag_of(field).removeprefix("--")


def _dashed(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in table.items()}


def _keys_of(argument: Argument) -> tuple[str, ...]:
    """The keys of a setting in a file: its flags, and the name of its variable."""
    names = (*argument.names, flag_of(argument.keys[-1]))
    return tuple(dict.fromkeys(name.lstrip("-") for name in names))


def _known(settings: Sequence[Argument]) -> set[str]:
    return {
        key
        for argument in settings
        if argument.parameter.show is not False and argument.parameter.show_env_var
        for key in _keys_of(argument)
    }


def _words(error: CycloptsError) -> str:
    """The mistake in the form of our other errors: the source, the fact, the remedy."""
    argument: Argument | None = error.argument
    token: Token | None = getattr(error, "token", None)
    if token is None and argument is not None and argument.tokens:
        token = argument.tokens[0]
    name = token.keyword if token is not None else None
    match error:
        case ValidationError() if name:
            return f"{name} {error.exception_message}"
        case CoercionError() if name and token is not None:
            return f"{name} {error.msg or _must_be(error.target_type, token.value)}"
        case MissingArgumentError() if argument is not None:
            return f"{argument.name} needs a value"
        case UnusedCliTokensError() if error.unused_tokens:
            return f"{error.unused_tokens[0]} is no flag and belongs to none: see --help"
    error.verbose = False
    return str(error).replace("Unknown option:", "there is no flag")


def _must_be(target: Any, text: str) -> str:
    """What a value must be instead of `text`, such as `must be wait or raise, not 'x'`."""
    kind = _KINDS.get(target, "something else")
    if get_origin(target) is Literal:
        kind = " or ".join(str(each) for each in get_args(target))
    elif isinstance(target, type) and issubclass(target, enum.Enum):
        kind = " or ".join(name.lower() for name in target.__members__)
    return f"must be {kind}, not {text!r}"
