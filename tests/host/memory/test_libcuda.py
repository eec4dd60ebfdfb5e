"""The driver through ctypes: its numbers are those of cuda.h, and its calls have the C types of cuda.h.

The stand-in for the library is made of real C functions, so that arguments pass through the calling convention.
"""

from __future__ import annotations

import ctypes
import enum
import importlib.util
import os
import re
from collections.abc import Callable
from ctypes import c_char, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

import pytest

from meshfusion.host.memory import libcuda
from meshfusion.host.memory.cuda_driver import (
    Allocation,
    CudaError,
    DeviceAttribute,
    DmaBufMapping,
    FlushOption,
    MemoryType,
    PointerAttribute,
    RdmaOrder,
)
from meshfusion.host.memory.libcuda import LibCuda, load_cuda
from meshfusion.jbof.errors import UnsupportedError

ADDRESS = 0x7F12_3456_7890_0000
HANDLE = 0x7FFF_1234_5678  # does not fit into an int

# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def header() -> str:
    """NVIDIA's cuda.h, as triton, which the engine needs, brings it."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "backends/nvidia/include/cuda.h").read_text()


def number_in(header: str, name: str) -> int:
    (value,) = set(re.findall(rf"^\s*{name}\s*=\s*([0-9xA-Fa-f<]+)", header, re.MULTILINE))
    base, _, shift = value.partition("<<")
    return int(base, 0) << int(shift or "0", 0)


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        (DeviceAttribute, "CU_DEVICE_ATTRIBUTE_"),
        (PointerAttribute, "CU_POINTER_ATTRIBUTE_"),
        (MemoryType, "CU_MEMORYTYPE_"),
        (RdmaOrder, "CU_GPU_DIRECT_RDMA_WRITES_ORDERING_"),
        (FlushOption, "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_"),
    ],
)
def test_enumerations_are_those_of_the_header(header: str, kind: type[enum.IntEnum], prefix: str) -> None:
    assert {one.name: int(one) for one in kind} == {one.name: number_in(header, prefix + one.name) for one in kind}


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        (DmaBufMapping.PCIE, "CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE"),
        (libcuda._NOT_READY, "CUDA_ERROR_NOT_READY"),
        (libcuda._DMA_BUF_FD, "CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD"),
        (libcuda._CURRENT_CONTEXT, "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX"),
        (libcuda._TO_OWNER, "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER"),
        (libcuda._DISABLE_TIMING, "CU_EVENT_DISABLE_TIMING"),
        (libcuda._NON_BLOCKING, "CU_STREAM_NON_BLOCKING"),
    ],
)
def test_constants_are_those_of_the_header(header: str, ours: int, name: str) -> None:
    assert int(ours) == number_in(header, name)


C_TYPES = {
    "unsigned int": c_uint,
    "int": c_int,
    "CUdevice": c_int,
    "size_t": c_size_t,
    "unsigned long long": c_ulonglong,
    "CUdeviceptr": c_ulonglong,
    "CUcontext": c_void_p,
    "CUstream": c_void_p,
    "CUevent": c_void_p,
    "void *": c_void_p,
    "const void *": c_void_p,
    "int *": ctypes.POINTER(c_int),
    "char *": c_char_p,
    "CUstream *": ctypes.POINTER(c_void_p),
    "size_t *": ctypes.POINTER(c_size_t),
    "CUdeviceptr *": ctypes.POINTER(c_ulonglong),
    "CUcontext *": ctypes.POINTER(c_void_p),
    "CUevent *": ctypes.POINTER(c_void_p),
    "const char **": ctypes.POINTER(c_char_p),
}


@pytest.mark.parametrize("name", sorted(libcuda._PROTOTYPES))
def test_prototypes_are_those_of_the_header(header: str, name: str) -> None:
    plain = name.removesuffix("_v2")
    if name != plain:
        # Copies have another version for those who ask for a default stream per thread.
        meant = rf"#define {plain}\s+(__CUDA_API_PTSZ\()?{name}\b"
        assert re.search(meant, header), "the version that the header means by the plain name"
    declared = re.search(rf"^CUresult CUDAAPI {plain}\(([^)]*)\);", header, re.MULTILINE)
    assert declared is not None
    found = []
    for parameter in declared[1].split(","):
        words = re.fullmatch(r"\s*(.*?)\s*(\**)\s*\w+\s*", parameter)
        assert words is not None
        found.append(C_TYPES.get(" ".join(filter(None, words.groups())), c_int))  # all others are enumerations
    assert list(libcuda._PROTOTYPES[name]) == found


# ---- calls -----------------------------------------------------------------------------------------------------------


class Library:
    """C functions by the driver's names. ``status``: what a call answers instead of success. ``log``: what it got."""

    def __init__(self, *, version: int = 12080, devices: int = 2, lacks: str = "") -> None:
        self.status: dict[str, int] = {}
        self.log: list[tuple[Any, ...]] = []
        answers: dict[str, Callable[..., None]] = {
            "cuDriverGetVersion": lambda to: _put(to, c_int, version),
            "cuDeviceGetCount": lambda to: _put(to, c_int, devices),
            "cuGetErrorName": lambda status, to: _put(to, c_char_p, b"CUDA_ERROR_OF_TEST"),
            "cuDeviceGetAttribute": lambda to, attribute, device: _put(to, c_int, 100 * device + attribute),
            "cuPointerGetAttribute": self._pointer_attribute,
            "cuPointerSetAttribute": lambda at, *_: self.log.append(("value", c_uint.from_address(at).value)),
            "cuMemGetAddressRange_v2": self._range,
            "cuMemGetHandleForAddressRange": lambda to, *_: _put(to, c_int, 77),
            "cuEventCreate": lambda to, flags: _put(to, c_void_p, HANDLE),
            "cuStreamCreate": lambda to, flags: _put(to, c_void_p, HANDLE),
            "cuDeviceGetPCIBusId": lambda to, *_: _put(to, c_char * 13, b"0000:3B:00.0"),
            "cuCtxPopCurrent_v2": lambda to: _put(to, c_void_p, HANDLE),
        }
        for name, arguments in libcuda._PROTOTYPES.items():
            if name != lacks:
                # Pointers arrive as addresses.
                is_pointer = [issubclass(kind, ctypes._Pointer) or kind is c_char_p for kind in arguments]
                types = [c_void_p if pointer else kind for kind, pointer in zip(arguments, is_pointer, strict=True)]
                setattr(self, name, self._function(name, types, answers.get(name, lambda *_: None)))

    def _function(self, name: str, types: list[Any], answer: Callable[..., None]) -> Any:
        def call(*arguments: Any) -> int:
            self.log.append((name, *arguments))
            answer(*arguments)
            return self.status.get(name, 0)

        kept = ctypes.CFUNCTYPE(c_int, *types)(call)
        address = ctypes.cast(kept, c_void_p).value
        assert address is not None
        function = ctypes.CFUNCTYPE(c_int)(address)  # knows nothing of its arguments, as a library's
        function._kept = kept  # type: ignore[attr-defined]
        return function

    def _pointer_attribute(self, to: int, attribute: int, address: int) -> None:
        """As the driver: four bytes for numbers, eight for pointers."""
        if attribute == PointerAttribute.CONTEXT:
            _put(to, c_void_p, HANDLE)
        else:
            _put(to, c_int, attribute)

    def _range(self, start: int, length: int, address: int) -> None:
        _put(start, c_ulonglong, ADDRESS)
        _put(length, c_size_t, 1 << 40)


