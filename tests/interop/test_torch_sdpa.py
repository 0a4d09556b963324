"""The drop-in for torch's scaled_dot_product_attention, and transformers with attn_implementation="cuflash"."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cuflash.errors import ArgumentError, UnsupportedError  # noqa: E402
from cuflash.interop.torch import register_hf, scaled_dot_product_attention  # noqa: E402

original = torch.nn.functional.scaled_dot_product_attention
pytestmark = pytest.mark.usefixtures("emulated")


def put(q_heads: int = 4, kv_heads: int = 4, lead: tuple[int, ...] = (2,)) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((*lead, q_heads, 33, 16), (*lead, kv_heads, 40, 16), (*lead, kv_heads, 40, 16))
    return [torch.randn(shape, generator=generator) + 0.1 for shape in shapes]


@pytest.mark.works("torch", "drop-in for scaled_dot_product_attention (attn_mask and dropout refused)")
@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"scale": 0.1}], ids=str)
@pytest.mark.parametrize("lead", [(2,), (2, 1), ()], ids=str)
def test_equals_torch(words: dict[str, Any], lead: tuple[int, ...]) -> None:
    arrays = put(lead=lead)
    torch.testing.assert_close(scaled_dot_product_attention(*arrays, **words), original(*arrays, **words))


def test_grouped_heads_are_asked_for() -> None:
    arrays = put(kv_heads=2)
    found = scaled_dot_product_attention(*arrays, enable_gqa=True)
    torch.testing.assert_close(found, original(*arrays, enable_gqa=True))
    with pytest.raises(ArgumentError, match="enable_gqa=True"):
        scaled_dot_product_attention(*arrays)


def test_two_axes_are_one_head() -> None:
    q, k, v = (x[0, 0] for x in put())
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v), original(q, k, v))


@pytest.mark.parametrize(("name", "value"), [("attn_mask", torch.ones(33, 40)), ("dropout_p", 0.1)])
def test_what_has_no_kernel_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=name):
        scaled_dot_product_attention(*put(), **{name: value})


def test_the_signature_is_the_originals() -> None:
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    parameters = inspect.signature(scaled_dot_product_attention).parameters
    assert list(parameters) == names
    defaults = [parameters[name].default for name in names[3:]]
    assert defaults == [None, 0.0, False, None, False]


@pytest.fixture
def registered() -> None:
    """transformers, where it is installed, knows cuflash."""
    pytest.importorskip("transformers")
    register_hf()


def model_of(kind: str, implementation: str) -> Any:
    import transformers

    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 2}
    if kind == "llama":
        config = transformers.LlamaConfig(**size, **heads, num_key_value_heads=1, attention_dropout=0.0)
        build: Any = transformers.LlamaForCausalLM
    elif kind == "mistral":
        config = transformers.MistralConfig(**size, **heads, num_key_value_heads=1, sliding_window=8)
        build = transformers.MistralForCausalLM
    else:
        config = transformers.BertConfig(**size, **heads, attention_probs_dropout_prob=0.0)
        build = transformers.BertModel
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return build(config).eval()


@pytest.mark.works("torch", 'Hugging Face transformers: attn_implementation="cuflash" after register_hf()')
@pytest.mark.parametrize("kind", ["llama", "mistral", "bert"])
def test_transformers(registered: None, kind: str) -> None:
    tokens = torch.randint(0, 50, (2, 33), generator=torch.Generator().manual_seed(0))
    found, wanted = (model_of(kind, name)(tokens)[0] for name in ("cuflash", "sdpa"))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_transformers_generates_with_a_cache(registered: None) -> None:
    tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    found, wanted = (
        model_of("llama", name).generate(tokens, max_new_tokens=3, do_sample=False) for name in ("cuflash", "sdpa")
    )
    assert torch.equal(found, wanted)


def test_padding_is_refused(registered: None) -> None:
    tokens = torch.zeros(2, 8, dtype=torch.long)
    mask = torch.ones_like(tokens)
    model = model_of("llama", "cuflash")
    model(tokens, attention_mask=mask)
    mask[1, :3] = 0
    with pytest.raises(UnsupportedError, match="marks padding"):
        model(tokens, attention_mask=mask)


def test_patterns_without_a_kernel_are_refused() -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    from cuflash.interop.torch_hf import attention_mask

    chunked = masking.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    with pytest.raises(UnsupportedError, match="mask_function"):
        attention_mask(1, 8, 8, mask_function=chunked)
    with pytest.raises(UnsupportedError, match="past_key_values"):
        attention_mask(1, 4, 16, mask_function=masking.causal_mask_function)
    attention_mask(1, 4, 16, mask_function=masking.bidirectional_mask_function)
