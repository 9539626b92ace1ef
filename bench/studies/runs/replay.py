"""Batches of a run made again from its ledger, and the steps at which samples were shown."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fuelrail.bench.studies.runs.history import Part, RunHistory, steps_between
from fuelrail.bench.trainer.checkpoints.store import Store
from fuelrail.loaders.config import Transforms
from fuelrail.loaders.distributed import batch_digest
from fuelrail.loaders.loader import DataLoader
from fuelrail.loaders.schedule.bad_samples import BadSamplePolicy
from fuelrail.loaders.schedule.layers import LayerOptions
from fuelrail.loaders.schedule.ledger import RECORDED, package_versions
from fuelrail.loaders.schedule.state import decode_state, state_at
from fuelrail.pipeline.errors import (
    BadSamplesError,
    ConfigError,
    LedgerError,
    ShardError,
)
from fuelrail.pipeline.format.ledger import PlaceReached
from fuelrail.pipeline.limits import UNTYPED
from fuelrail.pipeline.order.balance import BalancedOrder, deal, order_batching
from fuelrail.pipeline.order.batching import Cursor, Walk, World
from fuelrail.pipeline.order.mix import MixStage
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.order.weights import FileWeights
from fuelrail.pipeline.order.windows import FrameWindow, TimeWindow
from fuelrail.pipeline.settings import convert, explain
from fuelrail.pipeline.storage.files import read_regular
from fuelrail.pipeline.text import shortened, text_of
from fuelrail.sharding.forgotten import (
    EarlierDataset,
    as_it_was,
    layer_as_it_was,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.layers import Layer
    from fuelrail.pipeline.format.ledger import SampleReplaced

    Replaced = dict[tuple[int, int], SampleReplaced]


class Replay(NamedTuple):
    """A batch of a run, made again."""

    batch: Any
    loader: Any
    """What made it: a `DataLoader`, closed, or what was given."""
    epoch: int
    samples_consumed: int
    """Samples of the epoch before the step, over all ranks."""
    digest_matches: bool | None
    """Whether the batch has the digest that the ledger has of it; None: it has none."""
    differences: list[str]
    """Differences from the run: versions of packages, bad samples that were replaced."""


def replay(
    ledger: str | os.PathLike[str],
    step: int,
    *,
    rank: int | None = None,
    dataset: str | os.PathLike[str] | None = None,
    functions: dict[str, Callable[..., Any]] | None = None,
    loader: Any = None,
    without: str | Sequence[str] | None = None,
    files: str | os.PathLike[str] | None = None,
    receipts: Sequence[str | os.PathLike[str]] = (),
) -> Replay:
    """Make the batch of a step of a run again, by a loader with the ledger's settings; steps count
    from 0.

    Args:
        ledger: the run's ledger.
        step: number of the step among those that the weights have seen, over all segments.
        rank: the batch of one rank; None: the rows of all ranks, in order (of ``balance``: as
            before they were dealt).
        dataset: where the dataset is now; None: where it was.
        functions: the run's ``transform``, ``batch_transform`` and ``collate_fn``, by these names.
        loader: takes the state in the place of a new loader; of a sampler's run its
            `fuelrail.order` sampler.
        without: keys and clips, or a file of them: the batch is that of a run which never had them,
            and may be of a step that the run has not come to.
        files: folder of the files of keys and weights that the run's order names; None: the
            ledger's. A ledger may come from somebody else, so files elsewhere are not read.
        receipts: those of `fuelrail.forget` on the dataset since the run; those beside its folder
        are known. A sample
            that is gone has another one in its place, and ``differences`` says so.

    Raises ConfigError for a step or rank that the run does not have and for functions that are
    missing, StateMismatchError for another dataset or other settings, LedgerError for a ledger that
    is not whole.
    """
    history = RunHistory(ledger)
    # Without samples a run may have more steps, which have the settings of the last one.
    last_step = history.num_steps - 1
    part, place = history.step(step if without is None else min(step, last_step))
    start = part.stretch.start
    setup = part.stretch.setup
    if rank is not None and not 0 <= rank < start.ranks:
        raise ConfigError(
            f"rank {rank} is not in step {step}: it had the ranks 0 to {start.ranks - 1}"
        )
    if loader is not None:
        source = loader.count() if hasattr(loader, "count") else loader
        source.load_state_dict(state_at(part.identity, place, start.global_batch))
        batch = next(iter(source))
    else:
        folder = Path(ledger).parent if files is None else files
        with make_loader(
            part,
            ledger=ledger,
            rank=rank,
            dataset=dataset,
            functions=functions or {},
            files=folder,
            without=without,
            receipts=receipts,
        ) as loader:
            state = state_at(part.identity, place, start.global_batch)
            if without is not None:
                # The place before the step in a run with the loader's order, whose segments have
                # as many steps as before.
                cursor = history.parts[0].walk.start
                for segment in history.parts:
                    batching = order_batching(
                        loader.where.order,
                        segment.stretch.start.global_batch,
                        World(),
                        drop_last=segment.identity.drop_last,
                    )
                    first = segment.walk.start if segment.stretch.skipped else cursor
                    walk = Walk(first, batching)
                    if step < segment.first + segment.length:
                        break
                    cursor = walk.cursor(segment.length)
                place = walk.cursor(step - segment.first)
                state = {
                    **loader.state_dict(),
                    "epoch": place.epoch,
                    "samples_consumed": place.samples_consumed,
                }
            loader.load_state_dict(state)
            datasets = loader.datasets.values()
            has_deleted = any(isinstance(dataset, EarlierDataset) for dataset in datasets)
            try:
                batch = next(iter(loader))
            except (ShardError, BadSamplesError) as error:
                if has_deleted:
                    raise ConfigError(
                        f"step {step} shows samples that were deleted since, or are damaged, and "
                        "no other sample can take their places in this order: without=FILE makes "
                        f"the step of a run that never had them ({error})"
                    ) from error
                raise
    now = package_versions()
    differences = []
    for name in {**setup.versions, **now}:
        version_before = setup.versions.get(name)
        version = now.get(name)
        if version != version_before:
            differences.append(f"{name} was {version_before}, and is {version}")
    keys = batch.get("sample_key", []) if isinstance(batch, dict) else []
    for (epoch, position), replacement in history.replaced().items():
        row = position - place.samples_consumed
        is_in_step = epoch == place.epoch and 0 <= row < start.global_batch
        is_of_rank = rank is None or replacement.rank == rank
        is_shown = replacement.replaced_by in keys
        if without is None and is_in_step and is_of_rank and not is_shown:
            differences.append(
                f"position {position} was {replacement.replaced_by}, for {replacement.key} "
                "was bad, and is another"
            )
    if isinstance(loader, DataLoader):
        deleted = _deleted_in_step(loader, place, start.global_batch)
        differences += [f"{key} was deleted; another sample is in its place" for key in deleted]
    matches = None
    if not without:
        num_ranks = 1 if rank is None else start.ranks
        recorded = history.digests().get((step, rank or 0, num_ranks))
        if recorded is not None:
            digest = batch_digest(batch) % 2**64
            matches = recorded == f"{digest:016x}"
    return Replay(
        batch=batch,
        loader=loader,
        epoch=place.epoch,
        samples_consumed=place.samples_consumed,
        digest_matches=matches,
        differences=differences,
    )


def _deleted_in_step(loader: DataLoader, place: Cursor, global_batch: int) -> list[str]:
    """Return the keys of deleted samples that a step shows, also as frames of windows."""
    datasets = list(loader.datasets.values())
    if not any(isinstance(dataset, EarlierDataset) for dataset in datasets):
        return []
    positions = place.samples_consumed + np.arange(global_batch)
    positions %= loader.where.epoch_length
    places = loader.where.places(place.epoch, positions)
    keys: set[str] = set()
    for number, rows in enumerate(places.rows):
        part = 0 if len(datasets) == 1 else int(places.parts[number])
        dataset = datasets[part]
        if not isinstance(dataset, EarlierDataset):
            continue
        is_present = places.present[number]
        for row in rows[is_present].tolist():
            key = dataset.index.row(row).key
            if key in dataset.deleted:
                keys.add(key)
    return sorted(keys)


def make_loader(
    part: Part,
    ledger: str | os.PathLike[str],
    rank: int | None,
    dataset: str | os.PathLike[str] | None,
    functions: dict[str, Callable[..., Any]],
    files: str | os.PathLike[str],
    *,
    without: str | Sequence[str] | None = None,
    receipts: Sequence[str | os.PathLike[str]] = (),
) -> DataLoader:
    """Make a loader equal to that of a part of a run, for one rank or for all. Raises ConfigError.

    ``files`` is the only folder whose files of keys and weights are read where the ledger names
    some.
    """
    setup = part.stretch.setup
    start = part.stretch.start
    if setup.loader is None:
        raise ConfigError(
            "the ledger is of a sampler's run: give the sampler, replay(ledger, step, "
            "loader=sampler)"
        )
    try:
        places, named = (
            convert(setup.loader[name], dict[str, str], name) for name in ("datasets", "functions")
        )
        options: dict[str, Any] = {name: setup.loader[name] for name in RECORDED}
        # Settings and not dicts of them: in a dict, a text in the place of settings would be the
        # path of a file of them.
        options["transforms"] = convert(
            {**options["transforms"], "decoder": setup.decoder},
            Transforms,
            "transforms",
        )
        options["bad_samples"] = convert(
            {**options["bad_samples"], "file": None},
            BadSamplePolicy,
            "bad_samples",
        )
        window = options["window"]
        if window is not None:
            kind = TimeWindow if "channels" in window else FrameWindow
            options["window"] = convert(window, kind, "window")
        order = convert(setup.loader["order"], OrderSpec, "order")
        if not places:
            raise ConfigError("'datasets' names no dataset")
        if isinstance(options["mix"], list):
            options["mix"] = convert(options["mix"], list[MixStage], "mix")
    except (KeyError, TypeError, ConfigError) as error:
        fault = f"{error} is missing" if isinstance(error, KeyError) else error
        problem = (
            f"ledger '{ledger}': the settings of the loader in the setup of record "
            f"{part.stretch.record} are of no known form: {fault}"
        )
        raise LedgerError(problem, part.stretch.record) from error
    # Files that the order names must be regular, and below the folder.
    folder = Path(files)
    named_files = [order.subset, *order.without]
    for rules in (order.weights, *(stage.weights for stage in order.stages)):
        weightings = [rule for rule in rules if isinstance(rule, FileWeights)]
        named_files += [weighting.file for weighting in weightings]
    for file in named_files:
        if not isinstance(file, str):
            continue
        subject = f"the ledger names the file {shortened(file)!r}"
        try:
            path = Path(file).resolve(strict=True)
            is_below = path.is_relative_to(folder.resolve())
            is_regular = is_below and path.is_file()
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{subject}, which cannot be read") from error
        if not is_below:
            raise ConfigError(
                f"{subject}, which is not below '{folder}'; to read it, name its folder: "
                "--files FOLDER, or files=FOLDER in Python"
            )
        if not is_regular:
            raise ConfigError(f"{subject}, which is not a regular file")
    if without is not None:
        entry = without if isinstance(without, str) else tuple(without)
        order = msgspec.structs.replace(order, without=(*order.without, entry))
    options["order"] = order
    for name, function in named.items():
        if name not in functions:
            raise ConfigError(
                f"the run had {name}={function}, which a ledger does not keep: give "
                f"functions={{{name!r}: ...}}"
            )
    if dataset is not None and options["mix"] is not None:
        raise ConfigError(
            f"dataset='{dataset}' is one, and the run mixed {', '.join(places)}: put them "
            "where they were"
        )
    fingerprints = part.identity.dataset
    if isinstance(fingerprints, str):
        fingerprints = dict.fromkeys(places, fingerprints)
    locations: dict[str, Any] = places
    if dataset is not None:
        name = next(iter(places))
        locations = {name: dataset}
    opened: dict[str, Any] = {}
    num_samples = 0
    is_earlier = False
    for name, place in locations.items():
        opened[name] = as_it_was(place, fingerprints.get(name, ""), receipts)
        if isinstance(opened[name], EarlierDataset):
            is_earlier = True
            num_samples += len(opened[name])
    if is_earlier and options["layers"]:
        options["layers"] = _open_layers_of(part, options["layers"], opened, receipts)
    if is_earlier:  # the policy of the run does not know such samples
        has_packs = order.pack is not None or order.bucket is not None
        options["bad_samples"] = {
            "on_error": "raise" if has_packs else "substitute",
            "max_bad": num_samples,
            "file": None,
        }
    data = next(iter(opened.values())) if options["mix"] is None else opened
    options |= functions
    options["world"] = World()
    options["prefetch_factor"] = 1
    try:
        loader = DataLoader(data, start.global_batch, **options)
        if rank is not None:
            loader.reshape(World(rank, start.ranks))
        return loader
    except ConfigError as error:
        raise ConfigError(f"ledger '{ledger}': {error}") from error


def _open_layers_of(
    part: Part,
    layers: Mapping[str, Any],
    datasets: Mapping[str, Dataset],
    receipts: Sequence[str | os.PathLike[str]],
) -> dict[str, Any]:
    """Return the layers of a run as they were, by name; of a mix by dataset and name."""
    fingerprints: Any = part.identity.layers or {}
    settings = part.stretch.setup.loader
    is_mix = settings is not None and settings["mix"] is not None
    if not is_mix:
        name = next(iter(datasets))
        layers = {name: layers}
        fingerprints = {name: fingerprints}
    opened: dict[str, dict[str, Layer]] = {}
    for dataset, layers_of_dataset in layers.items():
        opened[dataset] = {}
        fingerprints_of_dataset = fingerprints.get(dataset, {})
        for name, place in layers_of_dataset.items():
            options = LayerOptions(place) if isinstance(place, str) else LayerOptions(**place)
            opened[dataset][name] = layer_as_it_was(
                name,
                options.path,
                base=datasets[dataset],
                fingerprint=fingerprints_of_dataset.get(name, ""),
                receipts=receipts,
                missing=options.missing,
            )
    if is_mix:
        return dict(opened)
    return dict(next(iter(opened.values())))


class Showing(msgspec.Struct, frozen=True):
    """A sample that was shown in a step of a run."""

    key: str
    step: int
    epoch: int
    position: int
    rank: int
    draw: int
    """How many positions of the epoch before this one show the sample."""
    as_frame: bool
    """It was another frame of the sample's window, or a stand-in for one."""
    valid: bool
    """False: padding, at the end of a lane or an epoch."""
    stands_for: str | None
    """The bad sample that it took the place of."""
    replaced_by: str | None
    """The sample that was shown in its place, because it was bad."""


