"""Values as frames and back: exact, and whatever comes over the wire, a value or a PayloadError."""

from __future__ import annotations

import math
import pickle
import struct
import sys
import threading
import tracemalloc
import types
import zlib
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from unisono.collectives.call import encode_or_header
from unisono.collectives.routing import fits_exchange, reducer_for
from unisono.context import current
from unisono.errors import PayloadError
from unisono.model.fallback import INLINE_TENSOR_BYTES
from unisono.payload import codec, tensors as tensors_of_payload
from unisono.payload.codec import (
    decode,
    decode_all,
    encode,
    failure,
    frame_or_reason,
    header,
    raise_failures,
)
from unisono.payload.tensors import (
    TensorHeader,
    from_bytes,
    is_dense,
    is_exact,
    to_bytes,
    view_bytes,
)
from unisono.testing.cases._law import same

CPU = torch.device("cpu")
DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
]
Point = namedtuple("Point", "x y")


class Color(IntEnum):
    RED = 1


@dataclass
class Record:
    name: str
    value: Any


class Text(str):
    __slots__ = ()


class Stubborn:
    def __reduce__(self) -> str:
        raise OSError("no")


def back(value: object) -> Any:
    return decode(encode(value), CPU)


PLAIN: list[Any] = [
    *(None, True, False, 0, -1, 2**53 + 1, 2**63 - 1, -(2**63), 0.1, -0.0, 1e-320, math.inf),
    *(math.nan, 1 - 2.5j, complex(math.nan, -0.0), "", "é", "\0", "\udc80", "日本" * 300),
    *(b"", b"\0\xff" * 200, bytearray(b"abc"), bytearray(), Path("x"), Path("é/y"), Path()),
    *([], (), {}, [1, [2.0, (True, None)]], {"a": {1: b"x", None: [Path("p")]}, (1, "k"): ()}),
    *([2**63, -(2**63) - 1, 10**400, -(10**400), 255, 256, -256, 2**64],),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:30])
def test_plain_values_are_exact(value: Any) -> None:
    same(back(value), value)


NESTED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(NESTED)
def test_nested_values_are_exact(value: Any) -> None:
    same(back(value), value)


@settings(max_examples=60, deadline=None)
@example(10**10000)
@given(st.integers())
def test_ints_of_any_size_travel_in_containers_and_alone_those_of_64_bits(value: int) -> None:
    same(back([value, value * 2**200]), [value, value * 2**200])
    if -(2**63) <= value < 2**63:
        same(back(value), value)
    else:
        shown = value if value.bit_length() < 200 else f"an int of {value.bit_length()} bits"
        with pytest.raises(PayloadError, match=f"^{shown} doesn't fit into 64 bits"):
            encode(value)


OBJECTS: list[Any] = [
    {1, 2, 3}, frozenset("ab"), Fraction(1, 3), Color.RED, Point(1, "y"), Record("r", [1.5]),
    OrderedDict(b=1, a=2), Text("t"), range(3), PurePosixPath("/a"), PureWindowsPath("c:/b"),
    np.float64(0.1), np.int16(-3), torch.float32, torch.Size([2, 3]), print, ValueError("x"),
]  # fmt: skip


@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: type(value).__name__)
def test_objects_keep_type_and_value(value: Any) -> None:
    for got in (back(value), back([value])[0], back({"k": (value,)})["k"][0]):
        assert type(got) is type(value)
        assert got == value or isinstance(value, ValueError)
        assert isinstance(got, dict) is False or list(got) == list(value)


def test_tensors_of_the_meta_device_travel_as_objects() -> None:
    tensor, module = back([torch.empty(2, 3, device="meta"), torch.nn.Linear(3, 2, device="meta")])
    for each in (tensor, module.weight):
        assert (each.is_meta, each.shape) == (True, (2, 3))


def test_functions_and_classes_that_nobody_can_import_travel() -> None:
    base = 40
    assert back(lambda x: x + base)(2) == 42

    class Local:
        answer = 42

    assert back(Local()).answer == 42


