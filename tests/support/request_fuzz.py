"""Requests that nobody would send, made from the descriptors of the protocol: a field that is added is tried as well.

Each follows from its number alone. About half are a sound request with a few of its fields changed, so that they get
beyond the door; the others are hostile in many fields, or no messages at all.
"""

import random
import string
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stepwire.v1 import inference_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]
_MAX_DEPTH = 6
_MAX_BYTES = 2 << 20

_INTEGERS = (0, 1, -1, 2, 3, 7, 16, 20, 21, 63, 64, 65, 100, 101, -100, -101, 127, 128, 255, 256, 257, 319, 320, 1024)
_EXTREMES = {
    FieldDescriptor.CPPTYPE_INT32: (2**31 - 1, -(2**31), 2**30),
    FieldDescriptor.CPPTYPE_INT64: (2**63 - 1, -(2**63), 2**32),
    FieldDescriptor.CPPTYPE_UINT32: (2**32 - 1, 2**31),
    FieldDescriptor.CPPTYPE_UINT64: (2**64 - 1, 2**63, 2**53),
}
_FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-38, 1e-45, -1e-30, 1e-4, 2.0, -2.0, 2.001, 100.0, 100.1, 3.4e38, -3.4e38)
_SPECIAL_FLOATS = (float("nan"), float("inf"), float("-inf"))
_LENGTHS = (0, 1, 1, 2, 3, 16, 17, 128, 129, 300)
_LONG_LENGTHS = (1025, 4097, 16_385, 40_000)
_STRINGS = (
    "",
    "a",
    " ",
    "hello",
    "user",
    "\0",
    "\n{}%s",
    "é世\U0001f469\u200d\U0001f469",
    "<|im_end|>",
    "../../etc/passwd",
    "'; --",
    "tiny",
    "stepwire",
    "{{ 7 * 7 }}{% for a in range(9) %}",
    # Texts that are grammars of one kind or another.
    "{}",
    "[",
    '{"type": "object"}',
    '{"type": ["string", "null"], "pattern": "(a+)+$"}',
    '{"$ref": "#"}',
    '{"$ref": "http://127.0.0.1:1/x"}',
    '{"enum": []}',
    '{"minimum": 1e999}',
    '{"allOf": [{"type": "integer"}, {"type": "string"}]}',
    "(a|a)*b{1,99999}",
    "a{2147483647}",
    "[^\\x00-\\uffff]",
    "(?=x)\\1",
    "root ::= root",
    'start: "a" start | ""',
)


@dataclass(frozen=True, slots=True)
class Case:
    """One call: the RPC's name and its request on the wire; when its client gives up, and what it sends along.

    `timeout_s` is the deadline, None for one that is never reached. `num_read` is after how many messages the
    client goes away; None for not at all. `text` is the request for people.
    """

    number: int
    method: str
    request: bytes
    text: str
    timeout_s: float | None
    num_read: int | None
    metadata: tuple[tuple[str, str | bytes], ...]


def make_case(number: int) -> Case:
    """The case of this number."""
    rng = random.Random(f"case {number}")
    method = rng.choice(list(SERVICE.methods)) if rng.random() < 0.2 else SERVICE.methods_by_name["Generate"]
    message = _message_of(rng, method.input_type)
    # What is larger than a message may be never gets to the service.
    while message.ByteSize() > _MAX_BYTES:
        message = _message_of(rng, method.input_type)
    request = message.SerializeToString()
    if rng.random() < 0.08:
        request = _damaged(rng, request)
    return Case(
        number=number,
        method=method.name,
        request=request,
        text=str(message)[:2000],
        timeout_s=rng.choice((0.0, 0.001, 0.01, 0.05, 0.3)) if rng.random() < 0.1 else None,
        num_read=rng.choice((0, 1, 2, 5)) if rng.random() < 0.15 else None,
        metadata=tuple(_metadata(rng)) if rng.random() < 0.2 else (),
    )


