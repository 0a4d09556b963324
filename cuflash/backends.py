"""The two places a plan can run, by the names the command line uses: ``gpu`` and ``emulator``."""

from __future__ import annotations

from typing import Any

from cuflash.architectures import ARCHITECTURES, Device
from cuflash.eager import Eager

__all__ = ["ANY_FAMILY", "DEVICES", "default_device", "eager_on", "why_no_gpu"]

DEVICES = ("gpu", "emulator")
ANY_FAMILY = "auto"


def why_no_gpu() -> str:
    """Why no GPU can be used here; empty when one can."""
    try:
        import cupy
    except ImportError as error:
        return f'CuPy is not importable ({error}); pip install "cuflash[cuda12]" or "cuflash[cuda13]"'
    except Exception as error:  # CuPy makes its cache folder at import: CUPY_CACHE_DIR or a home that cannot be written
        return f"CuPy is not importable ({type(error).__name__}: {error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CUDA does not start ({error})"
    return "" if count else "CUDA reports no device"


def default_device() -> str:
    """gpu where there is one, else emulator."""
    return "emulator" if why_no_gpu() else "gpu"


def eager_on(device: str, family: str = ANY_FAMILY) -> Eager:
    """The eager path on one of ``DEVICES``, with one kernel family only unless ``family`` is ``auto``.

    Raises:
        UnsupportedError: the family does not run there.
    """
    if device == "emulator":
        from cuflash.host import NumpyBackend

        return Eager(NumpyBackend() if family == ANY_FAMILY else NumpyBackend(_emulated_with(family)))
    from cuflash.launch import CupyBackend

    class Restricted(CupyBackend):
        """The same backend on a device that has one family only."""

        def device(self, arrays: dict[str, Any]) -> Device:
            return super().device(arrays).restricted(family)

    return Eager(CupyBackend() if family == ANY_FAMILY else Restricted())


def _emulated_with(family: str) -> Device:
    capable = (row.capability for row in ARCHITECTURES.values() if family in row.families)
    return Device.emulated(next(capable, (8, 0))).restricted(family)
