"""A kernel as text: all that is known at compile time, and the lines of CUDA it renders to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

from cuflash import sources
from cuflash.dtypes import DType
from cuflash.masks import Mask
from cuflash.scores import Score

__all__ = ["Variant"]

Constant = int | bool | str  # a str names a C++ type or enumerator


@dataclass(frozen=True)
class Variant:
    """One specialisation of one kernel of cuda_src/kernels.

    ``fields`` are the constants of ``Config``; ``params`` is the C++ spelling of the parameter struct and
    ``params_size`` its size in bytes on the Python side, asserted by the compiler.
    """

    kernel: str
    family: str
    dtype: DType
    mask: type[Mask]
    score: Score = field(compare=False)  # its type matters, never its values: those are parameters
    fields: tuple[tuple[str, Constant], ...]
    params: str
    params_size: int
    threads: int
    min_blocks: int = 1
    score_type: str = field(init=False, repr=False)  # stands for the score in comparisons

    def __post_init__(self) -> None:
        object.__setattr__(self, "score_type", self.score.cuda)

    @property
    def header(self) -> str:
        """The kernel's file, relative to cuda_src."""
        return f"kernels/{self.kernel}.cuh"

    @property
    def symbol(self) -> str:
        """Readable name, seen by profilers; the same for variants that differ in tiles only."""
        sizes = dict(self.fields)
        head_dim, head_dim_v = sizes.get("kHeadDim"), sizes.get("kHeadDimV")
        dims = f"_d{head_dim}" if head_dim else ""
        dims += f"_v{head_dim_v}" if head_dim_v and head_dim_v != head_dim else ""
        parts = (self.kernel, self.dtype.short + dims, self.mask.header, self.score.short)
        return "_".join(part for part in parts if part)

    @cached_property
    def _body(self) -> str:
        includes = [self.header, f"attention/masks/{self.mask.header}.cuh"]
        includes += [f"attention/scores/{name}.cuh" for name in dict.fromkeys(self.score.headers)]
        lines = [f'#include "{name}"' for name in includes]
        lines += ["struct Config {", f"  using Element = {self.dtype.element};"]
        lines += [f"  using Mask = cuflash::{self.mask.__name__};", f"  using Score = {self.score_type};"]
        lines += [_constant(name, value) for name, value in self.fields]
        lines += [
            "};",
            f"using Params = {self.params};",
            f"static_assert(sizeof(Params) == {self.params_size});",
            f"CUFLASH_KERNEL({self.symbol}, {self.threads}, {self.min_blocks}, Params, params) {{",
            f"  cuflash::{self.kernel}<Config>(params);",
            "}",
        ]
        return "\n".join(lines) + "\n"

    @cached_property
    def _includes(self) -> tuple[str, ...]:
        return tuple(line.split('"')[1] for line in self._body.splitlines() if line.startswith("#include"))

    @property
    def digest(self) -> str:
        """SHA-256 of everything that reaches the compiler: the text and every header behind it."""
        sha = hashlib.sha256(self._body.encode())
        for name in self._includes:
            sha.update(sources.digest(name).encode())
        return sha.hexdigest()

    def source(self) -> str:
        """The translation unit. Its first line changes with every header, so that no cache serves an old binary."""
        return f"// cuda_src digest {self.digest}\n{self._body}"


def _constant(name: str, value: Constant) -> str:
    if isinstance(value, bool):
        return f"  static constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"  static constexpr int {name} = {value};"
    return f"  static constexpr auto {name} = {value};" if name.startswith("k") else f"  using {name} = {value};"
