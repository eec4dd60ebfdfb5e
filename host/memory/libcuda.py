"""The CUDA driver itself, through ctypes: loaded when it is asked for, and by nothing else.

Calls give up the GIL while they run. Names with a version (``_v2``) are those that cuda.h of today maps to.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Any, Final

from meshfusion.host.memory.cuda_driver import (
    Allocation,
    CudaError,
    DeviceAttribute,
    DmaBufMapping,
    PointerAttribute,
)
from meshfusion.jbof.errors import UnsupportedError

LIBRARY: Final = "libcuda.so.1"
MIN_VERSION: Final = 11070  # CUDA 11.7: cuMemGetHandleForAddressRange

_NOT_READY: Final = 600  # CUDA_ERROR_NOT_READY
_DMA_BUF_FD: Final = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_CURRENT_CONTEXT: Final = 0  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
_TO_OWNER: Final = 100  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
_DISABLE_TIMING: Final = 2  # CU_EVENT_DISABLE_TIMING
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING
_PCI_ADDRESS_BYTES: Final = 32  # 13 are needed

# CUdeviceptr is an unsigned long long; contexts, streams and events are pointers; enums are ints.
_ADDRESS: Final = c_ulonglong
_PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuPointerGetAttribute": (c_void_p, c_int, _ADDRESS),
    "cuPointerSetAttribute": (c_void_p, c_int, _ADDRESS),
    "cuMemGetAddressRange_v2": (POINTER(_ADDRESS), POINTER(c_size_t), _ADDRESS),
    "cuMemGetHandleForAddressRange": (c_void_p, _ADDRESS, c_size_t, c_int, c_ulonglong),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuFlushGPUDirectRDMAWrites": (c_int, c_int),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _ADDRESS, c_size_t, c_void_p),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
}


def load_cuda(name: str = LIBRARY) -> LibCuda:
    """Raises :class:`~meshfusion.jbof.errors.UnsupportedError`: there is no driver, no device, or it is too old."""
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise UnsupportedError(
            f"the CUDA driver cannot be loaded: {error}", next_step="Install the NVIDIA driver (libcuda.so.1)."
        ) from error
    return LibCuda(library)


class LibCuda:
    """Keeps :class:`~meshfusion.host.memory.cuda_driver.CudaDriver` over ``library``. Raises as :func:`load_cuda`."""

    def __init__(self, library: Any) -> None:
        self._functions: dict[str, Any] = {}
        version = self._open(library)
        missing = [name for name in _PROTOTYPES if name not in self._functions]
        if version < MIN_VERSION or missing:
            lacks = f", without {', '.join(missing)}" if missing else ""
            raise UnsupportedError(
                f"the CUDA driver is of version {_spelled(version)}{lacks}",
                next_step=f"Install a driver of CUDA {_spelled(MIN_VERSION)} or newer.",
            )
        self.version = version
        if self.device_count() == 0:
            raise UnsupportedError(
                "the CUDA driver knows no device", next_step="Check nvidia-smi and CUDA_VISIBLE_DEVICES."
            )

    def _open(self, library: Any) -> int:
        """Its version."""
        for name, arguments in _PROTOTYPES.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, c_int
                self._functions[name] = function
        version = c_int()
        try:
            self._call("cuInit", 0)
            self._call("cuDriverGetVersion", byref(version))
        except (CudaError, KeyError) as error:
            raise UnsupportedError(
                f"the CUDA driver does not start: {error}", next_step="Check that nvidia-smi shows a device."
            ) from error
        return version.value

    def device_count(self) -> int:
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return count.value

    def device_attribute(self, device: int, attribute: DeviceAttribute) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), attribute, device)
        return value.value

    def pci_address(self, device: int) -> str:
        address = ctypes.create_string_buffer(_PCI_ADDRESS_BYTES)
        self._call("cuDeviceGetPCIBusId", address, _PCI_ADDRESS_BYTES, device)
        return address.value.decode().lower()

    def pointer_attribute(self, address: int, attribute: PointerAttribute) -> int:
        """Of any width up to 8 bytes: what the driver does not write stays zero (little-endian)."""
        value = c_uint64()
        self._call("cuPointerGetAttribute", byref(value), attribute, address)
        return value.value

    def allocation(self, address: int) -> Allocation:
        start, length_bytes = _ADDRESS(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(start), byref(length_bytes), address)
        return Allocation(start.value, length_bytes.value)

    def push_context(self, context: int) -> None:
        self._call("cuCtxPushCurrent_v2", context)

    def pop_context(self) -> None:
        self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def set_sync_memops(self, address: int) -> None:
        self._call("cuPointerSetAttribute", byref(c_uint(1)), PointerAttribute.SYNC_MEMOPS, address)

    def export_dma_buf(self, address: int, length_bytes: int, mapping: DmaBufMapping) -> int:
        fd = c_int(-1)
        self._call("cuMemGetHandleForAddressRange", byref(fd), address, length_bytes, _DMA_BUF_FD, mapping)
        return fd.value

    def close_dma_buf(self, fd: int) -> None:
        os.close(fd)

    def flush_rdma_writes(self) -> None:
        self._call("cuFlushGPUDirectRDMAWrites", _CURRENT_CONTEXT, _TO_OWNER)

    def create_stream(self) -> int:
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        assert stream.value is not None
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def pin_host(self, address: int, length_bytes: int) -> None:
        self._call("cuMemHostRegister_v2", address, length_bytes, 0)

    def unpin_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def copy_to_device(self, to: int, source: int, length_bytes: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", to, source, length_bytes, stream)

    def copy_from_device(self, to: int, source: int, length_bytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", to, source, length_bytes, stream)

    def create_event(self) -> int:
        event = c_void_p()
        self._call("cuEventCreate", byref(event), _DISABLE_TIMING)
        assert event.value is not None
        return event.value

    def record_event(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def is_event_done(self, event: int) -> bool:
        status = int(self._functions["cuEventQuery"](event))
        if status not in (0, _NOT_READY):
            raise CudaError("cuEventQuery", self._name(status))
        return status == 0

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def _call(self, name: str, *arguments: Any) -> None:
        status = int(self._functions[name](*arguments))
        if status != 0:
            raise CudaError(name, self._name(status))

    def _name(self, status: int) -> str:
        name = c_char_p()
        get_name = self._functions.get("cuGetErrorName")
        if get_name is None or get_name(status, byref(name)) != 0 or name.value is None:
            return f"error {status}"
        return name.value.decode()


def _spelled(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
