"""What training loops do around attention in torch: checkpoints, hooks on saved tensors, inference, steps in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from samples import sample

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import cuflash  # noqa: E402
from cuflash.interop.torch_backend import as_torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated")
attend = partial(cuflash.flash_attention, causal=True)


def put() -> list[Any]:
    arrays = sample()
    return [as_torch(arrays[name].copy()).requires_grad_() for name in "qkv"]


def gradients(out: Any, inputs: list[Any]) -> tuple[Any, ...]:
    found: tuple[Any, ...] = torch.autograd.grad((out**2).sum(), inputs)
    return found


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.works("torch", "checkpoints, saved tensors kept elsewhere (save_on_cpu, hooks)")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    given = put()
    wanted = gradients(attend(*given), given)
    (checkpoint(attend, *given, use_reentrant=reentrant) ** 2).sum().backward()
    assert_same([x.grad for x in given], wanted)


def test_saved_tensors_may_be_kept_elsewhere() -> None:
    given = put()
    wanted = gradients(attend(*given), given)
    with torch.autograd.graph.save_on_cpu():
        out = attend(*given)
    assert_same(gradients(out, given), wanted)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        out = attend(*given)
    assert_same(gradients(out, given), wanted)


def test_inference_mode() -> None:
    given = put()
    wanted = attend(*given)
    with torch.inference_mode():
        out, _ = attend(given[0] * 1, *given[1:], return_lse=True)
        assert out.is_inference()
        assert_same([out], [wanted])


def test_what_is_saved_may_not_change() -> None:
    """The gradient of values that are gone is an error, and no wrong number."""
    q, k, v = put()
    changed = k * 1
    out = attend(q, changed, v)
    with torch.no_grad():
        changed.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()
    with pytest.raises(RuntimeError, match="inplace"):
        attend(q, k, v).mul_(2).sum().backward()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_one_input_alone_may_have_a_gradient(name: str) -> None:
    given = put()
    place = "qkv".index(name)
    (wanted,) = gradients(attend(*given), [given[place]])
    alone = [x if i == place else x.detach() for i, x in enumerate(given)]
    assert_same(gradients(attend(*alone), [alone[place]]), [wanted])


def test_heads_that_share_one_projection() -> None:
    """q is k is v, and a key head that was expanded: their gradients add up."""
    x, _, _ = put()
    wanted = gradients(attend(x, x.clone(), x.clone()), [x])
    assert_same(gradients(attend(x, x, x), [x]), wanted)
    head = x[:, :, :1].detach().requires_grad_()
    (found,) = gradients(attend(x, head.expand_as(x), head.expand_as(x)), [head])
    (wanted_head,) = gradients(attend(x, head, head), [head])
    torch.testing.assert_close(found, wanted_head, rtol=1e-4, atol=1e-4)
