"""`MethodChoice`: the method by which a call overlaps, with its options."""

import dataclasses

from jax_ub._src.config.kernel_options import KernelOptions
from jax_ub._src.methods import Method


@dataclasses.dataclass(frozen=True)
class MethodChoice:
    """The method by which a call, or one of its passes, overlaps GEMM and collective.

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
        """Whether plain `jax.lax` may run instead if the engine cannot."""
        return self.method is Method.AUTO or not self.is_explicit

    def with_method(self, method: Method) -> "MethodChoice":
        """Returns a copy with another method, for one primitive of the call.

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
        """Returns method and options as text, such as "pipeline, num_splits 4"."""
        words = [self.method.value]
        if self.num_splits:
            words.append(f"num_splits {self.num_splits}")
        words += [
            f"{name} {value}"
            for name, value in self.kernel_options.differences().items()
        ]
        return ", ".join(words)
