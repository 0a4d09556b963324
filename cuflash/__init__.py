"""Exact attention on raw CUDA, for every array library that speaks DLPack."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout cuda_src/, interop/ and cli.py lie beside this package; a wheel carries them inside it.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "cuda_src").is_dir():
    __path__.append(str(_checkout))