def _put(address: int, kind: Any, value: Any) -> None:
    kind.from_address(address).value = value


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def cuda(library: Library) -> LibCuda:
    made = LibCuda(library)
    del library.log[:]
    return made


def test_it_starts_before_anything_else(library: Library) -> None:
    assert LibCuda(library).version == 12080
    assert library.log[0] == ("cuInit", 0)


def test_answers_of_any_width_are_read(cuda: LibCuda) -> None:
    assert cuda.device_attribute(3, DeviceAttribute.DMA_BUF_SUPPORTED) == 424
    assert cuda.pointer_attribute(ADDRESS, PointerAttribute.CONTEXT) == HANDLE
    assert cuda.pointer_attribute(ADDRESS, PointerAttribute.DEVICE_ORDINAL) == 9
    assert cuda.allocation(ADDRESS + 5) == Allocation(ADDRESS, 1 << 40)


def test_a_dma_buf_is_asked_for_with_its_flag(cuda: LibCuda, library: Library) -> None:
    for mapping in DmaBufMapping:
        assert cuda.export_dma_buf(ADDRESS, 1 << 33, mapping) == 77
        assert library.log[-1][2:] == (ADDRESS, 1 << 33, 1, mapping)


def test_a_dma_buf_is_closed_as_the_file_that_it_is(cuda: LibCuda) -> None:
    fd = os.memfd_create("dma-buf")
    cuda.close_dma_buf(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_contexts_events_and_flushes(cuda: LibCuda, library: Library) -> None:
    cuda.push_context(HANDLE)
    event = cuda.create_event()
    cuda.record_event(event, 0)
    assert cuda.is_event_done(event)
    library.status["cuEventQuery"] = 600
    assert not cuda.is_event_done(event)
    cuda.flush_rdma_writes()
    cuda.set_sync_memops(ADDRESS)
    cuda.destroy_event(event)
    cuda.pop_context()
    assert [entry if entry[0] not in ("cuEventCreate", "cuPointerSetAttribute") else entry[0] for entry in library.log][
        :-1
    ] == [
        ("cuCtxPushCurrent_v2", HANDLE),
        "cuEventCreate",
        ("cuEventRecord", HANDLE, None),
        ("cuEventQuery", HANDLE),
        ("cuEventQuery", HANDLE),
        ("cuFlushGPUDirectRDMAWrites", 0, 100),
        "cuPointerSetAttribute",
        ("value", 1),
        ("cuEventDestroy_v2", HANDLE),
    ]
    assert library.log[-1][0] == "cuCtxPopCurrent_v2"


def test_copies_go_between_pinned_memory_and_the_device_in_a_stream_of_their_own(
    cuda: LibCuda, library: Library
) -> None:
    host = ADDRESS + (1 << 40)
    stream = cuda.create_stream()
    cuda.pin_host(host, 1 << 33)
    cuda.copy_to_device(ADDRESS, host, 1 << 32, stream)
    cuda.copy_from_device(host, ADDRESS, 1 << 32, stream)
    cuda.unpin_host(host)
    cuda.destroy_stream(stream)
    assert library.log[0][0] == "cuStreamCreate"
    assert library.log[0][2] == 1
    assert library.log[1:] == [
        ("cuMemHostRegister_v2", host, 1 << 33, 0),
        ("cuMemcpyHtoDAsync_v2", ADDRESS, host, 1 << 32, HANDLE),
        ("cuMemcpyDtoHAsync_v2", host, ADDRESS, 1 << 32, HANDLE),
        ("cuMemHostUnregister", host),
        ("cuStreamDestroy_v2", HANDLE),
    ]


def test_the_pci_address_is_spelled_as_sysfs_does(cuda: LibCuda, library: Library) -> None:
    assert cuda.pci_address(3) == "0000:3b:00.0"
    assert library.log[-1][2:] == (32, 3)


def test_errors_have_the_driver_s_name_and_the_call_s(cuda: LibCuda, library: Library) -> None:
    library.status |= {"cuFlushGPUDirectRDMAWrites": 801, "cuEventQuery": 700}
    with pytest.raises(CudaError, match="cuFlushGPUDirectRDMAWrites failed with CUDA_ERROR_OF_TEST"):
        cuda.flush_rdma_writes()
    with pytest.raises(CudaError, match="cuEventQuery failed"):
        cuda.is_event_done(HANDLE)
    library.status["cuGetErrorName"] = 1
    with pytest.raises(CudaError, match="failed with error 801"):
        cuda.flush_rdma_writes()


def test_no_driver_one_that_is_too_old_and_one_without_devices() -> None:
    with pytest.raises(UnsupportedError, match="cannot be loaded"):
        load_cuda("libcuda.so.that.is.not.there")
    with pytest.raises(UnsupportedError, match=r"version 11\.4") as caught:
        LibCuda(Library(version=11040))
    assert "CUDA 11.7 or newer" in caught.value.next_step
    with pytest.raises(UnsupportedError, match=r"12\.8, without cuMemGetHandleForAddressRange"):
        LibCuda(Library(lacks="cuMemGetHandleForAddressRange"))
    with pytest.raises(UnsupportedError, match="knows no device"):
        LibCuda(Library(devices=0))
    broken = Library()
    broken.status["cuInit"] = 100
    with pytest.raises(UnsupportedError, match=r"does not start: .*cuInit failed with CUDA_ERROR_OF_TEST"):
        LibCuda(broken)
    with pytest.raises(UnsupportedError, match="does not start"):
        LibCuda(Library(lacks="cuInit"))