class SeenReport(msgspec.Struct, frozen=True):
    """The steps at which samples were shown."""

    showings: list[Showing]
    num_samples: int
    newest_clean: tuple[int, int] | None
    """The newest saved state before the first of them, as a place: epoch and samples consumed;
    None: there is none.
    """
    checkpoint: str | None
    """The name of its checkpoint, where the checkpoints are known."""

    def as_text(self) -> str:
        """Return the showings as text."""
        lines = []
        for showing in self.showings:
            line = (
                f"{showing.key}: step {showing.step}, epoch {showing.epoch}, position "
                f"{showing.position}, rank {showing.rank}, draw {showing.draw}"
            )
            if showing.as_frame:
                line += ", as a frame of a window"
            if not showing.valid:
                line += ", as padding"
            if showing.stands_for is not None:
                line += f", in the place of {showing.stands_for}"
            if showing.replaced_by is not None:
                line += f", replaced by {showing.replaced_by}"
            lines.append(line)
        clean = "no saved state is from before them"
        if self.newest_clean is not None:
            epoch, consumed = self.newest_clean
            clean = (
                f"the newest saved state without them is that of epoch {epoch}, {consumed} samples"
            )
            if self.checkpoint is not None:
                clean += f": {self.checkpoint}"
        num_showings = len(self.showings)
        lines.append(f"{self.num_samples} samples were shown {num_showings} times; {clean}")
        return text_of(lines)


