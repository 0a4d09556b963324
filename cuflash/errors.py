"""What a caller can be told: every exception cuflash raises on purpose."""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CompileError",
    "CuflashError",
    "DeviceError",
    "EmulatorError",
    "UnsupportedError",
]


class CuflashError(Exception):
    """Base of all deliberate cuflash errors."""


class _Shown(str):
    """How a value looked: what an error carries to another process in place of it, which may not travel."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_CARRIED = (int, float, str, type(None))


class _Refusal(CuflashError):
    """A caller's mistake: names the argument, its value, the rule it breaks and the way out."""

    def __init__(self, argument: str, value: object, rule: str, remedy: str = "") -> None:
        self.argument, self.value, self.rule, self.remedy = argument, value, rule, remedy
        text = f"{argument}={_short(value)} {rule}"
        super().__init__(f"{text}; {remedy}" if remedy else text)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        value = self.value if isinstance(self.value, _CARRIED) else _Shown(_short(self.value))
        return type(self), (self.argument, value, self.rule, self.remedy)


class ArgumentError(_Refusal, ValueError):
    """An argument has the right type and a wrong value."""


class ArgumentTypeError(_Refusal, TypeError):
    """An argument has the wrong type or dtype."""


class UnsupportedError(_Refusal, NotImplementedError):
    """A meaningful request that this version or this GPU cannot serve; says what is there instead."""


class DeviceError(_Refusal, RuntimeError):
    """Arrays live on different devices, or the device cannot run the request."""


class CompileError(CuflashError, RuntimeError):
    """NVRTC refused a variant: carries its symbol, target, the compiler's log and how to reproduce it."""

    def __init__(self, symbol: str, target: str, log: str, reproduce: str) -> None:
        self.symbol, self.target, self.log, self.reproduce = symbol, target, log, reproduce
        head = "\n".join(log.strip().splitlines()[:12])
        super().__init__(f"{symbol} does not compile for {target}:\n{head}\nreproduce with: {reproduce}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.symbol, self.target, self.log, self.reproduce)


class EmulatorError(CuflashError, RuntimeError):
    """The CPU emulator found a fault in a kernel, or cannot be built here."""


def _short(value: object) -> str:
    text = " ".join(repr(value).split())  # arrays print in lines
    return text if len(text) <= 120 else text[:117] + "..."
