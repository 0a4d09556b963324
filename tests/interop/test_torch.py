"""torch's door on the CPU: the kernels on the emulator under autograd, vmap, torch.func, autocast and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from samples import assert_close, exact, sample

torch = pytest.importorskip("torch")

import cuflash  # noqa: E402
from cuflash.errors import ArgumentError, DeviceError, UnsupportedError  # noqa: E402
from cuflash.interop.torch_backend import as_numpy, as_torch  # noqa: E402
from cuflash.interop.torch_operator import options_of, words_of  # noqa: E402
from cuflash.problem import Keywords  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated")
attend = partial(cuflash.flash_attention, causal=True)
OPTIONS = options_of(Keywords(causal=True))


def put(dtype: str = "float32", grad: bool = False) -> list[Any]:
    arrays = sample(dtype)
    return [as_torch(arrays[name].copy()).requires_grad_(grad) for name in "qkv"]


def squared(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs: (function(*xs) ** 2).sum()


def naive(q: Any, k: Any, v: Any) -> Any:
    """Bottom-right causal attention in torch's own arithmetic."""
    rows, columns = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None]
    mask = columns <= rows + k.shape[1] - q.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.works("torch", "autograd through out and lse")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_and_gradients(dtype: str) -> None:
    arrays = sample(dtype)
    d_lse = np.random.default_rng(1).standard_normal((2, 4, 33)).astype(np.float32)
    out, lse, *_ = exact(arrays, causal=True)
    *_, dq, dk, dv = exact(arrays, causal=True, d_lse=d_lse)
    given = put(dtype, grad=True)
    got_out, got_lse = attend(*given, return_lse=True)
    assert_close(as_numpy(got_out), out, dtype)
    assert_close(as_numpy(got_lse), lse)
    found = torch.autograd.grad((got_out, got_lse), given, (as_torch(arrays["d_out"]), torch.from_numpy(d_lse)))
    for got, wanted in zip(found, (dq, dk, dv), strict=True):
        assert got.dtype == given[0].dtype
        assert_close(as_numpy(got), wanted, dtype, scale=4)


def test_one_result_alone_may_have_a_gradient() -> None:
    given = put(grad=True)
    out, lse = attend(*given, return_lse=True)
    for result in (out, lse):
        gradients = torch.autograd.grad(result.sum(), given, retain_graph=True, allow_unused=True)
        assert all(torch.isfinite(x).all() for x in gradients)


@pytest.mark.works("torch", "opcheck: schema, fakes, autograd registration, dynamic shapes")
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad: bool) -> None:
    arguments = (*put(grad=grad), None, OPTIONS)
    results = torch.library.opcheck(torch.ops.cuflash.forward.default, arguments)
    assert set(results.values()) == {"SUCCESS"}
    if not grad:
        out, lse = torch.ops.cuflash.forward(*arguments)
        backward = (torch.ones_like(out), *arguments[:3], out, lse, None, None, OPTIONS)
        tests = ("test_schema", "test_faketensor")
        assert torch.library.opcheck(torch.ops.cuflash.backward.default, backward, test_utils=tests)


@pytest.mark.works("torch", "torch.compile(fullgraph=True), static and dynamic shapes, with gradients")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_a_graph_break(dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(squared(attend), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    given = put(grad=True)
    found, wanted = (torch.autograd.grad(f(*given), given) for f in (compiled, squared(naive)))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, scale=16)


@pytest.mark.works("torch", "vmap over any arguments")
@pytest.mark.parametrize("axes", [(0, None, None), (2, 0, None), (None, 0, 0)], ids=str)
def test_vmap(axes: tuple[int | None, ...]) -> None:
    arrays = [x if a is None else torch.stack([x, 2 * x], a) for x, a in zip(put(), axes, strict=True)]
    found = torch.vmap(attend, axes)(*arrays)
    for i in range(2):
        one = [x if a is None else x.select(a, i) for x, a in zip(arrays, axes, strict=True)]
        assert_close(found[i], naive(*one), scale=4)


@pytest.mark.works("torch", "torch.func: grad, vjp, vmap of grad")
def test_torch_func() -> None:
    q, k, v = put()
    stack = torch.stack([q, 2 * q])
    per_example = torch.func.vmap(torch.func.grad(squared(attend)), (0, None, None))(stack, k, v)
    for i in range(2):
        given = stack[i].clone().requires_grad_()
        (wanted,) = torch.autograd.grad(squared(naive)(given, k, v), given)
        assert_close(per_example[i], wanted, scale=16)


@pytest.mark.works("torch", "autocast")
def test_autocast_casts_as_torchs_own_attention() -> None:
    q, k, v = put()
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k.double(), v)
        assert out.dtype == naive(q, k, v).dtype == torch.bfloat16
    assert_close(as_numpy(out), naive(q, k, v), "bfloat16")


