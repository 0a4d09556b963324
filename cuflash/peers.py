"""Which attention libraries the benchmark knows: one table, called on the very arrays that cuflash is given.

Nothing here is needed to use cuflash: a peer that cannot be imported, or refuses a shape, is left out of the result
with its reason. Only the rooms named ``peers_…`` import torch, jax and the rest, and only when the benchmark asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from array_api_compat import array_namespace

from cuflash.peers_base import Contestant, Peer
from cuflash.peers_jax import FlashAttention3Jax, JaxCudnn
from cuflash.peers_torch import FlashAttention, TorchSDPA
from cuflash.presets import Shape

__all__ = ["PEERS", "chosen", "contestants", "numbers_of"]

_SAME = 0.05  # of the largest value: far above what rounding to 16 bits does, far below another mask or scale

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        TorchSDPA("cudnn", "CUDNN_ATTENTION"),
        TorchSDPA("fa2", "FLASH_ATTENTION"),
        TorchSDPA("efficient", "EFFICIENT_ATTENTION"),
        FlashAttention("fa3", "flash_attn_interface", -1),
        FlashAttention("fa4", "flash_attn.cute", None),
        FlashAttention3Jax(),
        JaxCudnn(),
    )
}


def chosen(wanted: str) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers meant by ``auto``, ``none`` or a comma-separated list, and for each one absent the reason.

    Raises:
        KeyError: a name that is not in the table; the message lists those that are.
    """
    names = (
        list(PEERS) if wanted == "auto" else [] if wanted == "none" else [name.strip() for name in wanted.split(",")]
    )
    if unknown := [name for name in names if name not in PEERS]:
        raise KeyError(f"no peer {', '.join(unknown)}; there are: auto, none, {', '.join(PEERS)}")
    absent = {name: why for name in names if (why := PEERS[name].missing())}
    return {name: PEERS[name] for name in names if name not in absent}, absent


def contestants(
    peers: Mapping[str, Peer], arrays: Mapping[str, Any], shape: Shape, mode: str, wanted: Sequence[Any] = ()
) -> tuple[list[Contestant], dict[str, str]]:
    """The peers that ran the shape once and found what is ``wanted``, and for each of the others the reason."""
    ready, refused = [], {}
    for name, peer in peers.items():
        try:
            contestant = peer.prepare(arrays, shape, mode)
            peer.poison(wanted)
            _compare(contestant.call(), wanted)
            ready.append(contestant)
        except Exception as error:  # refusals come in every type there is
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return ready, refused


def _compare(found: Any, wanted: Sequence[Any]) -> None:
    """Raises unless a peer computed the same thing: a fast answer to another question is no time to beat."""
    results = found if isinstance(found, (tuple, list)) else (found,)
    for theirs, ours in zip(results, wanted, strict=False):
        if tuple(theirs.shape) != tuple(ours.shape):
            raise ValueError(f"computes something else: shape {tuple(theirs.shape)}, not {tuple(ours.shape)}")
        library = array_namespace(ours)
        numbers = ours.astype("float32")
        difference = numbers_of(theirs, library) - numbers
        scale, distance = (float(library.max(library.abs(x))) for x in (numbers, difference))
        if not distance <= _SAME * scale:
            raise ValueError(f"computes something else: {distance:.3g} apart where values reach {scale:.3g}")


def numbers_of(result: Any, library: Any) -> Any:
    """A peer's result as a float32 array of NumPy or CuPy, whichever ``library`` is."""
    return library.from_dlpack(result.float() if hasattr(result, "float") else result.astype("float32"))
