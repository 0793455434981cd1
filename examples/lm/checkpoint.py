"""Checkpoints that can be restored on any mesh: arrays are saved with global shapes."""

import dataclasses
import pathlib

import orbax.checkpoint as ocp

from lm.model import Sizes
from lm.train import State


class Checkpoints:
    """Saves and restores the checkpoints of one run, by step."""

    def __init__(self, directory: str, sizes: Sizes):
        """Opens a checkpoint directory.

        Args:
            directory: path of the directory, which is created if it does not exist.
            sizes: sizes of the model, which are saved together with the state.
        """
        self._sizes = dataclasses.asdict(sizes)
        self._directory = pathlib.Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self._directory, item_names=("state", "sizes")
        )

    def save(self, step: int, state: State) -> None:
        """Saves the state after `step` steps asynchronously.

        After a resume, this replaces a checkpoint that an earlier run has left.
        """
        if step in self._manager.all_steps():
            self._manager.delete(step)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), sizes=ocp.args.JsonSave(self._sizes)
        )
        self._manager.save(step, args=items, force=True)

    def restore(self, step: int, shapes: State) -> tuple[int, State]:
        """Restores the state after `step` steps, or the latest one if `step` is -1.

        Args:
            step: number of the checkpoint.
            shapes: shapes, dtypes, and shardings of the state on the mesh of this run.

        Raises:
            SystemExit: if there is no such checkpoint, or the model's sizes differ.
        """
        steps = sorted(self._manager.all_steps())
        wanted = max(steps, default=-1) if step == -1 else step
        if wanted not in steps:
            of_step = "" if step == -1 else f" of step {step}"
            raise SystemExit(
                f"--resume: no checkpoint{of_step} in {self._directory}. "
                f"There are: {steps or 'none'}."
            )
        sizes = self._manager.restore(
            wanted, args=ocp.args.Composite(sizes=ocp.args.JsonRestore())
        )["sizes"]
        if sizes != self._sizes:
            raise SystemExit(
                f"--resume: the checkpoint is of a model with {sizes}, this run's has "
                f"{self._sizes}. Give the checkpoint's sizes."
            )
        items = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        return wanted, self._manager.restore(wanted, args=items)["state"]

    def close(self) -> None:
        """Waits until all checkpoints are written."""
        self._manager.close()
