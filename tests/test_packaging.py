"""The shape of the package: what ships, what may import what, what importing costs, and one place for each fact."""

from __future__ import annotations

import ast
import email
import functools
import itertools
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import fuelrail

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
FACE = ROOT / ".src" / "fuelrail"
FOLDERS = ("bench", "loaders", "pipeline", "sharding")
CHECKOUT_ONLY = [
    ROOT / "bench" / place for place in ("micro", "peers", "studies/compare", "studies/resume")
]
LOOK_FOR_COMPARE = (
    "bench/commands.py",
    "bench/studies/diff.py",
)  # and say where it runs if it is not there
FACE_FILES = (
    "__init__.py",
    "__init__.pyi",
    "__main__.py",
    "order.py",
    "py.typed",
)
PROGRAMS = (
    "recipes",
    "sources",
    "trainers",
)  # of configs: what users copy, not what the package reads
FLOORS = {
    "pipeline": {"pipeline"},
    "sharding": {"pipeline", "sharding"},
    "loaders": {"pipeline", "loaders"},
    "bench": set(FOLDERS),
}
# What only some modules may ask for, as everything that is heavy or optional: the folders that may.
HEAVY = {
    "torch": {"loaders", "bench"},
    "webdataset": {"loaders", "bench"},
    "ray": {"bench", "loaders", "sharding"},
    "nvidia": {"bench", "loaders"},
}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]

MODULES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def run_python(*arguments: str, cwd: Path = ROOT, path: Path | None = ROOT / ".src") -> str:
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(file: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, lazily or not, and of those it names as strings."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module is not None
            yield node.module
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if node.module == "fuelrail"
            )
        elif isinstance(node, ast.Constant) and re.fullmatch(r"fuelrail(\.\w+)+", str(node.value)):
            yield str(node.value)


@functools.cache
def imported_by() -> dict[Path, set[str]]:
    return {file: set(imported(file)) for file in MODULES}


def stays_in_checkout(file: Path) -> bool:
    return any(place in file.parents for place in CHECKOUT_ONLY)


def list_shipped() -> set[str]:
    """What must be in a wheel: the package's face, all files of the four folders, and the configs that they load."""
    configs = [
        f"configs/{path.name}" for path in (ROOT / "configs").iterdir() if path.name not in PROGRAMS
    ]
    places = {folder: f"fuelrail/{folder}" for folder in [*FOLDERS, *configs]}
    files = {
        f"{place}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, place in places.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and not stays_in_checkout(file)
    }
    return files | {f"fuelrail/{name}" for name in FACE_FILES}


