"""Random programs of calls and nested transformations of JAX."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from random_calls import Calls, Parameter, Part, small

POLICIES = (
    None,
    jax.checkpoint_policies.nothing_saveable,
    jax.checkpoint_policies.everything_saveable,
    jax.checkpoint_policies.save_only_these_names("jax_ub.y", "jax_ub.x"),
    jax.checkpoint_policies.save_only_these_names("jax_ub.gathered"),
    jax.checkpoint_policies.save_anything_except_these_names("jax_ub.x"),
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
)


def fit(x, shape):
    """Cuts or repeats the elements of x to get a shape."""
    size = math.prod(shape)
    return jnp.tile(x.reshape(-1), -(-size // x.size))[:size].reshape(shape)


class Programs(Calls):
    """Draws parts of a program: calls, chains of calls, and transformations of them."""

    # Without jit, JAX 0.10.2 can neither scan nor rematerialize a custom_vjp call.
    is_compiled = True

    def chain(self, shape, depth, length):
        """Draws a chain of parts."""
        parts = []
        for _ in range(length):
            parts.append(self.part(shape, depth))
            shape = parts[-1].shape

        def run(functions, values, x):
            values = iter(values)
            for part in parts:
                x = part.run(functions, tuple(next(values) for _ in part.parameters), x)
            return x

        names = ", ".join(part.name for part in parts)
        parameters = sum((part.parameters for part in parts), ())
        return Part(names, parameters, run, shape)

    def part(self, shape, depth):
        """Draws a call or a transformed chain of parts."""
        if not depth or self.chance(0.45):
            return self.call(shape)
        outside, self.may_accumulate = self.may_accumulate, False
        ways = [self.passed] * 2 + [self.repeated, self.vmapped, self.switched]
        ways += [self.looped, self.differentiated]
        ways += [self.mapped, self.scanned] * self.is_compiled
        transformed = self.draw.choice(ways)
        part = transformed(shape, depth - 1)
        self.may_accumulate = outside
        return part

    def inner(self, shape, depth):
        """Draws the part to transform."""
        return self.chain(shape, depth, self.draw.choice([1, 1, 2]))

    def passed(self, shape, depth):
        """Applies a transformation that does not change values."""
        inner = self.inner(shape, depth)

        def in_custom_vjp(run):
            rule = jax.custom_vjp(run)
            rule.defvjp(
                lambda *operands: (run(*operands), operands),
                lambda operands, dy: jax.vjp(run, *operands)[1](dy),
            )
            return rule

        def in_donating_jit(run):
            call = jax.jit(run, donate_argnums=1)
            return lambda values, x: call(values, jnp.copy(x))

        policy = self.draw.choice(POLICIES)
        wraps = [
            ("jit", jax.jit),
            ("donating", in_donating_jit),
            ("named", functools.partial(jax.named_call, name="part")),
            ("custom_vjp", in_custom_vjp),
        ]
        if self.is_compiled:
            remat = functools.partial(jax.checkpoint, policy=policy)
            wraps.append(("remat", remat))
        name, wrap = self.draw.choice(wraps)

        def run(functions, values, x):
            return wrap(functools.partial(inner.run, functions))(values, x)

        return dataclasses.replace(inner, name=f"{name}({inner.name})", run=run)

    def repeated(self, shape, depth):
        """Calls a jitted part twice, the second time with frozen operands."""
        inner = self.inner(shape, depth)
        frozen = [self.chance(0.5) for _ in inner.parameters]
        freezes_x = self.chance(0.5)

        def run(functions, values, x):
            call = jax.jit(functools.partial(inner.run, functions))
            others = tuple(
                lax.stop_gradient(value) if freezes else value
                for value, freezes in zip(values, frozen, strict=True)
            )
            x = x.astype(self.dtype)
            y = fit(call(values, x), shape).astype(self.dtype)
            again = call(others, lax.stop_gradient(y) if freezes_x else small(y))
            return small(again.astype(self.dtype) + fit(y, inner.shape))

        return dataclasses.replace(inner, name=f"twice({inner.name})", run=run)

    def vmapped(self, shape, depth):
        """Maps a part by `jax.vmap` over x, over parameters, or over both."""
        x_axis = None
        if len(shape) > 1 and self.chance(0.7):
            x_axis = self.draw.randrange(len(shape))
        size = 2 if x_axis is None else shape[x_axis]
        inside = tuple(n for axis, n in enumerate(shape) if axis != x_axis)
        inner = self.inner(inside, depth)
        floats = [i for i, p in enumerate(inner.parameters) if p.dtype != "int32"]
        mapped = {i for i in floats if self.chance(0.4)}
        if x_axis is None and not mapped:
            mapped = set(floats)
        places = tuple(
            self.draw.randint(0, len(parameter.shape)) if i in mapped else None
            for i, parameter in enumerate(inner.parameters)
        )
        if x_axis is None and not mapped:
            return inner  # no operand to map

        def run(functions, values, x):
            call = functools.partial(inner.run, functions)
            return jax.vmap(call, in_axes=(places, x_axis))(values, x)

        parameters = tuple(
            parameter if place is None else parameter.stacked(size, place)
            for parameter, place in zip(inner.parameters, places, strict=True)
        )
        name = f"vmap[{x_axis}, {places}]({inner.name})"
        return Part(name, parameters, run, (size, *inner.shape))

    def mapped(self, shape, depth):
        """Maps a part by `lax.map` over the first axis of x and of some parameters."""
        if len(shape) == 1:
            return self.inner(shape, depth)
        size, *inside = shape
        inner = self.inner(tuple(inside), depth)
        stacked = [self.chance(0.4) for _ in inner.parameters]
        batch_size = self.draw.choice([None, None, 1, 2])

        def run(functions, values, x):
            def call(operands):
                x, own = operands
                filled = tuple(own.get(i, value) for i, value in enumerate(values))
                y = inner.run(functions, filled, x)
                return self.everywhere(y)

            own = {i: values[i] for i, is_stacked in enumerate(stacked) if is_stacked}
            x = self.everywhere(x)
            return lax.map(call, (x, own), batch_size=batch_size)

        parameters = tuple(
            p.stacked(size) if s else p
            for p, s in zip(inner.parameters, stacked, strict=True)
        )
        name = f"map[{batch_size}, {stacked}]({inner.name})"
        return Part(name, parameters, run, (size, *inner.shape))

    def scanned(self, shape, depth):
        """Calls a part twice, with different values of some parameters."""
        inner = self.inner(shape, depth)
        stacked = [self.chance(0.5) for _ in inner.parameters]

        def run(functions, values, x):
            def body(x, slices):
                slices = iter(slices)
                own = tuple(
                    next(slices) if is_stacked else value
                    for value, is_stacked in zip(values, stacked, strict=True)
                )
                y = inner.run(functions, own, x).astype(self.dtype)
                return self.everywhere(small(fit(y, shape))), None

            scanned = tuple(v for v, s in zip(values, stacked, strict=True) if s)
            x = self.everywhere(x.astype(self.dtype))
            return lax.scan(body, x, scanned, length=2)[0]

        parameters = tuple(
            p.stacked(2) if s else p
            for p, s in zip(inner.parameters, stacked, strict=True)
        )
        return Part(f"scan{stacked}({inner.name})", parameters, run, shape)

    def switched(self, shape, depth):
        """Calls one of two parts, selected by an integer equal on all devices."""
        branches = [self.inner(shape, depth) for _ in range(2)]
        index = Parameter((), "int32", ())
        split = len(branches[0].parameters)

        def run(functions, values, x):
            def branch(inner, values):
                def call(x):
                    y = inner.run(functions, values, x)
                    return self.everywhere(fit(y, branches[0].shape)).astype(self.dtype)

                return call

            index, *values = values
            own = (tuple(values[:split]), tuple(values[split:]))
            return lax.switch(index, list(map(branch, branches, own)), x)

        name = " | ".join(inner.name for inner in branches)
        parameters = (index, *branches[0].parameters, *branches[1].parameters)
        return Part(f"switch({name})", parameters, run, branches[0].shape)

    def looped(self, shape, depth):
        """Adds the result of a while loop, which is not differentiable, to x."""
        inner = self.inner(shape, depth)

        def run(functions, values, x):
            values, start = lax.stop_gradient((values, x.astype(self.dtype)))

            def body(state):
                i, x = state
                y = inner.run(functions, values, x).astype(self.dtype)
                return i + 1, self.everywhere(small(fit(y, shape)))

            looped = lax.while_loop(
                lambda state: state[0] < 2, body, (0, self.everywhere(start))
            )[1]
            return small(x.astype(self.dtype) + looped)

        return Part(f"while({inner.name})", inner.parameters, run, shape)

    def differentiated(self, shape, depth):
        """Adds a gradient to x; second derivatives are not supported."""
        inner = self.inner(shape, depth)

        def run(functions, values, x):
            x = x.astype(self.dtype)
            values, start = lax.stop_gradient((values, x))

            def loss(x):
                return jnp.sum(inner.run(functions, values, x).astype(jnp.float32))

            return small(x + jax.grad(loss)(start))

        return Part(f"grad({inner.name})", inner.parameters, run, shape)
