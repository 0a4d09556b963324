"""A picture of a benchmark: TFLOP/s over sequence length, one panel a head_dim, mask and mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cuflash.benchmark import Row

__all__ = ["plot"]

_NAMES = {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward + backward"}
_COLOURS = {"cuflash": "#76b900", "cudnn": "#1f77b4", "fa2": "#999999", "fa3": "#d62728", "fa4": "#9467bd"}
_RECORDED = "best peer by its recorded ratio to cuDNN"


def plot(rows: Sequence[Row], path: Path, title: str, peak_tflops: float | None = None) -> None:
    """Writes the picture; the suffix of ``path`` chooses the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('the plot needs matplotlib: pip install "cuflash[bench]"') from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    modes = list(dict.fromkeys(row.mode for row in rows))
    columns = list(dict.fromkeys((row.shape.head_dim, row.shape.mask_name) for row in rows))
    size = (2.9 * len(columns) + 0.6, 2.6 * len(modes) + 0.9)
    figure, axes = pyplot.subplots(len(modes), len(columns), figsize=size, squeeze=False, sharey="row")
    for line, mode in enumerate(modes):
        for column, (head_dim, mask) in enumerate(columns):
            panel = axes[line][column]
            facet = [
                row
                for row in rows
                if row.mode == mode and (row.shape.head_dim, row.shape.mask_name) == (head_dim, mask)
            ]
            for name, points in _series(facet).items():
                width = 2.2 if name == "cuflash" else 1.2
                style, colour = ("--", "#d62728") if name == _RECORDED else ("-", _COLOURS.get(name))
                x, y = zip(*points, strict=True)
                panel.plot(x, y, style, marker="o", ms=3, lw=width, label=name, color=colour)
            if peak_tflops:
                panel.axhline(peak_tflops, color="black", lw=0.8, ls=":")
            panel.set_title(f"{_NAMES[mode]}, head_dim {head_dim}, {mask}", fontsize=8)
            panel.set_xscale("log", base=2)
            lengths = sorted({row.shape.seqlen_k for row in facet})
            panel.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n) for n in lengths])
            panel.minorticks_off()
            panel.tick_params(labelsize=7)
            panel.grid(alpha=0.25)
        axes[line][0].set_ylim(bottom=0)  # after every panel of the row has been drawn: they share the axis
        axes[line][0].set_ylabel("TFLOP/s", fontsize=8)
    for panel in axes[-1]:
        panel.set_xlabel("sequence length", fontsize=8)
    handles = {
        label: handle for panel in axes.flat for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncol=len(handles), fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9, y=0.02, va="bottom")
    figure.tight_layout(rect=(0, 0.03, 1, 0.95))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _series(facet: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in facet:
        for name, figure in {"cuflash": row.cuflash, **row.peers}.items():  # a failed row's NaN leaves a gap
            found.setdefault(name, []).append((row.shape.seqlen_k, figure.tflops))
        if row.recorded:
            tflops = row.cuflash.tflops / row.ratio
            found.setdefault(_RECORDED, []).append((row.shape.seqlen_k, tflops))
    return found
