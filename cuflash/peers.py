"""Which attention libraries the benchmark knows: one table, called on the very arrays that cuflash is given.

Nothing here is needed to use cuflash: a peer that cannot be imported, or refuses a shape, is left out of the result
with its reason. Only the rooms named ``peers_…`` import torch, jax and the rest, and only when the benchmark asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuflash.peers_base import Contestant, Peer
from cuflash.peers_jax import FlashAttention3Jax, JaxCudnn
from cuflash.peers_torch import FlashAttention, TorchSDPA
from cuflash.presets import Shape

__all__ = ["PEERS", "chosen", "contestants"]

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
    peers: Mapping[str, Peer], arrays: Mapping[str, Any], shape: Shape, mode: str
) -> tuple[list[Contestant], dict[str, str]]:
    """The peers that ran the shape once, and for each of the others the reason."""
    ready, refused = [], {}
    for name, peer in peers.items():
        try:
            contestant = peer.prepare(arrays, shape, mode)
            contestant.call()
            ready.append(contestant)
        except Exception as error:  # refusals come in every type there is
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return ready, refused
