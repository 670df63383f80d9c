"""What an exception of user code means for the GPU: that its context is lost, or that a batch was too large for it.

Some errors of kernels (a failed assertion, an illegal address, an uncorrectable memory error) end a CUDA context: every
later call fails with the same error, and only a new process can use the GPU again. CUDA calls them sticky.
"""

from __future__ import annotations

import ctypes
import os

DRIVER = "libcuda.so.1"
# Of CUresult (cuda.h), those after which "the process must be terminated and relaunched": uncorrectable ECC and NVLink
# errors, contained errors, illegal addresses, launch timeouts, assertions, hardware stack errors, illegal instructions,
# misaligned addresses, invalid address spaces, invalid program counters, failed launches, leaks of tensor memory, and
# errors of external devices.
STICKY = frozenset([214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 911])
OUT_OF_MEMORY = "OutOfMemoryError"  # of torch and cupy
EXHAUSTED = "RESOURCE_EXHAUSTED"  # what XLA's errors begin with


def is_out_of_memory(error):
    """Whether an exception says that memory, of the process or of a GPU, did not suffice."""
    if isinstance(error, MemoryError) or any(kind.__name__ == OUT_OF_MEMORY for kind in type(error).__mro__):
        return True
    return type(error).__name__ == "XlaRuntimeError" and any(str(each).startswith(EXHAUSTED) for each in error.args)


def is_lost():
    """Whether this process has a CUDA context that an error has ended. Waits for the kernels that run."""
    driver = _driver()
    return driver is not None and any(_state_of(driver, device) in STICKY for device in _devices(driver))


class _Library(ctypes.Structure):
    """`struct dl_phdr_info` of link.h."""

    _fields_ = [
        ("addr", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("phdr", ctypes.c_void_p),
        ("phnum", ctypes.c_uint16),
        ("adds", ctypes.c_ulonglong),  # libraries that the process has ever loaded
        ("subs", ctypes.c_ulonglong),
    ]


# Both keep the GIL: the linker holds a lock meanwhile.
_VISIT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)
_process = ctypes.PyDLL(None)
_loads = [0, -1]  # now, and when the driver was last looked for in vain


@_VISIT
def _count(library, size, data):
    _loads[0] = library.contents.adds
    return 1  # no further libraries


def _driver():
    """The driver's library if this process has loaded it; None otherwise."""
    _process.dl_iterate_phdr(_count, None)
    if _loads[0] == _loads[1]:  # to look costs 30 us, which rows that raise should not cost
        return None
    try:
        return ctypes.CDLL(DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        _loads[1] = _loads[0]
        return None


def _devices(driver):
    count = ctypes.c_int()
    return range(count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0)


def _state_of(driver, device):
    """The CUresult of the device's primary context, which all frameworks use; 0 if it has none."""
    flags, is_active, context = ctypes.c_uint(), ctypes.c_int(), ctypes.c_void_p()
    state = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
    if state or not is_active.value:
        return state
    state = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if state:
        return state
    try:
        state = driver.cuCtxPushCurrent_v2(context)
        if state:
            return state
        try:
            return driver.cuCtxSynchronize()
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)
