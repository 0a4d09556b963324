"""Two models of Hugging Face transformers, randomly initialised, with cuflash's attention against torch's own.

python examples/torch_hf.py            # needs torch and transformers; CPU tensors run on the emulator, slowly
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers

from cuflash.interop.torch import register_hf


def model(kind: str, implementation: str, device: str) -> Any:
    """A small Llama (causal, grouped heads) or BERT (bidirectional) in evaluation mode."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if kind == "llama":
        config: Any = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=100)
        build: Any = transformers.LlamaForCausalLM
    else:
        config = transformers.BertConfig(**sizes, vocab_size=100, attention_probs_dropout_prob=0.0)
        build = transformers.BertModel
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return build(config).eval().to(device)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ.setdefault("CUFLASH_TORCH_CPU", "emulator")
    register_hf()
    tokens = torch.randint(0, 100, (2, 48), generator=torch.Generator().manual_seed(0)).to(device)
    for kind in ("llama", "bert"):
        found, wanted = (model(kind, name, device)(tokens)[0] for name in ("cuflash", "sdpa"))
        difference = (found - wanted).abs().max().item()
        print(f"{kind:6s} largest difference to sdpa {difference:.1e} of values up to {wanted.abs().max().item():.2f}")
        if difference > 1e-3:
            raise SystemExit(f"{kind}: the two attentions disagree")


if __name__ == "__main__":
    main()
