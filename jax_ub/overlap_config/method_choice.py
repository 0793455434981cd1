"""How a call runs, whoever chose it."""

import dataclasses

from jax_ub.methods import Method
from jax_ub.overlap_config.kernel_options import KernelOptions


@dataclasses.dataclass(frozen=True)
class MethodChoice:
    """By which method a call runs, or one pass of it, and with what settings of it.

    Attributes:
        method: the method.
        num_splits: pieces of a shard, for "pipeline"; 0 is the engine's choice.
        kernel_options: the schedule's variant, and how it runs on a GPU.
        is_explicit: whether somebody asked for it: the call, the configuration of its
            name or `JAX_UB_METHOD`. Otherwise a file of tuned choices said it, or it is
            Transformer Engine's for a name that nobody has configured.
    """

    method: Method
    num_splits: int = 0
    kernel_options: KernelOptions = KernelOptions()
    is_explicit: bool = dataclasses.field(default=True, kw_only=True)

    @property
    def may_fall_back(self) -> bool:
        """Whether it may become plain `jax.lax` where the engine cannot run it."""
        return self.method is Method.AUTO or not self.is_explicit

    def with_method(self, method: Method) -> "MethodChoice":
        """The same by another method, for a part of what was chosen."""
        num_splits = self.num_splits if method is Method.PIPELINE else 0
        return dataclasses.replace(
            self,
            method=method,
            num_splits=num_splits,
            is_explicit=not self.may_fall_back,
        )

    def __str__(self) -> str:
        """Writes it as tables show it: "pipeline, num_splits 4"."""
        words = [self.method.value]
        if self.num_splits:
            words.append(f"num_splits {self.num_splits}")
        words += [
            f"{name} {value}"
            for name, value in self.kernel_options.differences().items()
        ]
        return ", ".join(words)