class TestImports:
    @pytest.mark.parametrize("folder", FOLDERS)
    def test_floors(self, folder) -> None:
        """pipeline imports no other folder; sharding and loaders import pipeline, never each other."""
        for file, names in imported_by().items():
            if file.is_relative_to(ROOT / folder):
                for name in names:
                    parts = name.split(".")
                    if parts[0] == "fuelrail" and len(parts) > 1 and parts[1] in FOLDERS:
                        assert parts[1] in FLOORS[folder], (
                            f"{file.relative_to(ROOT)} imports {name}"
                        )

    def test_nothing_that_ships_imports_what_stays_in_the_checkout(
        self,
    ) -> None:
        for file, names in imported_by().items():
            if (
                not stays_in_checkout(file)
                and file.relative_to(ROOT).as_posix() not in LOOK_FOR_COMPARE
            ):
                rooms = r"(fuelrail\.bench\.(gpu|micro|peers|studies\.(compare|resume))|support|tests)\b"
                stays = {name for name in names if re.match(rooms, name)}
                assert not stays, f"{file.relative_to(ROOT)} imports {stays}"

    def test_no_bare_folder_names(self) -> None:
        for file, names in imported_by().items():
            bare = {name for name in names if name.split(".")[0] in FOLDERS}
            assert not bare, f"{file.relative_to(ROOT)} imports {bare}"

    def test_heavy_libraries_stay_where_they_belong(self) -> None:
        for file, names in imported_by().items():
            folder = file.relative_to(ROOT).parts[0]
            for name in names:
                assert folder in HEAVY.get(name.split(".")[0], set(FOLDERS)), (
                    f"{file.relative_to(ROOT)}: {name}"
                )

    def test_every_import_is_declared(self) -> None:
        """Shipped code imports the standard library, ourselves, or what pyproject.toml asks for."""

        def distributions(requirements: list[str]) -> set[str]:
            names = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
            return {re.sub(r"[-_.]+", "-", name.group()).lower() for name in names if name}

        extras = PROJECT["optional-dependencies"]
        declared = distributions(
            [
                *PROJECT["dependencies"],
                *(r for e in extras.keys() - {"test", "dev"} for r in extras[e]),
            ]
        )
        # What an extra brings under another name, so that it need not be installed for this test.
        brought_by = {
            "PIL": "pillow-simd",
            "nvidia": "nvidia-dali-cuda120",
            "botocore": "s3fs",
        }
        brought_by["rerun"] = "rerun-sdk"
        brought_by["mmdet3d"] = (
            "mmengine"  # only those who have it ask for its classes; it stands on mmengine
        )
        brought_by["tensorboard"] = "torch"  # which writes for it too, where it is installed
        brought_by |= {
            name: name for name in ("datasets", "grain", "mmengine", "ray", "spdl", "trl")
        }
        brought_by |= {
            "pytorch_lightning": "lightning",
            "transformers": "transformers",
        }
        brought_by["lightning"] = "lightning"
        brought_by |= {name: name for name in ("accelerate", "lerobot", "litdata", "torchtitan")}
        brought_by |= {"megatron": "megatron-energon", "streaming": "mosaicml-streaming"}
        brought_by["tyro"] = "torchtitan"
        providers = packages_distributions()
        for file, names in imported_by().items():
            for top in (
                {name.split(".")[0] for name in names}
                - sys.stdlib_module_names
                - {"fuelrail", "support", "_fuelrail_after_import"}
            ):
                providing = distributions(
                    [brought_by[top]] if top in brought_by else providers.get(top, [])
                )
                assert providing & declared, (
                    f"{file.relative_to(ROOT)} imports {top}, which no dependency or extra brings"
                )

    @pytest.mark.process
    @pytest.mark.parametrize(
        "statement",
        [
            "import fuelrail; fuelrail.__version__",
            "import fuelrail.__main__",
            "from fuelrail.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        ],
    )
    def test_the_face_is_light(self, statement) -> None:
        heavy = (
            "torch",
            "numpy",
            "cv2",
            "pyarrow",
            "PIL",
            "webdataset",
            "nvidia",
            "matplotlib",
            "ray",
            "yaml",
            "scipy",
            "jinja2",
            "rich",
            "fsspec",
        )
        out = run_python(
            "-c",
            f"{statement}\nimport sys\nprint([m for m in {heavy} if m in sys.modules])",
        )
        assert out.splitlines()[-1] == "[]"

    @pytest.mark.process
    def test_the_order_needs_numpy_and_msgspec_only(self) -> None:
        """Plain orders too: pyarrow comes with the first column that is read."""
        statement = (
            "import fuelrail as fr, fuelrail.order, sys; fr.order.Sampler(9, global_batch=3)[2]"
        )
        third = "{m.split('.')[0] for m in sys.modules} - {*sys.stdlib_module_names, '__main__'}"
        libraries = run_python(
            "-S",
            "-c",
            f"import sys; sys.path[:] = {sys.path!r}; {statement}; print(sorted({third}))",
        )
        # msgspec takes the second one where it is installed.
        assert set(ast.literal_eval(libraries)) - {"typing_extensions"} == {
            "fuelrail",
            "msgspec",
            "numpy",
        }

    @pytest.mark.process
    def test_offline_work_needs_no_torch(self) -> None:
        names = [
            ".".join(("fuelrail", *file.relative_to(ROOT).with_suffix("").parts))
            for file in MODULES
            if file.relative_to(ROOT).parts[0] in ("pipeline", "sharding")
            and file.name != "__init__.py"
            and "ray" not in file.stem.split("_")
        ]
        code = f"import importlib, sys\nfor n in {sorted(names)}: importlib.import_module(n)\n"
        assert run_python("-c", code + "print('torch' in sys.modules)").strip() == "False"

    def test_an_unknown_name_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="module 'fuelrail' has no attribute 'nothing'"):
            _ = fuelrail.nothing  # type: ignore[attr-defined]


