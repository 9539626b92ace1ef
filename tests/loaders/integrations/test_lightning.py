"""Lightning's resume: where a checkpoint was saved does not matter, nor how often the run was resumed."""

from __future__ import annotations

import pytest

from support.trainer_kills import EPOCH_STEPS, NUM_STEPS, Options, lightning_trainer, run_kills

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::Warning"),
]  # of the libraries

pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")


class Memory:
    """The steps of a run, which saves as its attempt says."""

    def __init__(self, folder, attempt, *, checkpoint=None):
        self.folder = folder / str(attempt)
        self.folder.mkdir()
        if checkpoint is not None:
            (self.folder / checkpoint.name).write_bytes(checkpoint.read_bytes())
        self.attempt = attempt
        self.options = Options(accumulation=3, validate_every=4)
        self.lines = []
        lightning_trainer(self)

    def write(self, line):
        self.lines.append(line)

    def step(self, step, batch, loss):
        self.write({"step": step, "rows": batch["row"].tolist(), "loss": loss.item()})

    @property
    def steps(self):
        return {line["step"]: line for line in self.lines[1:]}

    def checkpoint(self, step):
        return self.folder / f"{self.attempt}-{step}.ckpt"


@pytest.mark.parametrize(
    ("style", "second_style", "steps"),
    [
        (0, 0, (3, 4)),
        (0, 0, (4, 4)),
        (1, 2, (3, 7)),
        (2, 0, (1, 4)),
    ],
    ids=["last_batch", "after_a_resume", "epochs_end", "validations_end"],
)
def test_a_run_that_was_resumed_twice_has_the_steps_of_one_that_was_not(
    style, second_style, steps, tmp_path
):
    whole = Memory(tmp_path, style)
    resumed = Memory(tmp_path, second_style + 4, checkpoint=whole.checkpoint(steps[0]))
    again = Memory(tmp_path, 8, checkpoint=resumed.checkpoint(steps[1]))
    for run in (resumed, again):
        assert sorted(run.steps) == list(range(run.lines[0]["start"], NUM_STEPS))
        for step, line in run.steps.items():
            assert line["rows"] == whole.steps[step]["rows"]
            assert line["loss"] == pytest.approx(whole.steps[step]["loss"], rel=1e-5)
    assert again.lines[0]["start"] >= EPOCH_STEPS


def test_a_killed_trainer_continues_on_other_ranks(tmp_path):
    assert run_kills("pytorch_lightning", tmp_path, 2, seed=5) > 0
