"""Channels that several tests store: fixed values, tokens, points."""

from __future__ import annotations

from typing import Any

from fuelrail.pipeline.channels.table import Channel, Law, Vocabulary


def fixed(name: str, kind: str, ending: str, **form: Any) -> Channel:
    """Return a channel whose values no augmentation moves."""
    return Channel(name=name, kind=kind, field=f"{name}.{ending}", law=Law("fixed"), **form)


def tokens(
    name: str = "words",
    *,
    dtype: str = "int64",
    length: int | None = None,
    words: int = 1000,
    **form: Any,
) -> Channel:
    """Return a channel of tokens; ``length`` None: of any number."""
    return fixed(
        name,
        "tokens",
        "npy",
        dtype=dtype,
        axes=("token",),
        shape=(length,),
        vocabulary=Vocabulary("words", words),
        **form,
    )


def points(name: str, *, frame: str = "ego", moves: bool = True, **form: Any) -> Channel:
    """Return a channel of points x y z, which move with the ego frame where ``moves``."""
    law = Law("ego_points", roles={"positions": (("x", "y", "z"),)}) if moves else Law("fixed")
    return Channel(
        name=name,
        kind="points",
        field=f"{name}.npy",
        law=law,
        frame=frame,
        dtype="float32",
        axes=("point", "column"),
        shape=(None, 3),
        columns=("x", "y", "z"),
        **form,
    )