class TestLayout:
    def test_links_are_the_four_folders(self) -> None:
        links = {
            entry.name: str(entry.readlink()) for entry in FACE.iterdir() if entry.is_symlink()
        }
        assert links == {folder: f"../../{folder}" for folder in FOLDERS}
        files = {
            entry.name
            for entry in FACE.iterdir()
            if not entry.is_symlink() and entry.name != "__pycache__"
        }
        assert files == set(FACE_FILES)

    def test_every_folder_with_code_is_a_package(self) -> None:
        for file in MODULES:
            assert (file.parent / "__init__.py").is_file(), (
                f"{file.parent.relative_to(ROOT)} has no __init__.py"
            )

    @pytest.mark.process
    def test_the_version_stands_in_one_place(self) -> None:
        assert PROJECT["dynamic"] == ["version"]
        assert PYPROJECT["tool"]["hatch"]["version"]["path"] == ".src/fuelrail/__init__.py"
        holders = [
            f for f in repository_texts() if fuelrail.__version__ in f.read_text(encoding="utf-8")
        ]
        holders = [
            f for f in holders if "results" not in f.parts and f.name != "RESULTS.md"
        ]  # what was measured, and with which version
        assert [f.relative_to(ROOT).as_posix() for f in holders if f.name != "CHANGELOG.md"] == [
            ".src/fuelrail/__init__.py"
        ]

    def test_make_knows_its_words(self) -> None:
        targets = set(
            re.findall(
                r"^([a-z-]+):",
                (ROOT / "Makefile").read_text(encoding="utf-8"),
                re.MULTILINE,
            )
        )
        assert targets >= {
            "demo",
            "test",
            "lint",
            "types",
            "bench",
            "gpu-check",
            "setup",
            "clean",
            "help",
        }


class TestDependencies:
    def test_extras(self) -> None:
        extras = PROJECT["optional-dependencies"]
        assert extras.keys() >= {
            "torch",
            "opencv",
            "webdataset",
            "dali",
            "dali-cu13",
            "simd",
            "ray",
            "s3",
            "gcs",
            "view",
            "test",
            "dev",
            "peers",
        }
        for name, distribution in {
            "torch": "torch",
            "opencv": "opencv-python-headless",
            "webdataset": "webdataset",
            "dali": "nvidia-dali-cuda120",
            "dali-cu13": "nvidia-dali-cuda130",
            "simd": "pillow-simd",
            "ray": "ray",
            "s3": "s3fs",
            "gcs": "gcsfs",
        }.items():
            assert any(
                re.match(rf"{distribution}\b(?!-)", requirement) for requirement in extras[name]
            )
            assert not [text for text in PROJECT["dependencies"] if text.startswith(distribution)]

    def test_the_core_asks_for_what_it_imports_and_for_no_more(self) -> None:
        """A dependency that only the laboratory or a rare table needs is one of an extra."""
        names = set()
        for file, module_names in imported_by().items():
            if not file.is_relative_to(ROOT / "bench"):
                names |= {name.partition(".")[0] for name in module_names}
        providers = packages_distributions() | {
            "yaml": ["pyyaml"],
            "cv2": ["opencv-python-headless"],
        }
        imported = set()
        for name in names:
            imported |= {distribution.lower() for distribution in providers.get(name, [])}
        dependencies = {
            re.split(r"[>=]", requirement)[0] for requirement in PROJECT["dependencies"]
        }
        assert dependencies <= imported, (
            f"{dependencies - imported}: no module of the core imports it"
        )
        extras = {
            re.split(r"[>=\[]", extra)[0]
            for requirements in PROJECT["optional-dependencies"].values()
            for extra in requirements
        }
        duplicates = dependencies & (extras | {"jinja2", "prometheus-client", "psutil", "scipy"})
        assert not duplicates, f"{duplicates}: the core and an extra ask for it"

    def test_pillow_is_never_forced_on_anybody(self) -> None:
        """pillow and pillow-simd install the same files; which one is there is the user's choice."""
        assert not [r for r in PROJECT["dependencies"] if r.lower().startswith("pillow")]

    def test_everything_has_a_lower_bound_and_only_patched_trainers_an_upper_one(self) -> None:
        # What our integrations change inside of them may change with the next major version.
        patched = ("accelerate", "lightning", "transformers")
        requirements = [
            *PROJECT["dependencies"],
            *(r for rs in PROJECT["optional-dependencies"].values() for r in rs),
        ]
        for requirement in requirements:
            bounds = re.findall(r"[<>=!~]+", requirement.partition(";")[0])
            ours = re.fullmatch(r"fuelrail\[[\w,-]+\]", requirement)
            allowed = [">=", "<"] if requirement.startswith(patched) else [">="]
            assert ours or bounds == allowed or requirement == "types-PyYAML", requirement

    def test_boto3_is_left_to_those_that_need_it(self) -> None:
        """A boto3 requirement of our own makes pip 23.2 pick one that no aiobotocore allows, and not resolve `test`."""
        extras = PROJECT["optional-dependencies"]
        assert not [
            r for requirements in extras.values() for r in requirements if r.startswith("boto3")
        ]
        assert "s3fs>=2025.12" in extras["s3"], (
            "older ones let pip look through hundreds of versions of fsspec"
        )

    def test_extras_refer_to_extras(self) -> None:
        extras = PROJECT["optional-dependencies"]
        for requirement in (r for rs in extras.values() for r in rs):
            if match := re.fullmatch(r"fuelrail\[([\w,-]+)\]", requirement):
                assert set(match[1].split(",")) <= extras.keys()