def seen(
    ledger: str | os.PathLike[str],
    names: Sequence[str],
    *,
    dataset: str | os.PathLike[str] | None = None,
    functions: dict[str, Callable[..., Any]] | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    files: str | os.PathLike[str] | None = None,
    receipts: Sequence[str | os.PathLike[str]] = (),
) -> SeenReport:
    """Return at which steps of a run samples were shown, by inverting its order; ``names`` are keys
    or clips.

    Frames of windows count. ``dataset``, ``functions``, ``files`` and ``receipts`` are as in
    `replay`. ``checkpoints`` are those to choose the newest clean state among: a folder or URL of
    `Checkpoints`, or a JSON file of loaders' states by the checkpoints' names; None: the states
    that the ledger has. Raises ConfigError for a name that the run's split does not have, and what
    `replay` raises.
    """
    history = RunHistory(ledger)
    replaced = history.replaced()
    showings: list[Showing] = []
    folder = Path(ledger).parent if files is None else files
    num_samples = 0
    loader_key: tuple[int, int] | None = None
    with contextlib.ExitStack() as stack:
        for part in history.parts:
            if not part.length:
                continue
            # A run that was continued often has many parts of one setup.
            setup_key = id(part.stretch.setup), part.stretch.start.global_batch
            if loader_key != setup_key:
                stack.close()
                loader = make_loader(
                    part,
                    ledger=ledger,
                    rank=None,
                    dataset=dataset,
                    functions=functions or {},
                    files=folder,
                    receipts=receipts,
                )
                stack.enter_context(loader)
                loader_key = setup_key
            state = state_at(part.identity, part.walk.start, loader.batch_size)
            loader.load_state_dict(state)  # refuses another dataset, or one that has changed
            samples_of_datasets = _samples(loader, part.identity.split, names)
            num_samples = sum(map(len, samples_of_datasets))
            last_epoch, _ = part.walk.place(part.length - 1)
            for epoch in range(part.walk.start.epoch, last_epoch + 1):
                for dataset_number, samples in enumerate(samples_of_datasets):
                    if len(samples):
                        showings += _in_epoch(
                            part,
                            loader=loader,
                            epoch=epoch,
                            dataset_number=dataset_number,
                            samples=samples,
                            replaced=replaced,
                        )
    showings.sort(key=lambda showing: (showing.step, showing.position))
    # The newest saved state that none of the showings is before.
    records = [record for record in history.ledger.records if isinstance(record, PlaceReached)]
    places = [record.place for record in records if record.why == "state"]
    for part in history.parts:
        restored = part.stretch.start.restored
        if restored is not None:
            places.append(restored)
    names_of_states: dict[tuple[int, int], str] = {}
    if checkpoints is not None:
        for name, saved in saved_states(checkpoints).items():
            decoded = decode_state(saved, history.parts[-1].identity, strict=False)
            names_of_states[decoded.epoch, decoded.samples_consumed] = name
        places = list(names_of_states)
    if showings:
        _, shown_first = history.step(showings[0].step)
        limit = shown_first.epoch, shown_first.samples_consumed
        places = [place for place in places if place <= limit]
    newest = max(places, default=None)
    checkpoint = None if newest is None else names_of_states.get(newest)
    return SeenReport(showings, num_samples, newest, checkpoint)


