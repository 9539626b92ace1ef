"""The GPU check's own code on the CPU: the same checks, its GPU arm on fake devices, and that they can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import msgspec
import pytest
import torch

from fuelrail.bench.gpu import bare, base, check, device, feeding, images, pixels
from fuelrail.bench.gpu.base import Bench, CheckFailed
from fuelrail.bench.gpu.check import Check, GpuCheck, run_checks
from fuelrail.bench.studies.train import run as train_run
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.sample.image_header import probe
from support.backends import HAS_DALI, needs_dali
from support.nvml_watch import Watch

ROOT = Path(__file__).resolve().parents[3]
CUDA = torch.device("cuda", 0)
NEEDS_DALI = {
    "DALI decodes by hardware", "first runs of the decoder", "share of the bare decoder", "decoders agree",
    "pixels do not depend on company", *(each.name for each in check.CHECKS if "(dali)" in each.name),
}  # fmt: skip


def read(path):
    return msgspec.json.decode(path.read_bytes(), type=GpuCheck)


def outcomes(result):
    return [(each.name, each.outcome) for each in result.checks]


# torch.compile looks at the gradients of all tensors in a frame, and torch warns of those that are no leaves.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_all_checks_hold_and_the_result_is_kept(bench, tmp_path):
    result = run_checks(bench, tmp_path / "out.json")
    expected = {each.name: None for each in check.CHECKS if HAS_DALI or each.name not in NEEDS_DALI}
    assert {each.name: each.problem for each in result.checks if each.name in expected} == expected
    assert msgspec.to_builtins(read(tmp_path / "out.json")) == msgspec.to_builtins(result)
    assert all(each.facts for each in result.checks if each.name in expected)
    (modes,) = (each.facts for each in result.checks if each.name == "ways to compute a step")
    assert len({mode["name"] for mode in modes.values()}) == 7
    full = modes["gpt-tiny, fp32"]["loss"]
    assert all(mode["loss"] == pytest.approx(full, rel=0.01) for mode in modes.values())


@pytest.mark.slow
def test_f1_a_gpu_without_dali_fails_every_check_that_needs_it(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "_require_gpu", lambda: None)
    monkeypatch.setattr(check, "Bench", lambda _, *paths: Bench(torch.device("cpu"), *paths))
    monkeypatch.setattr(base, "has_dali", lambda: False)
    monkeypatch.setattr(check, "CHECKS", [each for each in check.CHECKS if each.name in NEEDS_DALI])
    path = tmp_path / "out.json"
    assert check.main(["--dataset", str(bench.dataset), "--out", str(path)]) == 1
    found = read(path)
    assert {each.name for each in found.checks} == NEEDS_DALI
    for each in found.checks:
        assert each.outcome == "failed"
        assert "NVIDIA DALI is not installed" in each.problem


def test_f1_every_fed_check_runs_with_both_decoders():
    names = {each.name for each in check.CHECKS}
    for name in ("six cameras are fed", "ResNet-50 is fed", "occupancy against the step", "loader alone", "contention"):
        assert {f"{name} (turbo)", f"{name} (dali)"} <= names
    assert sum(each.seconds for each in check.CHECKS) < 40 * 60
    # What must be known after ten minutes: the decoder's share, the loader's rate and the occupancy.
    first = [each for each in check.CHECKS if "occupancy against" in each.name][-1]
    assert sum(each.seconds for each in check.CHECKS[: check.CHECKS.index(first) + 1]) < 10 * 60


@pytest.mark.process
@pytest.mark.parametrize(("driver", "extra"), [("580.65.06", "dali-cu13"), ("535.104.05", "dali")])
def test_f1_make_installs_dali_by_the_driver(driver, extra, tmp_path):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {driver}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["make", "-n", "gpu-check"], cwd=ROOT, env=path, capture_output=True, text=True, check=True)
    assert f'-e ".[dev,{extra},nvml]"' in done.stdout
    assert "-m fuelrail.bench.gpu.check" in done.stdout


@pytest.mark.process
def test_f2_it_runs_from_a_plain_folder_of_wheels():
    """Without a virtual environment: the base interpreter, the checkout, and a folder of packages on PYTHONPATH."""
    wheels = sysconfig.get_path("purelib")
    environment = {"PYTHONPATH": f"{ROOT / '.src'}:{wheels}", "PATH": "/nowhere", "HOME": os.environ["HOME"]}
    command = [sys._base_executable, "-s", "-m", "fuelrail.bench.gpu.check"]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "shows no GPU here" in done.stderr
    assert done.stderr.count("\n") == 1


def test_all_checks_are_listed(capsys):
    assert check.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split("s  ", 1)[1] for line in listed] == [each.name for each in check.CHECKS]


def passing(bench, facts):
    facts["figure"] = 1


def test_f3_the_file_is_written_after_every_check_and_sigterm_keeps_what_there_is(bench, tmp_path, monkeypatch, capsys):
    path, seen = tmp_path / "out.json", []

    def terminated(bench, facts):
        seen.extend(outcomes(read(path)))
        facts["half"] = 0.5
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal comes first")

    checks = [Check(name, passing, 1.0) for name in "abc"]
    monkeypatch.setattr(check, "CHECKS", [*checks, Check("d", terminated, 1.0), Check("e", passing, 1.0)])
    before = signal.getsignal(signal.SIGTERM)
    result = run_checks(bench, path)
    assert seen == [("a", "passed"), ("b", "passed"), ("c", "passed")]
    assert outcomes(result) == [*seen, ("d", "failed")]
    assert (result.cut_off, result.checks[-1].facts) == ("SIGTERM during 'd'", {"half": 0.5})
    assert read(path) == result
    assert signal.getsignal(signal.SIGTERM) is before
    assert "passed  a" in capsys.readouterr().out


def test_f3_checks_are_chosen_by_name_and_by_the_time_that_is_left(bench, tmp_path, monkeypatch):
    checks = [Check("one", passing, 1.0), Check("two long", passing, 1000.0), Check("three", passing, 1.0)]
    monkeypatch.setattr(check, "CHECKS", checks)
    assert outcomes(run_checks(bench, tmp_path / "a", only=["long", "three"])) == [
        ("two long", "passed"),
        ("three", "passed"),
    ]
    limited = run_checks(bench, tmp_path / "b", seconds=500.0)
    assert outcomes(limited) == [("one", "passed"), ("two long", "not run"), ("three", "passed")]
    assert limited.checks[1].problem.startswith("it takes about 1000 s, and ")
    with pytest.raises(SystemExit, match="2"):
        check.main(["--only", "nothing like it"])


def test_a_check_that_fails_or_breaks_keeps_its_facts_and_the_others_still_run(bench, tmp_path, monkeypatch):
    def fails(bench, facts):
        facts["measured"] = 3
        raise CheckFailed("it is wrong")

    def breaks(bench, facts):
        raise ZeroDivisionError

    monkeypatch.setattr(check, "CHECKS", [Check("a", fails, 1), Check("b", breaks, 1), Check("c", passing, 1)])
    a, b, c = run_checks(bench, tmp_path / "out.json").checks
    assert (a.outcome, a.problem, a.facts) == ("failed", "it is wrong", {"measured": 3})
    assert "ZeroDivisionError" in b.problem
    assert c.outcome == "passed"


def test_f4_the_data_has_every_kind_of_image():
    found = {kind: probe(images.jpeg(kind)) for kind in images.KINDS}
    assert {kind: bool(info.restart_interval) for kind, info in found.items()} == {
        kind: kind == "restart" for kind in images.KINDS
    }
    assert {(info.width, info.height) for info in found.values()} == {(1600, 900)}
    assert [kind for kind in images.KINDS if b"\xff\xc2" in images.jpeg(kind)[:700]] == ["progressive"]
    assert images.jpeg("plain", 1) != images.jpeg("plain", 2)
    assert len(images.bad_jpegs()) == 3


def wrong(kind, damage):
    """Decoding that damages one picture: the first, or that of a kind."""
    honest = pixels._decoded

    def tampered(decoder, batch):
        pictures = honest(decoder, batch)
        at = 0 if kind is None else batch.kinds.index(kind)
        pictures[at] = damage(pictures[at])
        return pictures

    return tampered


@needs_dali
@pytest.mark.parametrize("damage", [lambda image: image[:, :, ::-1].copy(), lambda image: 0], ids=["other", "black"])
@pytest.mark.parametrize("kind", ["restart", "gray"])
def test_f4_f32_one_wrong_picture_of_one_kind_is_found(kind, damage, bench, monkeypatch):
    monkeypatch.setattr(pixels, "_decoded", wrong(kind, damage))
    facts = {}
    with pytest.raises(CheckFailed, match="not as they must be"):
        pixels.decoders_agree(bench, facts)
    assert min(facts["lowest_psnr_db"], key=facts["lowest_psnr_db"].get) == kind


@needs_dali
def test_f7_f31_pixels_that_depend_on_their_place_are_found(bench, monkeypatch):
    """The first place of each batch is decoded by something else."""
    monkeypatch.setattr(pixels, "_decoded", wrong(None, lambda image: image ^ 1))
    with pytest.raises(CheckFailed, match="differs by 1 levels at another place"):
        pixels.pixels_do_not_depend_on_company(bench, {})


@pytest.mark.parametrize(
    ("jpeg", "reason", "problem"),
    [
        (0.5, None, None),
        (0.0, None, "the JPEG engines were idle"),
        (None, None, "NVML does not say how busy the JPEG engines are: the card does not know"),
        (None, "OSError: Driver Not Loaded", "NVML does not say.*Driver Not Loaded"),
    ],
)
def test_f29_idle_jpeg_engines_fail_a_check_and_so_does_not_knowing(jpeg, reason, problem, bench, monkeypatch):
    monkeypatch.setattr(base, "NvmlWatch", type("Card", (Watch,), {"jpeg": jpeg, "reason": reason}))
    on_gpu, facts = bench._replace(device=CUDA), {}
    if problem is None:
        with base.jpeg_engines(on_gpu, "dali", facts):
            pass
    else:
        with pytest.raises(CheckFailed, match=problem), base.jpeg_engines(on_gpu, "dali", facts):
            pass
    assert facts == {"jpeg_engines_busy": jpeg}
    with base.jpeg_engines(on_gpu, "turbo", {}):  # which uses none
        pass


@pytest.mark.parametrize(("ours", "holds"), [(94.0, False), (96.0, True)])
def test_f25_the_share_is_judged_against_the_best_batch_at_the_same_load(ours, holds, bench, monkeypatch):
    rates = {1.0: {504: 100.0}, 0.12: {64: 300.0}}
    monkeypatch.setattr(base, "NvmlWatch", Watch)
    monkeypatch.setattr(bare, "require_dali", lambda: None)
    monkeypatch.setattr(
        bare, "_bare", lambda images, device, load, batch, seconds: rates.get(load, {}).get(batch, 50.0)
    )
    monkeypatch.setattr(bare, "_stage_rate", lambda bench, kind, seconds: ours)
    facts = {}
    if holds:
        bare.share_of_the_bare_decoder(bench._replace(device=CUDA), facts)
    else:
        with pytest.raises(CheckFailed, match="94% of the decoder alone at the same share"):
            bare.share_of_the_bare_decoder(bench._replace(device=CUDA), facts)
    assert set(facts["bare_images_per_s"]) >= {"share 0", "share 0.12", "share 0.3", "share 0.65", "share 1"}
    assert set(facts["bare_images_per_s"]["share 1"]) == {"64", "126", "252", "504"}
    assert facts["share_of_best"] == pytest.approx(ours / 300.0, abs=1e-3)


@needs_dali
@pytest.mark.parametrize("graph", [None, *bare.GRAPHS])
def test_f25_the_bare_graphs_of_a_gpu_can_be_defined(graph, monkeypatch):
    """Keywords that this version of DALI does not know raise when a graph is defined; building it needs a GPU."""
    from nvidia.dali import Pipeline

    monkeypatch.setattr(Pipeline, "build", lambda pipeline: None)
    for load in (0.0, 0.65, 1.0):
        bare._pipeline([images.jpeg("plain")], CUDA, load=load, batch=4, graph=graph)


@needs_dali
@pytest.mark.process
def test_f30_a_first_run_that_dies_is_reported_and_harms_nothing(bench, monkeypatch):
    monkeypatch.setattr(bare, "GRAPHS", {"image": ""})
    facts = {}
    with pytest.raises(CheckFailed, match="ended in SIGSEGV"):
        monkeypatch.setattr(bare.sys, "executable", _dying(bench.work))
        bare.first_runs(bench, facts)
    assert facts["image"]["ended"].startswith("SIGSEGV")


def _dying(folder):
    script = folder / "dies"
    script.write_text("#!/bin/sh\nkill -SEGV $$\n")
    script.chmod(0o755)
    return str(script)


def test_f26_the_host_waits_for_a_step_only_when_two_more_are_queued(bench, monkeypatch):
    made, waited = [], []

    class Noted(base.Mark):
        def __init__(self, bench):
            super().__init__(bench)
            made.append(self)

        def wait(self):
            waited.append((made.index(self), len(made)))

    monkeypatch.setattr(feeding, "Mark", Noted)
    batches = iter(lambda: {"img": torch.zeros(1, 1, 3, 8, 8)}, None)
    feeding._point(bench, batches, 1.0, lambda step_ms: None)
    *steps, last = waited
    # A step makes two marks, and its second one is waited for.
    assert steps and all(queued == at + 1 + 2 * 2 for at, queued in steps)
    assert last == (len(made) - 1, len(made))


@pytest.mark.process
def test_f12_why_nvml_says_nothing_is_in_the_report(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(train_run, "NvmlWatch", type("Card", (Watch,), {"reason": "OSError: Driver Not Loaded"}))
    report = base.train(
        bench.dataset, tmp_path, steps=4, warmup=1, batch_size=1, model="light",
        accelerator="emulated:resnet50-224-h100", workers=1,
    )  # fmt: skip
    assert "No facts of the GPUs from NVML: OSError: Driver Not Loaded." in report.warnings


def test_a_difference_between_batches_is_found(bench, monkeypatch):
    honest = device._points_loader

    class Tampering:
        def __init__(self, bench):
            self.loader = honest(bench)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.loader.close()

        def __iter__(self):
            for batch in self.loader:
                batch["intrinsics"][0, 0, 0, 0] += 1
                yield batch

        def stats(self):
            return self.loader.stats()

    made = iter([honest, Tampering])
    monkeypatch.setattr(device, "_points_loader", lambda bench: next(made)(bench))
    with pytest.raises(CheckFailed, match="batch 0: intrinsics differ"):
        device.transfer_is_exact(bench, {})


@pytest.mark.slow
def test_its_dataset_is_made_by_the_commands_that_users_take(tmp_path):
    dataset = open_dataset(check.synthesise(tmp_path, num_clips=2, num_frames=1, size="160x90"))
    assert len(dataset.manifest.cameras) == 6
    assert dataset.split("train").num_samples == 1


def test_without_a_gpu_that_torch_can_use_it_says_so_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    new = types.SimpleNamespace(name="NVIDIA H100", driver="580.1")
    for gpus, said in (([], "shows no GPU here"), ([new], "NVIDIA H100 (driver 580.1), but torch")):
        monkeypatch.setattr(check, "installed_gpus", lambda gpus=gpus: gpus)
        assert check.main([]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
