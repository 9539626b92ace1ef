# The names of `from fuelrail import bench`. This list is the only one: type checkers and the package itself read it.

from fuelrail.bench.annotation.run import AnnotateOptions as AnnotateOptions
from fuelrail.bench.annotation.run import AnnotateReport as AnnotateReport
from fuelrail.bench.annotation.run import annotate as annotate
from fuelrail.bench.planner.scenario import PlanOptions as PlanOptions
from fuelrail.bench.planner.scenario import Scenario as Scenario
from fuelrail.bench.studies.browse.server import BrowseOptions as BrowseOptions
from fuelrail.bench.studies.browse.server import Browser as Browser
from fuelrail.bench.studies.browse.server import browse as browse
from fuelrail.bench.studies.diagnose.run import (
    DiagnoseOptions as DiagnoseOptions,
)
from fuelrail.bench.studies.diagnose.run import diagnose as diagnose
from fuelrail.bench.studies.diff import DiffOptions as DiffOptions
from fuelrail.bench.studies.diff import diff as diff
from fuelrail.bench.studies.loader.measure import bench_loader as bench_loader
from fuelrail.bench.studies.loader.report import LoaderOptions as LoaderOptions
from fuelrail.bench.studies.order.describe import (
    DescribeOptions as DescribeOptions,
)
from fuelrail.bench.studies.order.describe import (
    describe_order as describe_order,
)
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
from fuelrail.bench.trainer.strategies.parallel import (
    parallelise as parallelise,
)
from fuelrail.bench.trainer.strategies.settings import (
    ParallelSettings as ParallelSettings,
)
from fuelrail.bench.trainer.weights import WeightsReport as WeightsReport
from fuelrail.bench.trainer.weights import load_weights as load_weights
from fuelrail.bench.trainer.weights import save_weights as save_weights
from fuelrail.loaders.commands import serve_metrics as serve_metrics
from fuelrail.pipeline.runtime.top import TopOptions as TopOptions
from fuelrail.pipeline.runtime.top import top as top
from fuelrail.pipeline.runtime.trace import TraceRecorder as TraceRecorder