def _message_of(rng: random.Random, kind: Descriptor) -> Message:
    if kind is not pb.GenerateRequest.DESCRIPTOR:
        return Fuzzer(rng, rng.choice((0.1, 0.6))).message(kind)
    way = rng.random()
    if way < 0.15:
        return Fuzzer(rng, rng.choice((0.3, 1.0))).message(kind)
    request = _sound_request(rng)
    if way > 0.3:
        num = 1 if way < 0.8 else rng.randint(2, 5)
        Fuzzer(rng, rng.choice((0.0, 0.4, 0.8))).change(request, num)
    return request


def _sound_request(rng: random.Random) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        sampling=pb.SamplingParams(max_tokens=rng.choice((1, 2, 5, 12)), seed=rng.getrandbits(53))
    )
    kind = rng.random()
    if kind < 0.4:
        request.text = "".join(rng.choices(string.ascii_letters + " ", k=rng.randint(1, 60)))
    elif kind < 0.8:
        request.token_ids.ids.extend(rng.randrange(320) for _ in range(rng.choice((1, 2, 30, 100))))
    else:
        request.messages.messages.add(role="user", content="hello")
    return request


class Fuzzer:
    """Fills messages. With a `malice` of 0 values are small and plain, with 1 they are what breaks programs."""

    def __init__(self, rng: random.Random, malice: float) -> None:
        self._rng = rng
        self._malice = malice

    def message(self, kind: Descriptor, depth: int = 0) -> Message:
        """A message of this type, about a third of its fields set, and of each oneof one."""
        message: Message = GetMessageClass(kind)()
        for field in self._choose_fields(kind, 0.35):
            self.set(message, field, depth)
        return message

    def change(self, message: Message, num: int) -> None:
        """Sets so many fields, here or in the messages within."""
        for _ in range(num):
            target = message
            while True:
                field = self._rng.choice(target.DESCRIPTOR.fields)
                is_inner = field.message_type is not None and not field.is_repeated
                if not is_inner or self._rng.random() < 0.1:
                    break
                if not getattr(target, field.name).DESCRIPTOR.fields:
                    break  # It says all by being there.
                target = getattr(target, field.name)
            self.set(target, field, 0)

    def set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        """Gives a field a value, in place of the one it had."""
        message.ClearField(field.name)
        target = getattr(message, field.name)
        if field.is_repeated and _is_map(field):
            self._fill_map(target, field)
        elif field.is_repeated:
            self._fill_list(target, field, depth)
        elif field.message_type is not None:
            target.SetInParent()
            if depth < _MAX_DEPTH:
                target.MergeFrom(self.message(field.message_type, depth + 1))
        else:
            setattr(message, field.name, self._scalar(field))

    def _choose_fields(self, kind: Descriptor, share: float) -> list[FieldDescriptor]:
        chosen = [field for field in kind.fields if field.containing_oneof is None and self._rng.random() < share]
        for oneof in kind.oneofs:
            is_optional = len(oneof.fields) == 1
            if self._rng.random() < (share if is_optional else 0.9):
                chosen.append(self._rng.choice(oneof.fields))
        return chosen

    def _length(self) -> int:
        if self._rng.random() > self._malice:
            return self._rng.choice((0, 1, 1, 2, 3))
        return self._rng.choice(_LENGTHS if self._rng.random() < 0.95 else _LONG_LENGTHS)

    def _fill_list(self, target: Any, field: FieldDescriptor, depth: int) -> None:
        length = self._length()
        if field.message_type is not None:
            for _ in range(min(length, 5000) if depth < _MAX_DEPTH else 0):
                target.append(self.message(field.message_type, depth + 2))
            return
        # Long lists of one or few values: it is their length that is hostile.
        values = [self._scalar(field) for _ in range(min(length, 40))]
        target.extend(values[i % len(values)] for i in range(length))

    def _fill_map(self, target: Any, field: FieldDescriptor) -> None:
        entry = field.message_type
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for number in range(self._length()):
            self_key = self._scalar(key) if number < 40 or key.cpp_type == key.CPPTYPE_STRING else number
            if value.message_type is not None:
                target[self_key].MergeFrom(self.message(value.message_type, 1))
            else:
                target[self_key] = self._scalar(value)

    def _scalar(self, field: FieldDescriptor) -> Any:
        return _SCALARS[field.cpp_type](self, field)

    def _integer(self, field: FieldDescriptor) -> int:
        if self._rng.random() > self._malice:
            return self._rng.randint(0, 8)
        extremes = _EXTREMES[field.cpp_type]
        value = self._rng.choice(extremes if self._rng.random() < 0.3 else _INTEGERS)
        return abs(value) if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64) else value

    def _float(self, _field: FieldDescriptor) -> float:
        if self._rng.random() > self._malice:
            return self._rng.choice((0.25, 0.5, 0.75, 1.0, self._rng.random()))
        return self._rng.choice(_SPECIAL_FLOATS if self._rng.random() < 0.3 else _FLOATS)

    def _bool(self, _field: FieldDescriptor) -> bool:
        return self._rng.random() < 0.5

    def _enum(self, field: FieldDescriptor) -> int:
        known = [value.number for value in field.enum_type.values]
        return self._rng.choice(known) if self._rng.random() > self._malice else self._rng.choice((-1, 99, 2**31 - 1))

    def _string(self, field: FieldDescriptor) -> str | bytes:
        if field.name == "model" and self._rng.random() < 0.8:
            # Another model's name is refused before anything else is looked at.
            text = self._rng.choice(("", "tiny"))
        elif self._rng.random() > self._malice:
            text = self._rng.choice(("a", "b", "hello", "user"))
        elif self._rng.random() < 0.06:
            unit = self._rng.choice(('{"a":', "[", "(", "(a+)+", "x", "é", '{"anyOf":['))
            text = unit * self._rng.choice((129, 1025, 20_000, 300_000))
        else:
            text = self._rng.choice(_STRINGS)
        return text.encode() if field.type == field.TYPE_BYTES else text