def test_a_container_that_holds_itself_travels() -> None:
    knot: list[Any] = [1]
    knot.append({"me": (knot,)})
    got = back(knot)
    assert got[0] == 1
    assert got[1]["me"][0] is got


@pytest.mark.parametrize("depth", [1, 63, 64, 65, 200])
def test_what_is_nested_deeply_arrives(depth: int) -> None:
    for wrap in (lambda x: [x], lambda x: (x,), lambda x: {0: x}):
        value: Any = "core"
        for _ in range(depth):
            value = wrap(value)
        got = back(value)
        for _ in range(depth):
            got = got[0]
        assert got == "core"


def test_what_is_nested_too_deeply_is_refused() -> None:
    value: Any = None
    for _ in range(100_000):
        value = [value]
    with pytest.raises(PayloadError, match=r"can't be pickled"):
        encode(value)
    while value is not None:  # else its end is as deep as it is
        value = value.pop()


def closure() -> Callable[[], object]:
    lock = threading.Lock()
    return lambda: lock


@pytest.mark.parametrize(
    "value",
    [(n for n in range(3)), Stubborn(), closure()],
    ids=["generator", "own __reduce__", "closure over a lock"],
)
def test_what_cant_be_pickled_is_a_payload_error(value: Any) -> None:
    with pytest.raises(PayloadError, match=r"can't be pickled"):
        encode(value)
    with pytest.raises(PayloadError, match=r"can't be pickled"):
        decode(frame_or_reason(encode, [value]), CPU)


def tensors() -> Iterator[torch.Tensor]:
    bits = torch.randint(256, (2, 3, 16), dtype=torch.uint8, generator=torch.manual_seed(1))
    for dtype in DTYPES:
        data = bits[..., : dtype.itemsize].contiguous()
        if dtype is torch.bool:
            data = data % 2
        tensor = data.view(dtype).squeeze(-1)
        yield from (tensor, tensor[1, 2], tensor[:, :0], tensor.t(), tensor[:, ::2], tensor[:1, :1])
    yield torch.ones(1).expand(3, 4)
    yield torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1)
    yield torch.ones(1, 1, 1, 1, 1, 1, 1)
    yield torch.empty(0, 2**40)


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_tensors_of_every_dtype_and_layout_are_exact() -> None:
    for tensor in tensors():
        head = TensorHeader(tensor.dtype, tuple(tensor.shape), False)
        assert decode(header(tensor), CPU) == head
        for got in (back(tensor), back([tensor])[0], back(Record("r", tensor)).value):
            same(got, tensor)
            assert got.is_contiguous()
            assert got.data_ptr() != tensor.data_ptr() or tensor.numel() == 0
    assert str(decode(header(torch.zeros(2, 3)), CPU)) == "float32[2, 3]"


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    base = torch.tensor([1 + 2j, -3 - 0.5j])
    for value in (base.conj(), base.conj().imag, torch._neg_view(torch.ones(3))):
        assert value.is_conj() or value.is_neg()
        same(back(value), value.resolve_conj().resolve_neg())
        same(back({1: Record("r", value)})[1].value, value.resolve_conj().resolve_neg())


def test_gradients_stay_at_home() -> None:
    leaf = torch.ones(3, requires_grad=True)
    for value in (leaf, leaf * 2):
        got = back(value)
        assert not got.requires_grad
        same(got, value.detach())


def test_modules_and_other_layouts_travel_as_objects() -> None:
    module = torch.nn.Linear(2, 2)
    got = back(module)
    assert isinstance(got.weight, torch.nn.Parameter)
    assert torch.equal(got.weight, module.weight)
    assert torch.equal(back(torch.eye(3).to_sparse()).to_dense(), torch.eye(3))
    assert torch.equal(back({"state": module.state_dict()})["state"]["bias"], module.bias)


