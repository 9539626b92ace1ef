"""Decoders of other packages: found by their entry points, used by the loader, refused in a sentence."""

from __future__ import annotations

import pytest
import torch

from fuelrail import DataLoader, ImageAugment, Transforms
from fuelrail.loaders.commands import doctor
from fuelrail.loaders.decode import BACKENDS, decodes_on_device, make_decoder
from fuelrail.pipeline.errors import ConfigError
from support.neutral_source import install_plugin
from support.watched_decoder import Watched


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Packages with decoders: one works, one lies, one cannot be imported, one wants a name that is taken."""
    for name, place in {
        "watched": "support.watched_decoder:make",
        "liar": "builtins:repr",
        "broken": "no_such_module:make",
        "turbo": "no_such_module:make",
    }.items():
        install_plugin(tmp_path / "site", name, place, "fuelrail.decoders")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(Watched, "places", [])


def test_a_loader_decodes_with_a_plugin_as_with_a_backend_of_its_own(installed, tiny_dataset):
    batches = {}
    for name in ("watched", "pillow"):
        transforms = Transforms(image=ImageAugment(height=32, width=64), decoder=name)
        with DataLoader(
            tiny_dataset({"train": (4,)}).root,
            2,
            transforms=transforms,
            num_workers=1,
            seed=3,
        ) as loader:
            batches[name] = next(iter(loader))["img"].clone()
    assert torch.equal(batches["watched"], batches["pillow"])
    assert [(place.device, place.num_threads) for place in Watched.places] == [("cpu", 1)]
    assert Watched.places[0].facts().largest_wh != (0, 0), "the loader says what images come"
    assert not decodes_on_device(make_decoder("watched"))


def test_doctor_lists_plugins_without_loading_them(installed):
    states = {finding.subject: finding.state for finding in doctor().findings}
    assert states["decoder=broken"] == "plug-in: no_such_module:make"
    assert Watched.places == []


def test_a_plugin_does_not_replace_a_backend(installed):
    assert make_decoder("turbo").name == "turbo"
    assert "turbo" in BACKENDS


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "broken",
            "decoder 'broken' of package 'broken-source' cannot be imported: No module named 'no_such_module'",
        ),
        ("liar", "'builtins:repr' made str, which is not an ImageDecoder"),
        (
            "wached",
            "decoder='wached' must be one of auto, turbo, pillow, dali, .*did you mean 'watched'",
        ),
    ],
)
def test_what_is_not_a_decoder_is_refused_in_a_sentence(installed, name, says):
    with pytest.raises(ConfigError, match=says):
        make_decoder(name)