def repository_texts() -> list[Path]:
    """All text files that git tracks or would track."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    files = [ROOT / name for name in names if name]
    return [
        f
        for f in files
        if f.is_file() and not f.is_symlink() and b"\0" not in f.read_bytes()[:1000]
    ]


@pytest.mark.process
def test_nothing_names_a_machine() -> None:
    """No home folders, and neither this checkout's place nor what lies beside it."""
    places = {str(ROOT), str(Path.home())} | (
        {f"{ROOT.parent}/shared"} if ROOT.parent != Path("/") else set()
    )
    places.discard("/")
    pattern = re.compile(
        "|".join(
            [
                *map(re.escape, sorted(places)),
                r"/(?:home|Users)/\w",
                r"\b[A-Z]:\\\\?Users\b",
            ]
        )
    )
    for file in repository_texts():
        if file == Path(__file__).resolve():
            continue
        match = pattern.search(file.read_text(encoding="utf-8"))
        assert match is None, f"{file.relative_to(ROOT)} names {match.group()}"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with this checkout's wheel and sdist, built as pip would build them."""
    pytest.importorskip("hatchling", reason="the build backend is not installed here")
    out = tmp_path_factory.mktemp("dist")
    run_python(
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-t",
        "sdist",
        "-d",
        str(out),
        path=None,
    )
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


