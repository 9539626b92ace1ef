"""The command line's frame: words, help, exit codes, and one sentence on stderr for whatever ends it."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import fuelrail
from fuelrail import __main__ as cli
from fuelrail.pipeline.cli import Command
from fuelrail.pipeline.errors import ConfigError, TruncatedShardError
from support.datasets import build_dataset
from support.nuscenes_tables import build_nuscenes

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).resolve().parents[1] / ".src"
WORDS = sorted(cli._COMMANDS)


def start(*arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "fuelrail", *arguments],
        cwd=SOURCE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(*arguments: str) -> tuple[int, str, str]:
    process = start(*arguments)
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.fixture
def invoke(capsys):
    """Run main() in this process; returns exit code, stdout, stderr."""

    def invoking(*arguments: str) -> tuple[int, str, str]:
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return invoking


@pytest.fixture
def word(monkeypatch: pytest.MonkeyPatch):
    """Put a command of the test's own behind the word ``try``."""

    def putting(work) -> None:
        def configure(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--level", type=int, choices=range(4))

        command = Command("a trial", configure, work)
        monkeypatch.setitem(cli._COMMANDS, "try", cli._Entry("somewhere", "a trial"))
        monkeypatch.setattr(cli, "_load", lambda word: command)

    return putting


@pytest.mark.process
def test_version_and_help_of_the_module() -> None:
    assert run("--version") == (0, f"fuelrail {fuelrail.__version__}\n", "")
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: fuelrail")
    for word, entry in cli._COMMANDS.items():
        assert re.search(rf"^  {word} +{re.escape(entry.help)}$", out, re.MULTILINE)


@pytest.mark.parametrize("word", WORDS)
def test_every_word_has_a_command_with_help_and_flags_of_structs(invoke, word) -> None:
    """An option without a text is unfinished. ``--help`` is argparse's own; no other flag is written by hand."""
    command = cli._load(word)
    assert command.help
    code, out, err = invoke(word, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: fuelrail {word}")
    code, out, err = invoke(word, "--no-such-option")
    assert (code, out) == (2, "")
    assert f"fuelrail {word}" in err
    assert len(err.splitlines()) == 2 and "error:" in err.splitlines()[-1]
    parser = argparse.ArgumentParser(prog=word)
    command.configure(parser)
    for subparser in parsers(parser):
        for action in subparser._actions:
            assert action.help or action.metavar == "WORD"
            if action.option_strings in ([], ["-h", "--help"]):
                continue
            struct, _, field = action.dest.partition(".")
            flags = subparser.get_default(f"flags of {struct}")
            assert flags is not None, (
                f"`{subparser.prog}` has {action.option_strings}, which is not a field of a struct"
            )
            assert flags[field] == action.option_strings[-1]


def parsers(
    parser: argparse.ArgumentParser,
) -> Iterator[argparse.ArgumentParser]:
    """Yield a command's parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from parsers(subparser)


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (("inspect", "x", "--bacth"), "--batch"),
        (("bench", "train", "x", "--stpes", "3"), "--steps"),
        (("top", "--7"), None),
        (
            ("bench", "loader", "x", "--steps", "3"),
            None,
        ),  # an option of `bench train`
        (("bench", "loader", "--foo", "x"), None),
    ],
)
def test_an_unknown_option_names_the_one_that_was_meant(invoke, words, suggestion) -> None:
    code, out, err = invoke(*words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].endswith(f"; did you mean {suggestion}?") is (
        suggestion is not None
    )
    assert ("did you mean" in err) is (suggestion is not None)


def test_an_unknown_word_names_the_one_that_was_meant_or_the_known_ones(
    invoke,
) -> None:
    code, out, err = invoke("shrad")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "fuelrail: error: unknown command 'shrad'; did you mean shard?"
    code, out, err = invoke("xyzzy")
    assert (code, out) == (2, "")
    assert all(word in err.splitlines()[-1] for word in WORDS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--verison"], "unknown option '--verison'; did you mean --version?"),
        (["-version"], "unknown option '-version'; did you mean --version?"),
        (
            ["-x", "inspect"],
            "unknown option '-x'; a command comes before its options",
        ),
        (["version"], "unknown command 'version'; did you mean --version?"),
        (["help"], "unknown command 'help'; did you mean --help?"),
        (["--hlep"], "unknown option '--hlep'; did you mean --help?"),
        (
            ["--bogus"],
            "unknown option '--bogus'; a command comes before its options",
        ),
        (
            ["shard", "--hepl"],
            "unrecognized arguments: --hepl; did you mean --help?",
        ),
        (
            ["verify", "--deeep"],
            "unrecognized arguments: --deeep; did you mean --deep?",
        ),
        (["shard"], "the following arguments are required: KIND:PATH"),
        (
            ["shard", "x:y", "--workers", "1e3"],
            "--workers must be a whole number; got '1e3'",
        ),
        (
            ["bench", "loader", "x", "--seconds", "y"],
            "--seconds must be a number; got 'y'",
        ),
        (
            ["bench", "trian"],
            (
                "WORD must be one of train, loader, scale, diagnose, comm, diff, compare, resume; got 'trian'; "
                "did you mean train?"
            ),
        ),
        (
            ["plan", "--precision", "int4"],
            "--precision must be one of bf16, fp16, fp32, fp8, tf32; got 'int4'",
        ),
    ],
)
def test_a_mistyped_option_is_said_before_what_is_missing(invoke, words, said) -> None:
    code, out, err = invoke(*words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].endswith(f"error: {said}")


def test_alone_it_prints_the_overview(invoke) -> None:
    code, out, err = invoke()
    assert (code, err) == (0, "")
    assert out == invoke("--help")[1]
    assert all(f"\n  {word} " in out for word in WORDS)
    assert all(f"\n  {number}  " in out for number in (0, 1, 2, 130, 141))


@pytest.mark.parametrize("arguments", [("--no-such-option",), ("",)])
def test_without_a_word_nothing_is_done(invoke, arguments) -> None:
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("usage: fuelrail")


@pytest.mark.parametrize("code", [0, 1])
def test_the_exit_code_is_the_commands(invoke, word, code) -> None:
    word(lambda options: code)
    assert invoke("try") == (code, "", "")


def test_arguments_reach_the_command(invoke, word) -> None:
    levels = []
    word(lambda options: levels.append(options.level) or 0)
    assert invoke("try", "--level", "3")[0] == 0
    assert levels == [3]
    code, _, err = invoke("try", "--level", "9")
    assert code == 2
    assert re.search("--level must be one of.*; got '?9", err)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("option 'x' is unknown"),
        TruncatedShardError("cut", shard="a.tar", offset=3, key="k"),
    ],
)
def test_an_error_of_ours_is_one_sentence(invoke, word, error) -> None:
    def fail(options) -> int:
        raise error

    word(fail)
    assert invoke("try") == (2, "", f"fuelrail: error: {error}\n")


def test_an_error_in_the_making_of_the_parser_is_one_too(invoke, word, monkeypatch) -> None:
    def missing(word: str) -> Command:
        raise ConfigError("the library for it is not installed")

    word(lambda options: 0)
    monkeypatch.setattr(cli, "_load", missing)
    assert invoke("try") == (
        2,
        "",
        "fuelrail: error: the library for it is not installed\n",
    )


def test_a_fault_of_the_program_keeps_its_traceback(word) -> None:
    def fail(options) -> int:
        raise ZeroDivisionError

    word(fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


def test_an_interrupt_is_130_without_a_traceback(invoke, word) -> None:
    def interrupt(options) -> int:
        raise KeyboardInterrupt

    word(interrupt)
    assert invoke("try") == (130, "", "fuelrail: interrupted\n")


@pytest.mark.process
def test_a_real_interrupt_is_130_too() -> None:
    script = (
        "import sys, time\nfrom fuelrail import __main__ as cli\nfrom fuelrail.pipeline.cli import Command\n"
        "def work(options):\n    print('running', flush=True)\n    time.sleep(60)\n"
        "cli._load = lambda word: Command('', lambda parser: None, work)\nsys.exit(cli.main(['verify']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=SOURCE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=280)
    assert (process.returncode, out, err) == (
        130,
        "",
        "fuelrail: interrupted\n",
    )


def test_options_may_come_between_the_arguments(invoke, dataset, tmp_path) -> None:
    key = "clip-0000-000001"
    described = invoke("inspect", str(dataset), key, "--json")
    assert (
        described
        == invoke("inspect", str(dataset), "--json", key)
        == invoke("inspect", "--json", str(dataset), key)
    )
    assert (described[0], key in described[1]) == (0, True)
    code, _, err = invoke("shard", f"nuscenes:{tmp_path}", "--seed", "7", str(tmp_path / "out"))
    assert (code, "has no nuScenes tables" in err) == (2, True)


@pytest.mark.process
def test_a_name_that_the_terminal_cannot_show_is_escaped(dataset, tmp_path) -> None:
    (tmp_path / "stra\u00dfe").symlink_to(dataset)
    process = start(
        "inspect",
        str(tmp_path / "stra\u00dfe"),
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
    )
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert f"{tmp_path}/stra\\xdfe" in out


@pytest.mark.process
def test_a_reader_that_goes_away_is_not_a_fault() -> None:
    script = (
        "import sys\nfrom fuelrail import __main__ as cli\nfrom fuelrail.pipeline.cli import Command\n"
        "def work(options):\n    print('line ' * 100_000)\n    return 0\n"
        "cli._load = lambda word: Command('', lambda parser: None, work)\nsys.exit(cli.main(['verify']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=SOURCE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(4) == b"line"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(280) == 141


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "MISSING"], ["'MISSING'", "fuelrail shard"]),
        (["inspect", "MISSING"], ["'MISSING'"]),
        (["view", "MISSING", "--output", "picture.png"], ["'MISSING'"]),
        (["shard", "nuscenes:MISSING", "out"], ["MISSING"]),
        (["shard", "nonsense:MISSING", "out"], ["nonsense", "nuscenes"]),
        (["shard", "MISSING", "out"], ["MISSING"]),
    ],
)
def test_what_is_not_there_is_one_sentence_from_the_real_commands(
    invoke, monkeypatch, tmp_path: Path, arguments, words
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fuelrail: error: ")
    assert err.count("\n") == 1
    assert all(w in err for w in words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
@pytest.mark.parametrize(
    "engine",
    [[], ["--engine", "processes", "--workers", "2"]],
    ids=["threads", "processes"],
)
def test_a_closed_output_is_141_and_no_folder_that_cannot_be_written(
    tmp_path: Path, engine
) -> None:
    """`fuelrail shard ... --json | head -1`; the same command again finishes the dataset.

    A line for each of 250 shards is more than the pipe and the reader hold: the command cannot end before it is closed.
    """
    build_nuscenes(
        tmp_path / "source",
        {"a": 250},
        cameras=("CAM_FRONT",),
        num_points=0,
        num_tracks=0,
    )
    words = [
        "shard",
        f"nuscenes:{tmp_path / 'source'}",
        str(tmp_path / "out"),
        "-o",
        "version=v1.0-mini",
        *engine,
    ]
    words += ["--shard-size", "4KB"]
    process = start(*words, "--json", pipesize=4096)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith('{"event": "scanned"')
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(280) == 141
    assert cli.main(words) == 0
    assert cli.main(["verify", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("raising", [OSError, Exception])
def test_a_closed_output_is_not_an_error_of_the_code_that_prints(
    monkeypatch, word, raising
) -> None:
    class Closed:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            pass

        def fileno(self) -> int:
            return os.open(os.devnull, os.O_WRONLY)

    def work(options) -> int:
        try:
            print("a line")
        except raising:
            return 2
        return 0

    word(work)
    monkeypatch.setattr(sys, "stdout", Closed())
    assert cli.main(["try"]) == 141


@pytest.mark.parametrize("address", ["localhost:abc", "http://a b", "http://[::1"])
def test_an_address_that_is_none_is_one_sentence(invoke, address) -> None:
    code, out, err = invoke("top", address)
    assert (code, out) == (2, "")
    assert err.startswith("fuelrail: error: no metrics at ")
    assert err.count("\n") == 1


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("cli") / "dataset"
    build_dataset(root, {"train": (5, 7)})
    return root


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("order", "describe", "DS", "--global-batch=99999999999999999999"),
            "1000000000",
        ),
        (
            ("order", "describe", "DS", "--buffer=99999999999999999999"),
            "1000000000",
        ),
        (
            ("verify", "DS", "--workers", "0"),
            "--workers 0: must be a whole number from 1 to 1024",
        ),
        (
            ("verify", "DS", "--workers", "99999999999999999999"),
            "--workers 99999999999999999999: ",
        ),
        (("view", "DS", ""), "has no sample ''"),
        (("inspect", "DS", ""), "has no sample ''"),
        (
            ("order", "describe", "DS", "--kind", "windowed"),
            "error: order kind 'windowed' needs window >= 1",
        ),
        (
            ("synth", "s3://bucket/x"),
            "the output of synth must be a folder of this machine, got 's3://bucket/x'",
        ),
        (
            ("bench", "loader", "DS", "--out", "s3://bucket/x"),
            "--out must be a folder of this machine",
        ),
        (
            ("layer", "rebase", "DS", "DS", "s3://bucket/x"),
            "the output of rebase must be a folder of this machine",
        ),
        (
            ("verify", "DS", "--repair", "nuscenes"),
            "source 'nuscenes' must be KIND:PATH",
        ),
        (
            ("sources", "nuscens"),
            "error: this names an unknown kind 'nuscens'; known kinds: ",
        ),
        (
            ("shard", "mcap:DS", "out"),
            "has no logs: it is empty, or none of its files ends with .mcap",
        ),
        (
            ("annotate", "DS", "DS/dataset.json", "--model", "os:getcwd"),
            "dataset.json' is a file",
        ),
    ],
)
def test_arguments_out_of_range_are_one_sentence(invoke, dataset, words, said) -> None:
    code, out, err = invoke(*(word.replace("DS", str(dataset)) for word in words))
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_two_hyphens_end_the_options(invoke, dataset) -> None:
    """Nothing behind them is an empty key, as in every POSIX command."""
    assert invoke("inspect", str(dataset), "--") == invoke("inspect", str(dataset))


@pytest.mark.process
@pytest.mark.parametrize(
    ("line", "offered", "unwanted"),
    [
        ("fuelrail ve", {"verify"}, {"shard"}),
        ("fuelrail verify --", {"--deep", "--repair"}, {"--seed"}),
        ("fuelrail shard --layout ", {"frame", "member", "none"}, set()),
        ("fuelrail bench dia", {"diagnose"}, {"diff"}),
    ],
)
def test_shells_complete_commands_options_and_values(line, offered, unwanted, tmp_path) -> None:
    """As the function that register-python-argcomplete prints asks for it."""
    pytest.importorskip("argcomplete")
    variables = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
        "IFS": "\n",
    }
    variables |= {
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out"),
        "_ARGCOMPLETE_IFS": "\n",
    }
    process = start(env={**os.environ, **variables})
    process.communicate()
    completions = {text.strip() for text in (tmp_path / "out").read_text().splitlines()}
    assert offered <= completions
    assert not unwanted & completions