ARRAYS = [
    np.arange(12, dtype=">i4").reshape(3, 4), np.asfortranarray(np.eye(3)), np.arange(10)[::-2],
    np.array(["é", "x"]), np.array([(1, 2.5)], dtype="i4,f8"), np.zeros((0, 3)), np.array(3.5),
    np.array([1, "x", None], dtype=object), np.array(["2020-01-01"], dtype="M8[D]"),
    np.array([np.nan, -0.0, np.inf], dtype=np.float16), np.zeros(100_000, dtype=np.uint8),
]  # fmt: skip


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_numpy_arrays_are_exact_and_can_be_written_to(array: np.ndarray[Any, Any]) -> None:
    for got in (back(array), back([1, array])[1]):
        assert got.dtype == array.dtype
        assert got.shape == array.shape
        assert got.tobytes() == array.tobytes() or array.dtype == object
        assert got.tolist() == array.tolist() or array.dtype.kind == "f"
        assert got.flags.writeable


def test_a_read_only_array_stays_read_only() -> None:
    locked = np.arange(3)
    locked.flags.writeable = False
    assert not back(locked).flags.writeable


def test_large_buffers_travel_out_of_band_once() -> None:
    array = np.ones(1_000_000, dtype=np.uint8)
    assert len(encode(Record("r", array))) < 1_001_000
    assert len(encode(Record("r", torch.ones(1_000_000, dtype=torch.uint8)))) < 1_001_000