class TestBuild:
    @pytest.mark.process
    def test_wheel_holds_the_package_and_nothing_else(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
        native = any(name.endswith(".so") for name in names)
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_") if native else "any"
        assert wheel.name == f"fuelrail-{fuelrail.__version__}-py3-none-{platform}.whl"
        info = f"fuelrail-{fuelrail.__version__}.dist-info"
        assert {n for n in names if not n.startswith(info)} == list_shipped()
        assert {n.removeprefix(f"{info}/") for n in names if n.startswith(info)} == {
            "METADATA",
            "WHEEL",
            "RECORD",
            "entry_points.txt",
            "licenses/LICENSE",
        }
        assert len(names) == len(set(names))

    @pytest.mark.process
    def test_metadata(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            metadata = email.message_from_bytes(
                archive.read(f"fuelrail-{fuelrail.__version__}.dist-info/METADATA")
            )
            points = archive.read(
                f"fuelrail-{fuelrail.__version__}.dist-info/entry_points.txt"
            ).decode()
        assert metadata["Name"] == "fuelrail"
        assert metadata["Version"] == fuelrail.__version__
        assert metadata["License-Expression"] == "Apache-2.0"
        assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
        assert "fuelrail = fuelrail.__main__:main" in points

    @pytest.mark.process
    def test_sdist_builds_the_same_wheel(self, built: Path, wheel: Path, tmp_path: Path) -> None:
        with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
            archive.extractall(tmp_path, filter="data")
        source = next(tmp_path.iterdir())
        assert not [entry for entry in source.rglob("*") if entry.is_symlink()]
        assert (source / "tests" / "test_packaging.py").is_file()
        run_python(
            "-m",
            "hatchling",
            "build",
            "-t",
            "wheel",
            "-d",
            str(tmp_path / "dist"),
            cwd=source,
            path=None,
        )
        with (
            zipfile.ZipFile(next((tmp_path / "dist").glob("*.whl"))) as rebuilt,
            zipfile.ZipFile(wheel) as first,
        ):
            assert {i.filename: i.CRC for i in rebuilt.infolist()} == {
                i.filename: i.CRC for i in first.infolist()
            }
        # Tests run from it once it is installed editable: an sdist has no links, so that installation makes them.
        run_python(
            "-m",
            "hatchling",
            "build",
            "-t",
            "wheel:editable",
            "-d",
            str(tmp_path / "dev"),
            cwd=source,
            path=None,
        )
        assert all((source / ".src" / "fuelrail" / folder).is_symlink() for folder in FOLDERS)
        assert (source / ".src" / "fuelrail" / "loaders" / "loader.py").is_file()

    @pytest.mark.process
    def test_wheel_runs_without_the_checkout(self, wheel: Path, tmp_path: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "site")
        out = run_python("-m", "fuelrail", "--version", cwd=tmp_path, path=tmp_path / "site")
        assert out == f"fuelrail {fuelrail.__version__}\n"
        site = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
        (tmp_path / "report.json").write_text('{"schema": "fuelrail-bench-compare", "version": 2}')
        for words in (
            ["compare", "--rounds", "0", "dataset"],
            ["diff", "report.json", "report.json"],
        ):
            command = [sys.executable, "-m", "fuelrail", "bench", *words]
            refused = subprocess.run(
                command,
                cwd=tmp_path,
                env=site,
                capture_output=True,
                text=True,
                check=False,
            )
            assert refused.returncode == 2
            assert "clone the repository" in refused.stderr
        code = "import fuelrail.pipeline.format.dataset as d; print(d.__file__)"
        assert run_python("-c", code, cwd=tmp_path, path=tmp_path / "site").startswith(
            str(tmp_path)
        )

    @pytest.mark.process
    def test_the_repaired_wheel_is_for_manylinux_and_its_decoder_loads(
        self, wheel: Path, tmp_path: Path
    ) -> None:
        """The wheel of `make wheel` is tagged for old systems, and the native decoder is still taken."""
        pytest.importorskip("auditwheel", reason="the extra release is not installed here")
        if not wheel.name.endswith("-linux_x86_64.whl"):
            pytest.skip("the native decoder was not built for x86-64 here")
        script = [
            ROOT / ".ci" / "repair-wheel",
            wheel.parent,
            tmp_path / "dist",
        ]
        subprocess.run(
            script,
            env={**os.environ, "PYTHON": sys.executable},
            capture_output=True,
            check=True,
        )
        (repaired,) = (tmp_path / "dist").glob("*.whl")
        assert re.search(r"-py3-none-manylinux\w+_x86_64", repaired.name)
        with zipfile.ZipFile(repaired) as archive:
            archive.extractall(tmp_path / "site")
        code = "import fuelrail.pipeline.native as n; print(n.__file__, type(n.load()).__name__)"
        place, loaded = run_python("-c", code, cwd=tmp_path, path=tmp_path / "site").split()
        assert place.startswith(str(tmp_path))
        assert loaded == "CameraJpeg"


def test_no_plug_in_asks_an_index_for_fuelrail_by_its_name() -> None:
    plug_ins = sorted((ROOT / "configs" / "sources").glob("*/pyproject.toml"))
    asked = {
        file.parent.name: tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        for file in plug_ins
    }
    assert len(asked) == 5
    for name, project in asked.items():
        extras = project.get("optional-dependencies", {}).values()
        requirements = [
            *project["dependencies"],
            *itertools.chain.from_iterable(extras),
        ]
        assert not [text for text in requirements if text.startswith("fuelrail")], name
    extras = PROJECT["optional-dependencies"]
    video = [text for text in extras["video"] if not text.startswith("fuelrail")]
    assert asked["physical_ai"]["dependencies"] == [*video, *extras["opencv"]]
