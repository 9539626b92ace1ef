"""Flags of a command line that come from a struct, and the struct that comes from flags."""

from __future__ import annotations

import argparse
from typing import Annotated, Literal

import msgspec
import pytest

from fuelrail.pipeline.cli import add_flags, from_flags, given_flags
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Settings

Meta = msgspec.Meta


def halves(text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    if not second:
        raise ConfigError("there is no colon; write FIRST:SECOND")
    return int(first), int(second)


class Inner(Settings, frozen=True):
    depth: int


class Options(Settings, frozen=True):
    level: Annotated[int, Meta(ge=1, le=5, description="how strong, up to 100 %")] = 4
    share: Annotated[float, Meta(gt=0, description="part of it")] | None = None
    points: Annotated[bool, Meta(description="leave the points out")] = True
    deep: Annotated[bool, Meta(description="decode it")] = False
    num_threads: Annotated[int | Literal["auto"], Meta(description="number of threads")] = "auto"
    mode: Annotated[Literal["fast", "small"], Meta(description="what to optimise")] = "fast"
    sizes: Annotated[tuple[int, ...], Meta(description="sizes to try")] = ()
    pair: Annotated[
        tuple[int, int],
        Meta(description="a pair", extra={"parse": halves, "metavar": "A:B"}),
    ] = (0, 0)
    tags: Annotated[
        tuple[str, ...],
        Meta(description="a tag", extra={"repeat": True, "metavar": "TAG"}),
    ] = ()
    inner: Annotated[Inner, Meta(description="settings of a part")] | None = None
    internal: int = 3


def parse(text: str, **names: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser, Options, names=names)
    return parser.parse_args(text.split())


def test_without_flags_the_defaults_hold() -> None:
    assert from_flags(parse(""), Options) == Options()


def test_every_kind_of_field() -> None:
    text = "--level 2 --share 0.5 --no-points --deep --num-threads 3 --mode small --sizes 1 2 --pair 3:4"
    assert from_flags(parse(text), Options) == Options(
        level=2,
        share=0.5,
        points=False,
        deep=True,
        num_threads=3,
        mode="small",
        sizes=(1, 2),
        pair=(3, 4),
    )
    assert from_flags(parse("--num-threads auto"), Options).num_threads == "auto"


def test_a_repeated_flag_and_a_file_of_settings(tmp_path) -> None:
    file = tmp_path / "inner.yaml"
    file.write_text("depth: 3")
    options = from_flags(parse(f"--tags a --inner {file} --tags b"), Options)
    assert (options.tags, options.inner) == (("a", "b"), Inner(3))
    file.write_text("depth: x")
    with pytest.raises(
        ConfigError,
        match=r"--inner '.*inner.yaml': .*:1: at 'depth': must be a whole number",
    ):
        from_flags(parse(f"--inner {file}"), Options)


def test_a_flag_may_have_another_name() -> None:
    args = parse("--power 5", level="power")
    assert from_flags(args, Options).level == 5
    assert given_flags(args, Options) == {"level": "--power"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--level 9", "--level 9: must be a whole number from 1 to 5"),
        ("--share 0", "--share 0.0: must be a number > 0"),
        (
            "--num-threads many",
            "--num-threads many: must be auto or a whole number",
        ),
        ("--pair 3", "--pair '3': there is no colon; write FIRST:SECOND"),
    ],
)
def test_an_error_names_the_flag_and_the_value(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags(parse(text), Options)
    assert str(caught.value) == said


def test_what_argparse_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("--mode slow", "--level x", "--internal 4"):
        with pytest.raises(SystemExit):
            parse(text)
    assert "invalid int value: 'x'" in capsys.readouterr().err


def test_help_comes_from_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--level N how strong, up to 100 % (default: 4)" in text
    assert "--mode {fast,small} what to optimise (default: fast)" in text
    assert "--pair A:B a pair" in text
    assert "--internal" not in text


def test_a_field_without_default_is_required() -> None:
    class CountSettings(Settings, frozen=True):
        count: Annotated[int, Meta(description="how many")]

    parser = argparse.ArgumentParser()
    add_flags(parser, CountSettings)
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert from_flags(parser.parse_args(["--count", "2"]), CountSettings).count == 2


def test_a_type_without_a_flag_is_a_mistake_of_the_program() -> None:
    class Wrong(Settings, frozen=True):
        table: Annotated[dict[str, int], Meta(description="a table")] = msgspec.field(
            default_factory=dict
        )

    with pytest.raises(TypeError, match=r"Wrong\.table"):
        add_flags(argparse.ArgumentParser(), Wrong)
