"""The recipes: Kubernetes files against their published schemas, shell files as bash reads them, the cost table."""

from __future__ import annotations

import gzip
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from support.shared_data import shared_data

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
    versions = yaml.safe_load(gzip.decompress(packed.read_bytes()))["spec"]["versions"]
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