_SCALARS: Mapping[int, Callable[[Fuzzer, FieldDescriptor], Any]] = {
    FieldDescriptor.CPPTYPE_INT32: Fuzzer._integer,
    FieldDescriptor.CPPTYPE_INT64: Fuzzer._integer,
    FieldDescriptor.CPPTYPE_UINT32: Fuzzer._integer,
    FieldDescriptor.CPPTYPE_UINT64: Fuzzer._integer,
    FieldDescriptor.CPPTYPE_FLOAT: Fuzzer._float,
    FieldDescriptor.CPPTYPE_DOUBLE: Fuzzer._float,
    FieldDescriptor.CPPTYPE_BOOL: Fuzzer._bool,
    FieldDescriptor.CPPTYPE_ENUM: Fuzzer._enum,
    FieldDescriptor.CPPTYPE_STRING: Fuzzer._string,
}


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes that may be no message any more."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        way, place = rng.randrange(4), rng.randrange(len(damaged) + 1)
        if way == 0 and damaged:
            damaged[place % len(damaged)] = rng.randrange(256)
        elif way == 1:
            del damaged[place:]
        elif way == 2:
            damaged[place:place] = rng.randbytes(rng.randint(1, 9))
        else:
            # A field of a number that nobody knows, or of another wire type than it has.
            damaged += bytes([rng.randrange(1, 128)]) + struct.pack("<q", rng.getrandbits(62))
    return bytes(damaged)


def _metadata(rng: random.Random) -> list[tuple[str, str | bytes]]:
    """Metadata that gRPC can send."""
    choices: list[tuple[str, str | bytes]] = [
        ("stepwire-tenant", rng.choice(("", "a", "x" * 3000, "~" * 64, "a,b", "blue"))),
        ("stepwire-tenant-bin", rng.randbytes(20)),
        ("traceparent", rng.choice(("", "00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff-zz-1-1", "0" * 55))),
        ("traceparent", "00-" + rng.randbytes(16).hex() + "-" + rng.randbytes(8).hex() + "-01"),
        ("tracestate", "a=b," * 50),
        ("baggage", "k=" + "v" * 500),
        ("authorization", rng.choice(("Bearer", "Bearer x", "Basic eDp5"))),
        ("x-" + rng.choice(string.ascii_lowercase) * 20, "1"),
        ("grpc-previous-rpc-attempts", "2"),
    ]
    return [rng.choice(choices) for _ in range(rng.randint(1, 3))]
