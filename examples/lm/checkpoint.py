"""Checkpoints that fit any mesh: arrays are saved whole and restored by shard."""

import dataclasses
import pathlib

import orbax.checkpoint as ocp

from lm.model import Sizes
from lm.train import State


class Checkpoints:
    """The checkpoints of one run, by step."""

    def __init__(self, directory: str, sizes: Sizes):
        """Opens a directory.

        Args:
            directory: where the checkpoints lie; made if it is not there.
            sizes: of the model, saved beside its state.
        """
        self._sizes = dataclasses.asdict(sizes)
        self._directory = pathlib.Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self._directory, item_names=("state", "sizes")
        )

    def save(self, step: int, state: State) -> None:
        """Saves the state after `step` steps, while training goes on.

        A run that was resumed replaces what an earlier one has left of that step.
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
            step: which checkpoint.
            shapes: the state's shapes, dtypes, and shardings on the mesh of this run.

        Raises:
            SystemExit: if it is not there, or belongs to a model of other sizes.
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
        """Waits until everything is on disk."""
        self._manager.close()
