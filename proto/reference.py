"""Writes the reference of the protocol: Markdown about every service, message and enum.

`proto/generate.py` calls it with the descriptors that protoc makes of the `.proto` files and their
comments. Each file becomes a page, each type an entry, and types link to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb

__all__ = ["write_reference"]

_FILE_PACKAGE, _FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE = 2, 4, 5, 6
_MESSAGE_FIELD, _MESSAGE_ONEOF, _ENUM_VALUE, _SERVICE_METHOD = 2, 8, 2, 2
"""Field numbers of descriptor.proto. A comment's path consists of these and of indices."""

_SCALARS = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in pb.FieldDescriptorProto.Type.items()
}


def write_reference(descriptors: Path, out: Path) -> None:
    """Writes the pages of a FileDescriptorSet with source info into the folder `out`."""
    files = pb.FileDescriptorSet.FromString(descriptors.read_bytes()).file
    pages = [_Page(file) for file in files if file.package.startswith("andon.")]
    homes = {name: page.name for page in pages for name in page.defines}
    out.mkdir(parents=True, exist_ok=True)
    for page in pages:
        text = "\n".join(page.lines(homes)).rstrip() + "\n"
        (out / page.name).write_text(text, "utf-8")
    (out / "README.md").write_text("\n".join(_index(pages)) + "\n", "utf-8")


@dataclass
class _Page:
    """One `.proto` file as a page."""

    file: pb.FileDescriptorProto
    comments: dict[tuple[int, ...], str] = field(init=False)

    def __post_init__(self) -> None:
        self.comments = {
            tuple(place.path): place.leading_comments or place.trailing_comments
            for place in self.file.source_code_info.location
        }

    @property
    def name(self) -> str:
        return Path(self.file.name).stem + ".md"

    @property
    def defines(self) -> list[str]:
        """The full names of the types that have an entry on the page."""
        names = [each.name for each in self.file.service]
        names += [each.name for each in self.file.message_type]
        names += [each.name for each in self.file.enum_type]
        return [f".{self.file.package}.{name}" for name in names]

    @property
    def about(self) -> str:
        """The comment at the head of the file, before its syntax."""
        for place in self.file.source_code_info.location:
            if place.path == [12]:  # syntax
                return _sentences([*place.leading_detached_comments, place.leading_comments])
        return ""

    def lines(self, homes: dict[str, str]) -> Iterator[str]:
        """The lines of the page. `homes` maps each type's full name to the page of its entry."""
        yield f"# {self.file.name}"
        yield ""
        yield self.about
        yield ""
        yield f"Package `{self.file.package}`. Written by `make proto`; not edited by hand."
        for index, service in enumerate(self.file.service):
            yield from self._service(service, (_FILE_SERVICE, index), homes)
        for index, message in enumerate(self.file.message_type):
            yield from self._message(message, (_FILE_MESSAGE, index), homes)
        for index, enum in enumerate(self.file.enum_type):
            yield from self._enum(enum, (_FILE_ENUM, index))

    def _service(
        self, service: pb.ServiceDescriptorProto, path: tuple[int, ...], homes: dict[str, str]
    ) -> Iterator[str]:
        yield from ["", f"## {service.name}", "", f"Service. {self._comment(path)}"]
        for index, method in enumerate(service.method):
            request = _streamed(_link(method.input_type, homes, self.name), method.client_streaming)
            response = _streamed(
                _link(method.output_type, homes, self.name), method.server_streaming
            )
            yield from ["", f"### {service.name}.{method.name}", "", f"{request} → {response}", ""]
            yield self._comment((*path, _SERVICE_METHOD, index))

    def _message(
        self, message: pb.DescriptorProto, path: tuple[int, ...], homes: dict[str, str]
    ) -> Iterator[str]:
        yield from ["", f"## {message.name}", "", f"Message. {self._comment(path)}"]
        for index, oneof in enumerate(message.oneof_decl):
            if not oneof.name.startswith("_"):  # protoc makes those for optional fields
                text = self._comment((*path, _MESSAGE_ONEOF, index))
                yield from ["", f"One of `{oneof.name}`: {text}"]
        if not message.field:
            return
        yield from ["", "| number | field | type | meaning |", "|---|---|---|---|"]
        for index, each in enumerate(message.field):
            meaning = _cell(self._comment((*path, _MESSAGE_FIELD, index)))
            kind = _kind(each, homes, self.name)
            if each.HasField("oneof_index") and not each.proto3_optional:
                kind += f", one of `{message.oneof_decl[each.oneof_index].name}`"
            yield f"| {each.number} | `{each.name}` | {kind} | {meaning} |"

    def _enum(self, enum: pb.EnumDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield from ["", f"## {enum.name}", "", f"Enum. {self._comment(path)}"]
        yield from ["", "| number | value | meaning |", "|---|---|---|"]
        for index, value in enumerate(enum.value):
            meaning = _cell(self._comment((*path, _ENUM_VALUE, index)))
            yield f"| {value.number} | `{value.name}` | {meaning} |"

    def _comment(self, path: tuple[int, ...]) -> str:
        return _sentences([self.comments.get(path, "")])


def _index(pages: Sequence[_Page]) -> Iterator[str]:
    yield "# The messages of andon.v1"
    yield ""
    yield "Every service, message and enum of [`proto/andon/v1`](../../proto/andon/v1), with its"
    yield "comments. What they mean together is in [the protocol](../protocol.md)."
    for page in pages:
        entries = [name.rpartition(".")[2] for name in page.defines]
        links = ", ".join(f"[{entry}]({page.name}#{entry.lower()})" for entry in entries)
        yield from ["", f"## {page.file.name}", "", page.about, "", links]


def _sentences(comments: Sequence[str]) -> str:
    """Comments as Markdown, with their paragraphs."""
    text = "\n\n".join(comment.strip("\n") for comment in comments if comment.strip())
    lines = [line.removeprefix(" ").rstrip() for line in text.splitlines()]
    return "\n".join(lines).strip()


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _streamed(link: str, streams: bool) -> str:  # noqa: FBT001 - as protoc says it
    return f"stream of {link}" if streams else link


def _kind(each: pb.FieldDescriptorProto, homes: dict[str, str], here: str) -> str:
    name = _link(each.type_name, homes, here) if each.type_name else f"`{_SCALARS[each.type]}`"
    if each.label == pb.FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if each.proto3_optional else name


def _link(full_name: str, homes: dict[str, str], here: str) -> str:
    entry, home = full_name.rpartition(".")[2], homes[full_name]
    return f"[{entry}]({'' if home == here else home}#{entry.lower()})"