def _samples(
    loader: DataLoader,
    split: str,
    names: Sequence[str],
) -> list[NDArray[np.int64]]:
    """Return the samples with these keys, or of these clips, of each dataset: numbers in its
    split.
    """
    rows: list[set[int]] = []
    unknown = set(names)
    for dataset in loader.datasets.values():
        entry = dataset.split(split)
        first = entry.first_sample
        end = entry.first_sample + entry.num_samples
        samples: set[int] = set()
        clips = []
        for name in names:
            row = dataset.find(name)
            if row is not None and first <= row < end:
                samples.add(row - first)
                unknown.discard(name)
            else:
                clips.append(name)
        if clips:
            column = dataset.index.texts("clip_id", first, end)
            is_of_clips = pc.is_in(column, value_set=pa.array(clips, pa.string()))
            samples_of_clips = np.flatnonzero(is_of_clips.to_numpy())
            clips_of_samples = column.take(samples_of_clips).unique()
            unknown -= set(clips_of_samples.to_pylist())
            samples.update(samples_of_clips.tolist())
        rows.append(samples)
    if unknown:
        raise ConfigError(
            f"no sample or clip of split '{split}' is called {shortened(min(unknown))!r}"
        )
    return [np.array(sorted(numbers), np.int64) for numbers in rows]


