"""The flat form of a plan: it says everything that a launch needs, and nothing of this process."""

from __future__ import annotations

import numpy as np
import pytest

from cuflash.architectures import Device
from cuflash.interop.words import VERSION, decode, encode, kernel_key, operand_names
from cuflash.plan import Launch, Output, Plan, Pointer, TensorMapSlot, backward_plan, forward_plan
from cuflash.problem import Keywords, Problem
from cuflash.specs import spec_of_contiguous

SPEC = spec_of_contiguous((2, 40, 4, 16), "bfloat16")
LSE = spec_of_contiguous((2, 4, 40), "float32")


def plans() -> list[Plan]:
    words = Keywords(causal=True)
    device = Device.emulated()
    forward = Problem.forward(SPEC, SPEC, SPEC, words)
    backward = Problem.backward(SPEC, SPEC, SPEC, SPEC, SPEC, LSE, words, d_lse=LSE)
    return [forward_plan(forward, device), backward_plan(backward, device)]


@pytest.mark.parametrize("plan", plans(), ids=lambda plan: plan.kind)
def test_a_plan_survives_being_flattened(plan: Plan) -> None:
    flat = decode(encode(plan, "sm_80").tolist())
    names = operand_names(plan)
    assert flat.num_operands == len(names)
    assert len(flat.launches) == len(plan.launches)
    for got, launch in zip(flat.launches, plan.launches, strict=True):
        assert (got.grid, got.block, got.shared_bytes) == (launch.grid, launch.block, launch.shared_bytes)
        assert got.params == launch.params
        pointers = [(p.offset, p.operand, p.byte_offset) for p in launch.pointers]
        assert [(offset, names[operand], more) for offset, operand, more in got.pointers] == pointers
        assert got.key == kernel_key(launch.variant, "sm_80")


def test_tensor_maps_are_padded_to_five_axes() -> None:
    plan = plans()[0]
    slot = TensorMapSlot(64, "q", "bfloat16", (16, 40, 8), (128, 5120), (16, 64, 1), 32, 256, l2_promotion=256)
    launch = Launch(plan.launches[0].variant, 3, 128, 1024, bytes(192), (Pointer(0, "out"),), (slot,))
    flat = decode(encode(Plan("forward", plan.problem, plan.device, (launch,), plan.inputs, plan.outputs), "sm_90a"))
    (row,) = flat.launches[0].tensor_maps
    assert row[:7] == (64, 0, 256, 9, 3, 1, 3)
    assert row[7:] == (16, 40, 8, 0, 0, 128, 5120, 0, 0, 0, 16, 64, 1, 0, 0)


def test_a_workspace_that_starts_at_zero_is_cleared_by_the_launcher_unless_the_caller_does() -> None:
    plan = plans()[0]
    launch = Launch(plan.launches[0].variant, 1, 128, 0, bytes(8), (), zeroed=True)
    zeroed = Plan("forward", plan.problem, plan.device, (launch,), (), (Output("out", (1,), "float32"),), 10)
    assert decode(encode(zeroed, "sm_80")).cleared_words == 3
    assert decode(encode(zeroed, "sm_80", clears=False)).cleared_words == 0


def test_the_name_of_a_kernel_depends_on_its_target_and_not_on_the_process() -> None:
    variant = plans()[0].launches[0].variant
    assert kernel_key(variant, "sm_80") != kernel_key(variant, "sm_90a")
    assert 0 <= kernel_key(variant, "sm_80") < 2**63


@pytest.mark.parametrize("damage", ["version", "cut", "tail"])
def test_damaged_words_are_refused(damage: str) -> None:
    words = encode(plans()[0], "sm_80").tolist()
    broken = {"version": [VERSION + 1, *words[1:]], "cut": words[:-2], "tail": [*words, 0]}[damage]
    with pytest.raises(ValueError, match="plan"):
        decode(broken)


def test_words_are_64_bit_integers() -> None:
    assert encode(plans()[0], "sm_80").dtype == np.int64
