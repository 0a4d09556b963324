"""Exact attention on raw CUDA, for every array library that speaks DLPack."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a checkout cuda_src/, interop/ and cli.py lie beside this package; a wheel carries them inside it.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "cuda_src").is_dir():
    __path__.append(str(_checkout))

if TYPE_CHECKING:
    from cuflash.absent import flash_attention_kvcache, flash_attention_varlen
    from cuflash.attention import explain, flash_attention, flash_attention_backward, flash_attention_vjp
    from cuflash.eager import Gradients
    from cuflash.errors import (
        ArgumentError,
        ArgumentTypeError,
        CompileError,
        CuflashError,
        DeviceError,
        EmulatorError,
        UnsupportedError,
    )
    from cuflash.masks import Causal, Full, Mask, SlidingWindow
    from cuflash.merge import merge_states
    from cuflash.scores import Alibi, Identity, Scaled, Score, Softcap, Then

# Public name -> module; opened on first use, so that importing cuflash costs nothing and touches no GPU.
_HOMES = {
    **dict.fromkeys(
        ("explain", "flash_attention", "flash_attention_backward", "flash_attention_vjp"), "cuflash.attention"
    ),
    **dict.fromkeys(("flash_attention_kvcache", "flash_attention_varlen"), "cuflash.absent"),
    "Gradients": "cuflash.eager",
    **dict.fromkeys(
        (
            "ArgumentError",
            "ArgumentTypeError",
            "CompileError",
            "CuflashError",
            "DeviceError",
            "EmulatorError",
            "UnsupportedError",
        ),
        "cuflash.errors",
    ),
    **dict.fromkeys(("Causal", "Full", "Mask", "SlidingWindow"), "cuflash.masks"),
    "merge_states": "cuflash.merge",
    **dict.fromkeys(("Alibi", "Identity", "Scaled", "Score", "Softcap", "Then"), "cuflash.scores"),
}
__all__ = [
    "Alibi",
    "ArgumentError",
    "ArgumentTypeError",
    "Causal",
    "CompileError",
    "CuflashError",
    "DeviceError",
    "EmulatorError",
    "Full",
    "Gradients",
    "Identity",
    "Mask",
    "Scaled",
    "Score",
    "SlidingWindow",
    "Softcap",
    "Then",
    "UnsupportedError",
    "explain",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_kvcache",
    "flash_attention_varlen",
    "flash_attention_vjp",
    "merge_states",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cuflash' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