@pytest.mark.works("torch", "any strides, views, requires_grad, the neg bit")
def test_strides_and_the_neg_bit() -> None:
    q, k, v = put()
    wanted = naive(q, k, v)
    assert_close(attend(q.transpose(1, 2).contiguous().transpose(1, 2), k, v), wanted)
    wide = torch.cat([v, v], -1)
    assert_close(attend(q, k, wide[..., 16:]), wanted)
    negative = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert negative.is_neg()
    assert_close(attend(negative, k, v), wanted)
    expanded = k[:1].expand(2, -1, -1, -1)
    assert_close(attend(q, expanded, v), naive(q, expanded, v))


def test_results_are_fresh_contiguous_and_inputs_untouched() -> None:
    given = put()
    before = [x.clone() for x in given]
    out, lse = attend(*given, return_lse=True)
    assert out.is_contiguous() and lse.is_contiguous()
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


def test_out_is_written_outside_autograd_only() -> None:
    q, k, v = put()
    out = torch.full_like(q, torch.nan)
    assert attend(q, k, v, out=out) is out
    assert_close(out, naive(q, k, v))
    with pytest.raises(ArgumentError, match="under autograd"):
        attend(q.requires_grad_(), k, v, out=out)
    with pytest.raises(ArgumentError, match="must not share memory with q"):
        attend(q.detach(), k, v, out=q.detach())


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = put()
    with pytest.raises(DeviceError, match=r"k.device='meta' must be q's device cpu"):
        attend(q, k.to("meta"), v)
    with pytest.raises(TypeError, match="same array library"):
        attend(q, k.numpy(), v)
    with pytest.raises(TypeError, match=r"q.dtype='float64'"):
        attend(q.double(), k.double(), v.double())
    with pytest.raises(TypeError, match=r"q.dtype='float8_e5m2' must be one of float16, bfloat16, float32"):
        attend(*(x.to(torch.float8_e5m2) for x in (q, k, v)))
    monkeypatch.setenv("CUFLASH_TORCH_CPU", "no")
    with pytest.raises(DeviceError, match=r"must be a CUDA device; move it with .cuda\(\)"):
        attend(q, k, v)


def test_derivatives_that_are_absent_are_refused() -> None:
    q, k, v = put(grad=True)
    (gradient,) = torch.autograd.grad(squared(attend)(q, k, v), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        gradient.sum().backward()
    slopes = torch.full((4,), 0.1, requires_grad=True)
    with pytest.raises(UnsupportedError, match="alibi_slopes"):
        attend(q, k, v, alibi_slopes=slopes)


def test_meta_tensors_have_shapes() -> None:
    assert attend(*(x.to("meta") for x in put())).shape == (2, 33, 4, 16)


def test_options_are_text_that_says_everything() -> None:
    words = Keywords(0.25, mask=cuflash.SlidingWindow(3, None), score=cuflash.Softcap(2.0), align=-4)
    assert words_of(options_of(words)) == words
    with pytest.raises(UnsupportedError, match="options"):
        words_of("Keywords(mask=__import__('os'))")


def test_bfloat16_crosses_without_a_copy() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T
    array = as_numpy(tensor)
    assert array.dtype.name == "bfloat16"
    assert array.ctypes.data == tensor.data_ptr()
    assert as_torch(array).data_ptr() == tensor.data_ptr()
