"""Whether messages of one version of the API mean the same to another: rules over two descriptors."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto


def breaks(old: FileDescriptorProto, new: FileDescriptorProto) -> list[str]:
    """What of ``old`` is not in ``new`` as it was; empty when new things were only added."""
    return [*_package(old, new), *_services(old, new), *_messages(old, new), *_enums(old, new)]


def _package(old: FileDescriptorProto, new: FileDescriptorProto) -> Iterator[str]:
    if old.package != new.package:
        yield f"package {old.package} is {new.package}"


def _services(old: FileDescriptorProto, new: FileDescriptorProto) -> Iterator[str]:
    services = {service.name: service for service in new.service}
    for service in old.service:
        if service.name not in services:
            yield f"service {service.name} is gone"
            continue
        methods = {method.name: method for method in services[service.name].method}
        for method in service.method:
            if methods.get(method.name) != method:
                yield f"call {service.name}.{method.name} is gone or another"


def _messages(old: FileDescriptorProto, new: FileDescriptorProto) -> Iterator[str]:
    messages = {message.name: message for message in new.message_type}
    for message in old.message_type:
        if message.name not in messages:
            yield f"message {message.name} is gone"
        else:
            yield from _fields(message, messages[message.name])


def _fields(old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    by_number = {field.number: field for field in new.field}
    for field in old.field:
        now = by_number.get(field.number)
        if now is None:
            yield f"{old.name}.{field.name} ({field.number}) is gone"
        elif _meaning(now) != _meaning(field):
            yield f"{old.name}.{field.name} ({field.number}) is another: {now.name}"


def _meaning(field: FieldDescriptorProto) -> tuple[object, ...]:
    """A field that becomes ``optional`` says more than it did, in the same bytes."""
    return (field.name, field.type, field.type_name, field.label == FieldDescriptorProto.LABEL_REPEATED)


def _enums(old: FileDescriptorProto, new: FileDescriptorProto) -> Iterator[str]:
    enums = {enum.name: {value.number: value.name for value in enum.value} for enum in new.enum_type}
    for enum in old.enum_type:
        for value in enum.value:
            if enums.get(enum.name, {}).get(value.number) != value.name:
                yield f"value {enum.name}.{value.name} ({value.number}) is gone or another"
