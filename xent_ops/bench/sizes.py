"""What is measured, in numbers. Needs no torch: --help shows these before torch is imported."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    rows: int
    classes: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.classes}"


class HeadShape(NamedTuple):
    """Of a head and its loss as one."""

    rows: int
    classes: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.classes}x{self.hidden}"


class Sizes(NamedTuple):
    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    feed_forward: int = 8192
    classes: int = 128256

    def check(self) -> None:
        for large, small in (("hidden", "heads"), ("heads", "kv_heads")):
            if getattr(self, large) % getattr(self, small):
                raise ValueError(f"{large}={getattr(self, large)} is not a multiple of {small}={getattr(self, small)}")
        if self.hidden // self.heads % 2:
            raise ValueError(
                f"hidden={self.hidden} over heads={self.heads} is {self.hidden // self.heads} numbers a head; rotary "
                "positions need an even number"
            )


class ModelShape(NamedTuple):
    """Of a training step, as results report it."""

    batch: int
    tokens: int
    layers: int
    hidden: int
    classes: int

    def __str__(self) -> str:
        return "x".join(map(str, self))
