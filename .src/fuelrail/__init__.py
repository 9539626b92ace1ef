"""Fuelrail: deterministic multi-camera shards and a loader that keeps every GPU fed.

::

    import fuelrail as fr

    loader = fr.DataLoader("DATASET", batch_size=8, shuffle=True, drop_last=True, seed=7)

Importing this package imports neither torch nor any other heavy library; the public names below are
resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from fuelrail.bench.annotate.run import AnnotateOptions as AnnotateOptions
    from fuelrail.bench.annotate.run import AnnotateReport as AnnotateReport
    from fuelrail.bench.annotate.run import annotate as annotate
    from fuelrail.bench.planner.scenario import PlanOptions as PlanOptions
    from fuelrail.bench.planner.scenario import Scenario as Scenario
    from fuelrail.bench.studies.diagnose.run import DiagnoseOptions as DiagnoseOptions
    from fuelrail.bench.studies.diagnose.run import diagnose as diagnose
    from fuelrail.bench.studies.diff import DiffOptions as DiffOptions
    from fuelrail.bench.studies.diff import diff as diff
    from fuelrail.bench.studies.loader.measure import bench_loader as bench_loader
    from fuelrail.bench.studies.loader.report import LoaderOptions as LoaderOptions
    from fuelrail.bench.studies.order.describe import DescribeOptions as DescribeOptions
    from fuelrail.bench.studies.order.describe import describe_order as describe_order
    from fuelrail.bench.studies.plan.run import plan as plan
    from fuelrail.bench.studies.runs.attest import attest as attest
    from fuelrail.bench.studies.runs.history import run_diff as run_diff
    from fuelrail.bench.studies.runs.history import run_history as run_history
    from fuelrail.bench.studies.runs.replay import replay as replay
    from fuelrail.bench.studies.runs.replay import seen as seen
    from fuelrail.bench.studies.scale.report import ScaleOptions as ScaleOptions
    from fuelrail.bench.studies.scale.run import scale as scale
    from fuelrail.bench.studies.train.run import bench_train as bench_train
    from fuelrail.bench.studies.train.settings import TrainOptions as TrainOptions
    from fuelrail.bench.trainer.checkpoints.saver import Checkpoints as Checkpoints
    from fuelrail.bench.trainer.distill.pairs import Distilling as Distilling
    from fuelrail.bench.trainer.distill.pairs import Pair as Pair
    from fuelrail.bench.trainer.distill.student import divergence as divergence
    from fuelrail.bench.trainer.own import LoopOptions as LoopOptions
    from fuelrail.bench.trainer.own import evaluate as evaluate
    from fuelrail.bench.trainer.own import train as train
    from fuelrail.bench.trainer.strategies.parallel import parallelise as parallelise
    from fuelrail.bench.trainer.strategies.settings import ParallelSettings as ParallelSettings
    from fuelrail.bench.trainer.weights import WeightsReport as WeightsReport
    from fuelrail.bench.trainer.weights import load_weights as load_weights
    from fuelrail.bench.trainer.weights import save_weights as save_weights
    from fuelrail.loaders.batch.runner import LoaderStats as LoaderStats
    from fuelrail.loaders.commands import DoctorReport as DoctorReport
    from fuelrail.loaders.commands import doctor as doctor
    from fuelrail.loaders.commands import serve_metrics as serve_metrics
    from fuelrail.loaders.config import Budget as Budget
    from fuelrail.loaders.config import Normalize as Normalize
    from fuelrail.loaders.config import StaticBatches as StaticBatches
    from fuelrail.loaders.config import StorageOptions as StorageOptions
    from fuelrail.loaders.config import Transforms as Transforms
    from fuelrail.loaders.decode.lens import Undistort as Undistort
    from fuelrail.loaders.decode.protocol import DaliOptions as DaliOptions
    from fuelrail.loaders.distributed import mesh_world as mesh_world
    from fuelrail.loaders.integrations.iterable import IterableView as IterableView
    from fuelrail.loaders.loader import DataLoader as DataLoader
    from fuelrail.loaders.records import Batch as Batch
    from fuelrail.loaders.schedule.bad_samples import BadSamplePolicy as BadSamplePolicy
    from fuelrail.loaders.schedule.layers import LayerOptions as LayerOptions
    from fuelrail.loaders.schedule.ledger import LedgerOptions as LedgerOptions
    from fuelrail.loaders.serving.ray_workers import RemoteWorkers as RemoteWorkers
    from fuelrail.loaders.view import ViewOptions as ViewOptions
    from fuelrail.loaders.view import ViewReport as ViewReport
    from fuelrail.loaders.view import view as view
    from fuelrail.loaders.viewer.batch import BatchDescription as BatchDescription
    from fuelrail.loaders.viewer.batch import Picture as Picture
    from fuelrail.pipeline.channels.logits import Logits as Logits
    from fuelrail.pipeline.errors import BadSamplesError as BadSamplesError
    from fuelrail.pipeline.errors import ChecksumError as ChecksumError
    from fuelrail.pipeline.errors import CodecError as CodecError
    from fuelrail.pipeline.errors import ConfigError as ConfigError
    from fuelrail.pipeline.errors import DatasetError as DatasetError
    from fuelrail.pipeline.errors import DatasetExistsError as DatasetExistsError
    from fuelrail.pipeline.errors import DatasetNotReadyError as DatasetNotReadyError
    from fuelrail.pipeline.errors import DecoderError as DecoderError
    from fuelrail.pipeline.errors import FrameError as FrameError
    from fuelrail.pipeline.errors import FuelrailError as FuelrailError
    from fuelrail.pipeline.errors import ImageError as ImageError
    from fuelrail.pipeline.errors import IndexFileError as IndexFileError
    from fuelrail.pipeline.errors import LedgerError as LedgerError
    from fuelrail.pipeline.errors import ManifestError as ManifestError
    from fuelrail.pipeline.errors import MemberError as MemberError
    from fuelrail.pipeline.errors import MemberTooLargeError as MemberTooLargeError
    from fuelrail.pipeline.errors import OrderError as OrderError
    from fuelrail.pipeline.errors import SchemaError as SchemaError
    from fuelrail.pipeline.errors import ShardError as ShardError
    from fuelrail.pipeline.errors import SourceError as SourceError
    from fuelrail.pipeline.errors import StageError as StageError
    from fuelrail.pipeline.errors import StateMismatchError as StateMismatchError
    from fuelrail.pipeline.errors import StorageError as StorageError
    from fuelrail.pipeline.errors import TarFormatError as TarFormatError
    from fuelrail.pipeline.errors import TruncatedShardError as TruncatedShardError
    from fuelrail.pipeline.errors import WorldError as WorldError
    from fuelrail.pipeline.format.dataset import Dataset as Dataset
    from fuelrail.pipeline.format.dataset import open_dataset as _open_dataset
    from fuelrail.pipeline.format.layers import LayerView as LayerView
    from fuelrail.pipeline.order.balance import Balance as Balance
    from fuelrail.pipeline.order.batching import World as World
    from fuelrail.pipeline.order.bucket import Bucket as Bucket
    from fuelrail.pipeline.order.cost import Cost as Cost
    from fuelrail.pipeline.order.mix import Mix as Mix
    from fuelrail.pipeline.order.mix import MixStage as MixStage
    from fuelrail.pipeline.order.pack import Pack as Pack
    from fuelrail.pipeline.order.spec import OrderSpec as OrderSpec
    from fuelrail.pipeline.order.spec import OrderStage as OrderStage
    from fuelrail.pipeline.order.weights import AttributeWeights as AttributeWeights
    from fuelrail.pipeline.order.weights import ClassBalance as ClassBalance
    from fuelrail.pipeline.order.weights import FileWeights as FileWeights
    from fuelrail.pipeline.order.windows import ChannelWindow as ChannelWindow
    from fuelrail.pipeline.order.windows import FrameWindow as FrameWindow
    from fuelrail.pipeline.order.windows import TimeWindow as TimeWindow
    from fuelrail.pipeline.runtime.top import TopOptions as TopOptions
    from fuelrail.pipeline.runtime.top import top as top
    from fuelrail.pipeline.runtime.trace import TraceRecorder as TraceRecorder
    from fuelrail.pipeline.settings import PresetsReport as PresetsReport
    from fuelrail.pipeline.settings import presets as presets
    from fuelrail.pipeline.storage.retry import RetryPolicy as RetryPolicy
    from fuelrail.pipeline.transforms.ego import BevAugment as BevAugment
    from fuelrail.pipeline.transforms.image import CameraGroup as CameraGroup
    from fuelrail.pipeline.transforms.image import ImageAugment as ImageAugment
    from fuelrail.pipeline.transforms.pixels import PixelAugment as PixelAugment
    from fuelrail.pipeline.transforms.points import PointSweeps as PointSweeps
    from fuelrail.sharding.api import ShardReport as ShardReport
    from fuelrail.sharding.api import SourceReport as SourceReport
    from fuelrail.sharding.api import check_source as check_source
    from fuelrail.sharding.api import inspect as inspect
    from fuelrail.sharding.api import reshard as reshard
    from fuelrail.sharding.api import shard as shard
    from fuelrail.sharding.api import verify as verify
    from fuelrail.sharding.demo.options import SynthOptions as SynthOptions
    from fuelrail.sharding.demo.synth import synth as synth
    from fuelrail.sharding.forget import ForgetReport as ForgetReport
    from fuelrail.sharding.forget import forget as forget
    from fuelrail.sharding.planning.recipe import Recipe as Recipe
    from fuelrail.sharding.sources.registry import SourceKind as SourceKind
    from fuelrail.sharding.sources.registry import sources as sources
    from fuelrail.sharding.verify.catalogue import DatasetDiff as DatasetDiff
    from fuelrail.sharding.verify.catalogue import DatasetLog as DatasetLog
    from fuelrail.sharding.verify.catalogue import dataset_diff as dataset_diff
    from fuelrail.sharding.verify.catalogue import dataset_log as dataset_log
    from fuelrail.sharding.verify.catalogue import tag as tag
    from fuelrail.sharding.verify.dataset import VerifyReport as VerifyReport
    from fuelrail.sharding.write.layers.rebase import RebaseReport as RebaseReport
    from fuelrail.sharding.write.layers.rebase import rebase_layer as rebase_layer
    from fuelrail.sharding.write.layers.writer import LayerWriter as LayerWriter

    open = _open_dataset  # noqa: A001 - fr.open

_PUBLIC: Final = {
    # bench
    "annotate": "fuelrail.bench.annotate.run",
    "AnnotateOptions": "fuelrail.bench.annotate.run",
    "AnnotateReport": "fuelrail.bench.annotate.run",
    "bench_loader": "fuelrail.bench.studies.loader.measure",
    "plan": "fuelrail.bench.studies.plan.run",
    "PlanOptions": "fuelrail.bench.planner.scenario",
    "Scenario": "fuelrail.bench.planner.scenario",
    "describe_order": "fuelrail.bench.studies.order.describe",
    "DescribeOptions": "fuelrail.bench.studies.order.describe",
    "diagnose": "fuelrail.bench.studies.diagnose.run",
    "DiagnoseOptions": "fuelrail.bench.studies.diagnose.run",
    "diff": "fuelrail.bench.studies.diff",
    "DiffOptions": "fuelrail.bench.studies.diff",
    "LoaderOptions": "fuelrail.bench.studies.loader.report",
    "attest": "fuelrail.bench.studies.runs.attest",
    "replay": "fuelrail.bench.studies.runs.replay",
    "run_diff": "fuelrail.bench.studies.runs.history",
    "run_history": "fuelrail.bench.studies.runs.history",
    "seen": "fuelrail.bench.studies.runs.replay",
    "scale": "fuelrail.bench.studies.scale.run",
    "ScaleOptions": "fuelrail.bench.studies.scale.report",
    "bench_train": "fuelrail.bench.studies.train.run",
    "TrainOptions": "fuelrail.bench.studies.train.settings",
    "Checkpoints": "fuelrail.bench.trainer.checkpoints.saver",
    "Distilling": "fuelrail.bench.trainer.distill.pairs",
    "Pair": "fuelrail.bench.trainer.distill.pairs",
    "divergence": "fuelrail.bench.trainer.distill.student",
    "evaluate": "fuelrail.bench.trainer.own",
    "LoopOptions": "fuelrail.bench.trainer.own",
    "load_weights": "fuelrail.bench.trainer.weights",
    "save_weights": "fuelrail.bench.trainer.weights",
    "WeightsReport": "fuelrail.bench.trainer.weights",
    "parallelise": "fuelrail.bench.trainer.strategies.parallel",
    "ParallelSettings": "fuelrail.bench.trainer.strategies.settings",
    "train": "fuelrail.bench.trainer.own",
    # loaders
    "BadSamplePolicy": "fuelrail.loaders.schedule.bad_samples",
    "LayerOptions": "fuelrail.loaders.schedule.layers",
    "LedgerOptions": "fuelrail.loaders.schedule.ledger",
    "RemoteWorkers": "fuelrail.loaders.serving.ray_workers",
    "Budget": "fuelrail.loaders.config",
    "DaliOptions": "fuelrail.loaders.decode.protocol",
    "DataLoader": "fuelrail.loaders.loader",
    "Batch": "fuelrail.loaders.records",
    "BatchDescription": "fuelrail.loaders.viewer.batch",
    "doctor": "fuelrail.loaders.commands",
    "DoctorReport": "fuelrail.loaders.commands",
    "Normalize": "fuelrail.loaders.config",
    "IterableView": "fuelrail.loaders.integrations.iterable",
    "LoaderStats": "fuelrail.loaders.batch.runner",
    "mesh_world": "fuelrail.loaders.distributed",
    "serve_metrics": "fuelrail.loaders.commands",
    "StaticBatches": "fuelrail.loaders.config",
    "StorageOptions": "fuelrail.loaders.config",
    "Transforms": "fuelrail.loaders.config",
    "Undistort": "fuelrail.loaders.decode.lens",
    "Picture": "fuelrail.loaders.viewer.batch",
    "view": "fuelrail.loaders.view",
    "ViewOptions": "fuelrail.loaders.view",
    "ViewReport": "fuelrail.loaders.view",
    # pipeline
    "AttributeWeights": "fuelrail.pipeline.order.weights",
    "Balance": "fuelrail.pipeline.order.balance",
    "BevAugment": "fuelrail.pipeline.transforms.ego",
    "Bucket": "fuelrail.pipeline.order.bucket",
    "CameraGroup": "fuelrail.pipeline.transforms.image",
    "ClassBalance": "fuelrail.pipeline.order.weights",
    "Cost": "fuelrail.pipeline.order.cost",
    "Dataset": "fuelrail.pipeline.format.dataset",
    "FileWeights": "fuelrail.pipeline.order.weights",
    "FrameWindow": "fuelrail.pipeline.order.windows",
    "TimeWindow": "fuelrail.pipeline.order.windows",
    "ChannelWindow": "fuelrail.pipeline.order.windows",
    "ImageAugment": "fuelrail.pipeline.transforms.image",
    "Mix": "fuelrail.pipeline.order.mix",
    "MixStage": "fuelrail.pipeline.order.mix",
    "open": "fuelrail.pipeline.format.dataset:open_dataset",
    "OrderSpec": "fuelrail.pipeline.order.spec",
    "OrderStage": "fuelrail.pipeline.order.spec",
    "Pack": "fuelrail.pipeline.order.pack",
    "PixelAugment": "fuelrail.pipeline.transforms.pixels",
    "PointSweeps": "fuelrail.pipeline.transforms.points",
    "RetryPolicy": "fuelrail.pipeline.storage.retry",
    "presets": "fuelrail.pipeline.settings",
    "PresetsReport": "fuelrail.pipeline.settings",
    "top": "fuelrail.pipeline.runtime.top",
    "TopOptions": "fuelrail.pipeline.runtime.top",
    "TraceRecorder": "fuelrail.pipeline.runtime.trace",
    "LayerView": "fuelrail.pipeline.format.layers",
    "Logits": "fuelrail.pipeline.channels.logits",
    "World": "fuelrail.pipeline.order.batching",
    # pipeline: errors
    "FuelrailError": "fuelrail.pipeline.errors",
    "ConfigError": "fuelrail.pipeline.errors",
    "OrderError": "fuelrail.pipeline.errors",
    "WorldError": "fuelrail.pipeline.errors",
    "SourceError": "fuelrail.pipeline.errors",
    "DatasetError": "fuelrail.pipeline.errors",
    "DatasetNotReadyError": "fuelrail.pipeline.errors",
    "DatasetExistsError": "fuelrail.pipeline.errors",
    "ManifestError": "fuelrail.pipeline.errors",
    "IndexFileError": "fuelrail.pipeline.errors",
    "ShardError": "fuelrail.pipeline.errors",
    "TarFormatError": "fuelrail.pipeline.errors",
    "FrameError": "fuelrail.pipeline.errors",
    "TruncatedShardError": "fuelrail.pipeline.errors",
    "ChecksumError": "fuelrail.pipeline.errors",
    "StorageError": "fuelrail.pipeline.errors",
    "MemberError": "fuelrail.pipeline.errors",
    "CodecError": "fuelrail.pipeline.errors",
    "MemberTooLargeError": "fuelrail.pipeline.errors",
    "SchemaError": "fuelrail.pipeline.errors",
    "ImageError": "fuelrail.pipeline.errors",
    "BadSamplesError": "fuelrail.pipeline.errors",
    "LedgerError": "fuelrail.pipeline.errors",
    "StateMismatchError": "fuelrail.pipeline.errors",
    "StageError": "fuelrail.pipeline.errors",
    "DecoderError": "fuelrail.pipeline.errors",
    # sharding
    "check_source": "fuelrail.sharding.api",
    "dataset_diff": "fuelrail.sharding.verify.catalogue",
    "DatasetDiff": "fuelrail.sharding.verify.catalogue",
    "dataset_log": "fuelrail.sharding.verify.catalogue",
    "DatasetLog": "fuelrail.sharding.verify.catalogue",
    "inspect": "fuelrail.sharding.api",
    "LayerWriter": "fuelrail.sharding.write.layers.writer",
    "rebase_layer": "fuelrail.sharding.write.layers.rebase",
    "RebaseReport": "fuelrail.sharding.write.layers.rebase",
    "Recipe": "fuelrail.sharding.planning.recipe",
    "forget": "fuelrail.sharding.forget",
    "ForgetReport": "fuelrail.sharding.forget",
    "reshard": "fuelrail.sharding.api",
    "shard": "fuelrail.sharding.api",
    "ShardReport": "fuelrail.sharding.api",
    "SourceKind": "fuelrail.sharding.sources.registry",
    "SourceReport": "fuelrail.sharding.api",
    "sources": "fuelrail.sharding.sources.registry",
    "synth": "fuelrail.sharding.demo.synth",
    "SynthOptions": "fuelrail.sharding.demo.options",
    "tag": "fuelrail.sharding.verify.catalogue",
    "verify": "fuelrail.sharding.api",
    "VerifyReport": "fuelrail.sharding.verify.dataset",
}
"""Each public name with the module that defines it, and, after a colon, its name there where
that differs.
"""

_MODULES: Final = ("bench", "loaders", "order", "pipeline", "sharding")


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        module, _, attribute = _PUBLIC[name].partition(":")
        value = getattr(import_module(module), attribute or name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f"fuelrail.{name}")
    raise AttributeError(f"module 'fuelrail' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_PUBLIC, *_MODULES, "__version__"])
