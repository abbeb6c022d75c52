"""`python docs/tools/protos.py` writes docs/protos.md: every service, message and enum of protos/, with its comments.

The page is made from what protoc makes of the files, so it cannot name a field that there is not.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"
ORDER = ("cluster_service", "types", "registry_service", "prefill_service", "decode_service")
TITLES = {
    "cluster_service": "What clients call",
    "types": "What all share",
    "registry_service": "How nodes join",
    "prefill_service": "What routers ask of prefill nodes",
    "decode_service": "What routers ask of decode nodes",
}
HEAD = """# Protos

Written by `make docs` from `protos/`: do not edit.

Clients need [the first part](#what-clients-call) and [the second](#what-all-share) alone. The rest is between the
members of a cluster, and may change with any release. Errors and their details:
[troubleshooting](troubleshooting.md#errors-and-exit-codes).
"""
SERVICE_METHODS, MESSAGE_FIELDS, MESSAGE_NESTED, ENUM_VALUES = 2, 2, 3, 2
FILE_MESSAGES, FILE_ENUMS, FILE_SERVICES = 4, 5, 6
"""Numbers of fields in descriptor.proto, of which the paths of source locations are made."""
Path_ = tuple[int, ...]


def markdown() -> str:
    files = {Path(file.name).stem: file for file in descriptors().file}
    if set(files) != set(ORDER):
        raise ValueError(f"the files of protos/ are {sorted(files)}, and ORDER has {sorted(ORDER)}")
    return HEAD + "".join(f"\n## {TITLES[name]}\n\n`protos/{files[name].name}`\n{_file(files[name])}" for name in ORDER)


def descriptors() -> FileDescriptorSet:
    """Return what protoc makes of the files, comments included."""
    with tempfile.NamedTemporaryFile() as out:
        names = sorted(str(path) for path in PROTOS.rglob("*.proto"))
        code = protoc.main(
            ["protoc", f"-I{PROTOS}", "--include_source_info", f"--descriptor_set_out={out.name}", *names]
        )
        if code:
            raise RuntimeError(f"protoc ended with {code}")
        return FileDescriptorSet.FromString(Path(out.name).read_bytes())


class Comments:
    """The comments of one file, by the path of what they stand at."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._found = {
            tuple(place.path): " ".join(f"{place.leading_comments} {place.trailing_comments}".split())
            for place in file.source_code_info.location
        }

    def at(self, path: Path_) -> str:
        return self._found.get(path, "").replace("|", "\\|")


def _file(file: FileDescriptorProto) -> str:
    comments = Comments(file)
    parts = [_service(each, (FILE_SERVICES, i), comments) for i, each in enumerate(file.service)]
    parts += [part for i, each in enumerate(file.message_type) for part in _message(each, (FILE_MESSAGES, i), comments)]
    parts += [_enum(each, (FILE_ENUMS, i), comments) for i, each in enumerate(file.enum_type)]
    return "".join(parts)


def _service(service: ServiceDescriptorProto, path: Path_, comments: Comments) -> str:
    rows = [
        (
            f"`{method.name}`",
            _call(method.input_type, method.client_streaming),
            _call(method.output_type, method.server_streaming),
            comments.at((*path, SERVICE_METHODS, i)),
        )
        for i, method in enumerate(service.method)
    ]
    return _section(service.name, comments.at(path), ("call", "takes", "gives", ""), rows)


def _call(type_name: str, is_stream: bool) -> str:
    return f"{'stream of ' if is_stream else ''}{_link(type_name)}"


def _message(message: DescriptorProto, path: Path_, comments: Comments, outer: str = "") -> Iterator[str]:
    name = f"{outer}{message.name}"
    entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    rows = [
        (f"`{field.name}`", _type(field, entries), str(field.number), _meaning(message, field, path, i, comments))
        for i, field in enumerate(message.field)
    ]
    yield _section(name, comments.at(path), ("field", "type", "no.", ""), rows)
    for i, nested in enumerate(message.nested_type):
        if nested.name not in entries:
            yield from _message(nested, (*path, MESSAGE_NESTED, i), comments, f"{name}.")


def _meaning(message: DescriptorProto, field: FieldDescriptorProto, path: Path_, i: int, comments: Comments) -> str:
    one_of = ""
    if field.HasField("oneof_index") and not field.proto3_optional:
        one_of = f"One of `{message.oneof_decl[field.oneof_index].name}`. "
    return one_of + comments.at((*path, MESSAGE_FIELDS, i))


def _type(field: FieldDescriptorProto, entries: dict[str, DescriptorProto]) -> str:
    if (entry := entries.get(field.type_name.rpartition(".")[2])) is not None:
        return f"map of {_type(entry.field[0], {})} to {_type(entry.field[1], {})}"
    kind = _link(field.type_name) or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {kind}"
    return f"{kind}, optional" if field.proto3_optional else kind


def _enum(enum: EnumDescriptorProto, path: Path_, comments: Comments) -> str:
    rows = [
        (f"`{value.name}`", str(value.number), comments.at((*path, ENUM_VALUES, i)))
        for i, value in enumerate(enum.value)
    ]
    return _section(enum.name, comments.at(path), ("value", "no.", ""), rows)


def _link(type_name: str) -> str:
    """Return a link to a type's own section; nothing for a type that is not a message or an enum."""
    name = type_name.removeprefix(".corun.v1.")
    return f"[{name}](#{name.lower().replace('.', '')})" if name else ""


def _section(name: str, comment: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    table = "\n".join(lines) if len(lines) > 2 else "No fields."
    return f"\n### {name}\n\n{comment}{chr(10) * 2 if comment else ''}{table}\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
