"""The chosen method of a call, with its options."""

import dataclasses

from jax_ub.methods import Method
from jax_ub.overlap_config.kernel_options import KernelOptions


@dataclasses.dataclass(frozen=True)
class MethodChoice:
    """The method and options of a call, or of one of its passes.

    Attributes:
        method: the method.
        num_splits: number of splits of a rank's chunk, for "pipeline"; 0 lets the
            engine choose.
        kernel_options: the schedule's variant, and launch options for GPUs.
        is_explicit: whether the user chose the method: by the call's argument, by the
            configuration of its name or by `JAX_UB_METHOD`. Otherwise it comes from a
            tuned file, or is Transformer Engine's default for a name that the user has
            not configured.
    """

    method: Method
    num_splits: int = 0
    kernel_options: KernelOptions = KernelOptions()
    is_explicit: bool = dataclasses.field(default=True, kw_only=True)

    @property
    def may_fall_back(self) -> bool:
        """Whether it may fall back to plain `jax.lax` if the engine cannot run it."""
        return self.method is Method.AUTO or not self.is_explicit

    def with_method(self, method: Method) -> "MethodChoice":
        """Returns this choice with another method, for a part of the call.

        Splits are kept only for "pipeline".
        """
        num_splits = self.num_splits if method is Method.PIPELINE else 0
        return dataclasses.replace(
            self,
            method=method,
            num_splits=num_splits,
            is_explicit=not self.may_fall_back,
        )

    def __str__(self) -> str:
        """Returns the text for tables, such as "pipeline, num_splits 4"."""
        words = [self.method.value]
        if self.num_splits:
            words.append(f"num_splits {self.num_splits}")
        words += [
            f"{name} {value}"
            for name, value in self.kernel_options.differences().items()
        ]
        return ", ".join(words)