def test_which_tensors_ride_the_data_plane() -> None:
    context = current()
    small = torch.zeros(INLINE_TENSOR_BYTES, dtype=torch.uint8)
    long = torch.zeros(INLINE_TENSOR_BYTES + 1, dtype=torch.uint8)
    wide = torch.zeros(INLINE_TENSOR_BYTES // 8, dtype=torch.int64)
    spread = torch.zeros(1).expand(INLINE_TENSOR_BYTES // 4 + 1)
    fit = [fits_exchange(context, tensor, None) for tensor in (small, long, wide, spread)]
    assert fit == [True, False, True, False]
    assert reducer_for(context, small, None) == (context.model, False)
    assert encode_or_header(context, long, None) == header(long)
    for other in (torch.eye(99).to_sparse(), torch.empty(999, device="meta"), "x" * 999, None):
        assert not is_exact(other)
        assert not is_dense(other)
    assert is_dense(small)


class Alarm:
    """An object during whose loading a signal comes."""

    loads: ClassVar[list[None]] = []

    def __setstate__(self, state: object) -> None:
        self.loads.append(None)
        raise RuntimeError("a signal")

    def __getstate__(self) -> object:
        return 1


def test_failures_are_raised_with_rank_and_reason() -> None:
    frames = [encode(1), failure("é is stuck \udc80"), frame_or_reason(encode, 2**70)]
    with pytest.raises(PayloadError, match=r"^é is stuck"):
        decode(frames[1], CPU)
    with pytest.raises(PayloadError, match=r"^f got .*rank 5: é is stuck .*; rank 7: .*64 bits"):
        raise_failures(frames, lambda: [3, 5, 7], "f")
    with pytest.raises(PayloadError, match=r"^f got .*rank 5: é is stuck") as caught:
        decode_all(frames, lambda: [3, 5, 7], "f", CPU)
    assert caught.value.__context__ is None
    with pytest.raises(PayloadError, match="received a damaged frame"):
        decode_all([frames[0], b"i"], lambda: [3, 5], "f", CPU)
    raise_failures(frames[:1], lambda: [0], "f")
    with pytest.raises(PayloadError, match="a signal"):
        decode_all([encode(Alarm())] * 2, lambda: [0, 1], "f", CPU)
    assert len(Alarm.loads) == 1  # the error isn't lost in a second try
    assert decode_all(frames[:1] * 2, lambda: [0, 1], "f", CPU) == [1, 1]


PLAIN_OF_ALL_KINDS = {"a": [torch.ones(2), 1, b"x", "s", Path("p"), 2**70, {1, 1j}]}


def test_no_pickle_refuses_objects_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    third = Fraction(1, 3)
    frame = encode([third])
    for flag in ("0", ""):
        monkeypatch.setenv("UNISONO_NO_PICKLE", flag)
        assert back(third) == third
    monkeypatch.setenv("UNISONO_NO_PICKLE", "1")
    for call in (lambda: encode(third), lambda: encode([third]), lambda: decode(frame, CPU)):
        with pytest.raises(PayloadError, match=r"a Fraction needs|object .* UNISONO_NO_PICKLE=1"):
            call()
    same(back(PLAIN_OF_ALL_KINDS), PLAIN_OF_ALL_KINDS)


def test_no_pickle_reads_values_with_a_reader_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = pickle.dumps(print, 5)
    frame = b"v" + struct.pack("<I", zlib.crc32(evil)) + evil
    assert decode(frame, CPU) is print  # who belongs to the job may send anything
    monkeypatch.setenv("UNISONO_NO_PICKLE", "1")
    with pytest.raises(PayloadError, match=r"builtins.print needs pickle, which UNISONO_NO_PICKLE"):
        decode(frame, CPU)
    for value in PLAIN:
        same(back(value), value)
    same(back(PLAIN_OF_ALL_KINDS), PLAIN_OF_ALL_KINDS)


def test_no_pickle_lets_a_frame_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_NO_PICKLE", "1")
    for module, name in (("unisono.payload.tensors", "put_together"), ("builtins", "complex")):
        evil = f"c{module}\n{name}\n".encode() + b"(NN}S'__module__'\nS'os'\nstb."  # BUILD
        evil = evil.replace(b"(NN}", b"(N}")
        with pytest.raises(PayloadError, match="received a damaged frame: (Attribute|Type)Error"):
            decode(b"v" + struct.pack("<I", zlib.crc32(evil)) + evil, CPU)
    same(back([torch.ones(2)]), [torch.ones(2)])


def test_what_the_device_has_no_memory_for_isnt_a_damaged_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def has_no_room(*args: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    frame = encode([torch.ones(2)])
    monkeypatch.setattr(tensors_of_payload, "from_bytes", has_no_room)
    with pytest.raises(torch.OutOfMemoryError):
        decode(frame, CPU)


def test_a_pickler_that_has_seen_much_is_not_used_again() -> None:
    encode(["x"])
    (pickler,) = codec._idle[-1:]
    encode([str(index) for index in range(10_000)])
    assert pickler not in codec._idle


def test_the_error_of_an_object_has_nothing_of_ours_in_its_chain() -> None:
    with pytest.raises(PayloadError) as caught:
        encode([threading.Lock()])
    assert type(caught.value.__cause__) is TypeError
    assert caught.value.__cause__.__context__ is None


def test_threads_encode_at_once_and_one_within_another() -> None:
    class Nested:
        def __reduce__(self) -> Any:
            return bytes, (encode(["inner", Path("p")]),)

    assert back([1, Nested()])[1] == encode(["inner", Path("p")])
    values = [{"at": [index, Path(str(index))]} for index in range(300)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(back, values)) == values


CORPUS = [
    *(encode(value) for value in (None, True, 7, 0.5, 1j, "é", Path("p"), b"xy", bytearray(b"z"))),
    encode([1, "a", None]), encode((2.0, [2**70])), encode({"k": 1, 2: (None,)}),
    encode(torch.arange(6, dtype=torch.int16).reshape(2, 3)), encode(torch.empty(0, 3)),
    encode([torch.tensor(1.5), torch.tensor([True])]), header(torch.zeros(2, 3)), failure("why"),
    encode(Record("r", {1})), encode(np.arange(5)), encode([Record("t", torch.ones(3)), Color.RED]),
]  # fmt: skip


@contextmanager
def at_most(size_bytes: int) -> Iterator[None]:
    """Let what is done here take no more memory."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size_bytes
    finally:
        tracemalloc.stop()


def survives(frame: bytes) -> None:
    try:
        value = decode(frame, CPU)
    except PayloadError:
        return
    if isinstance(value, torch.Tensor):
        assert value.numel() * value.itemsize <= len(frame)


@pytest.mark.parametrize("frame", CORPUS, ids=lambda frame: f"{frame[:1]!r} {len(frame)}")
def test_every_damage_of_a_frame_is_a_value_or_a_payload_error(frame: bytes) -> None:
    with at_most(2**24):
        has_end = frame[:1] not in (b"s", b"b")  # of which any part is one
        for other in (*(frame[:end] for end in range(len(frame)) if has_end), frame + b"\0"):
            with pytest.raises(PayloadError) if has_end else nullcontext():
                decode(other, CPU)
        for place in range(len(frame)):
            for flip in (1, 2, 4, 8, 16, 32, 64, 128, 255):
                survives(frame[:place] + bytes([frame[place] ^ flip]) + frame[place + 1 :])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.text("NTFidsbvpqoxhe\0\1\2", max_size=60).map(str.encode))
def test_any_bytes_are_a_value_or_a_payload_error(frame: bytes) -> None:
    survives(frame)


def tensor_head(tag: bytes, code: int, *shape: int) -> bytes:
    return tag + struct.pack(f"<BBB{len(shape)}q", code, 0, len(shape), *shape)


LIES = [
    *(tag + struct.pack("<IQ", 0, 2**60) for tag in (b"o", b"q")),
    *(tag + struct.pack("<I", 0) for tag in (b"o", b"p", b"q", b"v")),
    *(b"v" + struct.pack("<I", zlib.crc32(data)) + data for data in (b"\x80\x05", b"N", b".")),
    b"v" + struct.pack("<I", 0) + pickle.dumps("x"),
    b"i" + bytes(7),
    *(tensor_head(tag, 1, 2**60) for tag in (b"x", b"h")),
    *(tensor_head(tag, 5, 2**40, 2**40) for tag in (b"x", b"h")),
    *(tensor_head(tag, 5, 0, 2**62, 2**62) for tag in (b"x", b"h")),
    *(tensor_head(tag, 1, -1, -1) + b"!" for tag in (b"x", b"h")),
    *(tensor_head(tag, 255, 1) + b"!" for tag in (b"x", b"h")),
    b"\xff",
    b"",
]


@pytest.mark.parametrize("frame", LIES, ids=repr)
def test_a_frame_that_lies_is_refused_before_memory_is_taken(frame: bytes) -> None:
    with at_most(2**20), pytest.raises(PayloadError):
        decode(frame, CPU)


def test_a_damaged_pickle_isnt_loaded() -> None:
    frame = encode(Fraction(1, 3))
    for other in (frame.replace(b"Fraction", b"Decimal_"), frame[:-2] + b"..", frame[:-1] + b"0"):
        assert other != frame
        with pytest.raises(PayloadError, match=r"checksum"):
            decode(other, CPU)


def test_an_object_that_cant_be_made_here_is_a_payload_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = types.ModuleType("elsewhere")
    exec("class Thing: pass", vars(elsewhere))
    with monkeypatch.context() as there:
        there.setitem(sys.modules, "elsewhere", elsewhere)
        frame = encode([elsewhere.Thing()])
    with pytest.raises(PayloadError, match=r"cannot be unpickled here: ModuleNotFoundError"):
        decode(frame, CPU)


def test_memory_is_shown_copied_and_checked() -> None:
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    view = view_bytes(tensor)
    assert bytes(view) == to_bytes(tensor)
    view[0] = 9
    assert tensor[0, 0] == 9
    assert len(view_bytes(torch.empty(0, 3))) == 0
    for data in (b"123", b"12345", b""):
        with pytest.raises(PayloadError, match=r"bytes aren't a tensor"):
            from_bytes(data, torch.int32, (1,))
    for wrong in (torch.ones(2, 3).t(), torch.ones(2, device="meta")):
        with pytest.raises(PayloadError, match="the memory of a Tensor can't be read as it is"):
            to_bytes(wrong)


def test_what_torch_func_wraps_has_no_memory_to_send() -> None:
    found = list[bool]()

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(is_dense(x))
        return x

    torch.func.vmap(look)(torch.ones(2))
    assert found == [False]