def _in_epoch(
    part: Part,
    loader: DataLoader,
    epoch: int,
    dataset_number: int,
    samples: NDArray[np.int64],
    replaced: Replaced,
) -> list[Showing]:
    """Return the showings in those steps of an epoch that are of a part of the run."""
    batches = part.walk.batches(epoch)
    start = part.stretch.start
    dataset = list(loader.datasets.values())[dataset_number]
    first = dataset.split(part.identity.split).first_sample
    keys = [dataset.index.row(first + sample).key for sample in samples.tolist()]
    indices, positions, is_own = loader.where.find(epoch, dataset_number, samples)
    keys_shown = [keys[index] for index in indices.tolist()]
    draws_of_samples = list(zip(keys_shown, positions.tolist(), is_own.tolist(), strict=True))
    for (epoch_of_entry, position), entry in replaced.items():
        if epoch_of_entry == epoch and entry.replaced_by in keys:
            draws_of_samples.append((entry.replaced_by, position, True))
    positions = np.array([position for _, position, _ in draws_of_samples], np.int64)
    places = loader.where.places(epoch, positions)
    valid = places.valid.tolist()
    if "pack" in places.flags:
        valid = [True] * len(draws_of_samples)
    first_step = part.first + steps_between(part.walk, (epoch, 0))
    num_steps = min(batches.num_steps, part.first + part.length - first_step)
    showings = []
    draws = dict.fromkeys(keys, 0)
    for (key, position, is_own_sample), is_valid in zip(draws_of_samples, valid, strict=True):
        replacement = replaced.get((epoch, position))
        stands_for = None
        replaced_by = None
        if replacement is not None and replacement.replaced_by == key:
            stands_for = replacement.key
        elif replacement is not None and is_own_sample:
            replaced_by = replacement.replaced_by
        # Beyond the epoch's end the last step shows its first positions again.
        for running in (position, position + batches.epoch_length):
            step, row = divmod(running - batches.start, batches.global_batch)
            if 0 <= step < num_steps:
                order = loader.where.order
                if isinstance(order, BalancedOrder):
                    running_step = batches.running(step) % batches.epoch_length
                    costs = order.position_costs(order.epoch(epoch), running_step)
                    dealt = deal(costs, start.ranks * order.balance.micro_batches)
                    row = int(np.flatnonzero(dealt == row)[0])
                rank = (start.ranks * (row + 1) - 1) // batches.global_batch
                showing = Showing(
                    key=key,
                    step=first_step + step,
                    epoch=epoch,
                    position=position,
                    rank=rank,
                    draw=draws[key],
                    as_frame=not is_own_sample,
                    valid=is_valid and running == position,
                    stands_for=stands_for,
                    replaced_by=replaced_by,
                )
                showings.append(showing)
        draws[key] += is_own_sample
    return showings


def saved_states(checkpoints: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the loaders' states of checkpoints by name, the newest last; see `seen`.

    Raises ConfigError.
    """
    place = os.fspath(checkpoints)
    if not place.endswith(".json"):
        store = Store(place)
        states = {}
        for name in reversed(store.complete()):
            manifest = store.read(name, slice(0))
            states[name] = manifest.progress.loader
        return states
    try:
        data = read_regular(place, UNTYPED)
        return msgspec.json.decode(data, type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else explain(error, data, dict[str, Any])
        raise ConfigError(
            f"checkpoints='{place}' must be a JSON file of loaders' states by name: {why}"
        ) from error
