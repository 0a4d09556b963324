"""Every mask and score function of the tables, new ones too: the two halves beside each other, and their rules."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from arrays import case, dense
from oracle import assert_right
from places import Place

from cuflash.masks import MASKS, Mask
from cuflash.scores import SCORES, Score, Softcap, Then, Where


def samples(kinds: tuple[type[Any], ...], numbers: tuple[int, ...]) -> dict[str, Any]:
    """Each class with each number in all its fields; classes made of others are left out."""
    plain = [kind for kind in kinds if not any("Score" in str(field.type) for field in fields(kind))]
    made = [kind(*[n] * len(fields(kind))) for kind in plain for n in numbers[: len(numbers) if fields(kind) else 1]]
    return {repr(one): one for one in made}


MASK_SAMPLES = samples(MASKS, (1, 7, 40))
SCORE_SAMPLES = samples(SCORES, (2, 30))


@pytest.mark.parametrize("mask", MASK_SAMPLES.values(), ids=MASK_SAMPLES)
def test_a_mask_is_what_kernels_take_it_for(mask: Mask) -> None:
    q, k = np.arange(90)[:, None], np.arange(100)[None, :]
    for shift in (-20, 0, 10, 33):
        keep = np.broadcast_to(mask.keeps(q, k, shift), (90, 100))
        assert (np.diff(keep.astype(int), axis=1) == 1).sum(1).max() <= 1, "a row's keys are one interval"
        assert keep.sum() <= mask.visible_pairs(90, 100, shift), "visible_pairs counts too few"
        assert mask.left is None or (k >= q + shift - mask.left)[keep].all(), "a row sees keys before `left`"
        assert mask.right is None or (k <= q + shift + mask.right)[keep].all(), "a row sees keys after `right`"
        moved = np.broadcast_to(mask.keeps(q, k + 3, shift + 3), (90, 100))
        assert mask.left is None or np.array_equal(keep, moved), "with a `left`, only k - q - shift may count"


@pytest.mark.parametrize("align", ["bottom-right", 9])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(67, 67), (40, 150), (150, 40)])
@pytest.mark.parametrize("mask", MASK_SAMPLES.values(), ids=MASK_SAMPLES)
def test_masks(device: Place, mask: Mask, seqlen_q: int, seqlen_k: int, align: Any) -> None:
    arrays = case(dense(1, 2, 1, seqlen_q, seqlen_k, 64, dtype="float16"), 1)
    words = {"mask": mask, "align": align}
    assert_right(device.both(arrays, **words), arrays, **words)


@pytest.mark.parametrize("score", SCORE_SAMPLES.values(), ids=SCORE_SAMPLES)
def test_derivatives_belong_to_their_functions(score: Score) -> None:
    q, k, x = np.arange(9)[:, None], np.arange(12)[None, :], np.random.default_rng(0).standard_normal((1, 2, 9, 12))
    where = Where(q, k, 3, {"alibi_slopes": np.array([[0.5, 0.1]])})
    seen = np.isfinite(score.apply(x, where))
    above, below = (score.apply(x + step, where)[seen] for step in (1e-6, -1e-6))
    np.testing.assert_allclose(score.derivative(x, where)[seen], (above - below) / 2e-6, atol=1e-6)


@pytest.mark.parametrize("capped", [False, True], ids=["alone", "capped"])
@pytest.mark.parametrize("score", SCORE_SAMPLES.values(), ids=SCORE_SAMPLES)
def test_scores(device: Place, score: Score, capped: bool) -> None:
    shape = dense(1, 2, 1, 67, 130, 64, dtype="float16", causal=True, alibi="alibi_slopes" in score.pointers)
    arrays = case(shape, 2)
    words: dict[str, Any] = {"causal": True, "score": Then(score, Softcap(3.0)) if capped else score}
    assert_right(device.both(arrays, **words), arrays, **words)
