"""Reported faults: a split chooser that only ever answers 1, outputs that depend on how the keys were split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import case, dense
from oracle import assert_equal_bits, assert_right
from places import Place

from cuflash.architectures import Device
from cuflash.plan import Plan, forward_plan
from cuflash.problem import Keywords, Problem, spec_of_contiguous

SMS = 132


def splits(plan: Plan) -> int:
    """Parts of the keys: each leaves its output and lse in float32 in the workspace, to be put together."""
    problem = plan.problem
    if not any(launch.variant.kernel == "forward_combine" for launch in plan.launches):
        return 1
    return plan.workspace_bytes // (
        problem.batch * problem.num_q_heads * problem.seqlen_q * (problem.head_dim_v + 1) * 4
    )


def decode_plan(heads: int, seqlen_k: int, **words: Any) -> Plan:
    """One query a head on a GPU of 132 multiprocessors."""
    q, k = (spec_of_contiguous((heads, rows, 1, 128), "bfloat16") for rows in (1, seqlen_k))
    return forward_plan(Problem.forward(q, k, k, Keywords(**words)), Device.emulated((9, 0), SMS))


def test_the_chooser_splits_where_multiprocessors_are_idle() -> None:
    assert splits(decode_plan(1, 65536)) > 8
    assert splits(decode_plan(4096, 4096)) == 1
    assert splits(decode_plan(8, 128)) <= 4
    assert splits(decode_plan(1, 1)) == 1
    assert splits(decode_plan(1, 65536, batch_invariant=True)) == 1
    assert all(launch.grid <= SMS * 2 for launch in decode_plan(1, 65536).launches)


@pytest.mark.parametrize("seqlen_k", [1024, 1100, 1537])
def test_split_keys_equal_whole_keys(hopper: Place, seqlen_k: int) -> None:
    """One query on many keys: within 1e-3 of the unsplit call, lse within 1e-5, and right."""
    arrays = case(dense(1, 2, 1, 1, seqlen_k, 64), 1)
    del arrays["d_out"]
    plan = hopper.eager.plan("forward", {name: hopper.put(arrays[name]) for name in "qkv"}, Keywords())
    assert splits(plan) > 1
    found, whole = hopper.forward(arrays), hopper.forward(arrays, batch_invariant=True)
    assert_right(found, arrays)
    assert_right(whole, arrays)
    np.testing.assert_allclose(found["lse"], whole["lse"], atol=1e-5)
    np.testing.assert_allclose(found["out"].astype(np.float64), whole["out"].astype(np.float64), rtol=1e-2, atol=1e-3)
    assert_equal_bits(found, hopper.forward(arrays))


@pytest.mark.parametrize("words", [{"causal": True}, {"window": (700, 0)}, {"softcap": 5.0}], ids=str)
def test_split_keys_with_features(hopper: Place, words: dict[str, Any]) -> None:
    """Parts that some rows do not see at all carry (0, -inf) and change nothing."""
    arrays = case(dense(1, 2, 1, 5, 1300, 64), 2)
    del arrays["d_out"]
    assert_right(hopper.forward(arrays, **words), arrays, **words)


@pytest.mark.exhaustive
def test_split_decode_on_a_gpu(gpu: Place) -> None:
    arrays = case(dense(1, 16, 8, 1, 4096, 128), 3)
    del arrays["d_out"]
    found, whole = gpu.forward(arrays), gpu.forward(arrays, batch_invariant=True)
    assert_right(found, arrays)
    np.testing.assert_allclose(found["lse"], whole["lse"], atol=1e-5)
