"""Random programs: statements of Python that mean the same on plain tensors and on DTensors.

    t0 = put(normal(1, (5, 3)), 'S0')        # plain: the tensor; on ranks: sharded on dim 0
    t1 = t0[1:].tanh()
    t0.mul_(2)

`write_program` runs each statement on plain tensors as it draws it, so it knows all shapes, and drops what plain torch
refuses. `Plain` and `Sharded` are the two meanings of the few names that differ.
"""

import copy
import io
import random
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint

from fuzz import modules
from fuzz.more_statements import MORE
from fuzz.rare_statements import RARE
from longmesh import DTensor, Partial, Replicate, Shard, distribute_tensor
from longmesh.checkpoint import load, save
from longmesh.experimental import local_map
from longmesh.testing import cpu_mesh

MESHES = ((2,), (3,), (4,), (2, 2))
SHAPES = ((5,), (4, 2), (5, 3), (3, 4), (2, 3, 4), (1, 6), (7, 1), (4, 4), (0, 3), (3, 2, 2))


@dataclass(frozen=True)
class Program:
    """Statements for one mesh. `each`: compare after every statement, not only at the end."""

    seed: int
    mesh: tuple[int, ...]
    statements: tuple[str, ...]
    each: bool

    def __str__(self):
        mesh, when = "x".join(map(str, self.mesh)), "after each statement" if self.each else "at the end"
        return "\n".join([f"# seed {self.seed}, mesh {mesh}, compared {when}", *self.statements])


def normal(seed, shape):
    """The same float64 numbers everywhere."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Cube(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


class Plain:
    """What the names of a program mean on plain tensors."""

    def names(self):
        return {
            "torch": torch, "F": F, "copy": copy, "normal": normal, "put": self.put, "leaf": self.leaf,
            "move": self.move, "saved": self.saved, "compiled": self.compiled, "load_into": self.load_into,
            "pickled": self.pickled, "same": self.same, "through_local": self.through_local, "Cube": Cube,
            "through_full": self.through_full, "through_map": self.through_map, "run_module": self.run_module,
        }  # fmt: skip

    def put(self, whole, layout):
        return whole.clone()

    def leaf(self, whole, layout):
        return self.put(whole, layout).requires_grad_()

    def move(self, x, layout):
        return x.clone(memory_format=torch.contiguous_format)

    def saved(self, x, layout):
        return x.detach().clone()

    def load_into(self, x, value):
        with torch.no_grad():
            x.copy_(value)

    def pickled(self, x):
        file = io.BytesIO()
        torch.save(x.detach(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def compiled(self, fn, *args):
        return fn(*args)

    def same(self, x):
        return x

    def through_local(self, x):
        return x * 1

    def through_full(self, x, layout):
        return x * 1

    def through_map(self, fn, x):
        return fn(x)

    def run_module(self, kind, seed, x):
        return modules.run(kind, modules.make(kind, seed, x.shape[-1]), x)

    def whole(self, x):
        return x.detach()


class Sharded(Plain):
    """What they mean on a mesh of ranks."""

    def __init__(self, mesh):
        self.mesh = cpu_mesh(*mesh)

    def placements(self, layout):
        kinds = {"R": Replicate(), "P": Partial()}
        return [kinds[p] if p in kinds else Shard(int(p[1:])) for p in layout.split()]

    def put(self, whole, layout):
        return distribute_tensor(whole, self.mesh, self.placements(layout))

    def move(self, x, layout):
        # To the layout it has it would be the tensor itself, and a write to one a write to the other. What was sent is
        # dense, in whichever order of its dims was cheapest to send.
        moved = x.redistribute(placements=self.placements(layout))
        return moved.clone(memory_format=torch.contiguous_format)

    def saved(self, x, layout):
        made = distribute_tensor(torch.zeros(x.shape, dtype=x.dtype), self.mesh, self.placements(layout))
        self._through_files(x.detach(), made)
        return made

    def load_into(self, x, value):
        self._through_files(distribute_tensor(value, self.mesh), x.detach())

    def _through_files(self, x, target):
        names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(names)
        save({"x": x}, f"{names[0]}/point")
        load({"x": target}, f"{names[0]}/point")

    def compiled(self, fn, *args):
        torch._dynamo.reset()
        return torch.compile(fn, backend="aot_eager")(*args)

    def same(self, x):
        return distribute_tensor(x, self.mesh)

    def reduced(self, x):
        return x.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in x.placements])

    def through_local(self, x):
        x = self.reduced(x)
        return DTensor.from_local(x.to_local(), self.mesh, x.placements, shape=x.shape, stride=x.stride()) * 1

    def through_full(self, x, layout):
        whole = DTensor.from_local(x.full_tensor(), self.mesh, [Replicate()] * self.mesh.ndim)
        return whole.redistribute(placements=self.placements(layout)) * 1

    def through_map(self, fn, x):
        x = self.reduced(x)
        return local_map(fn, list(x.placements), (list(x.placements),), device_mesh=self.mesh)(x)

    def run_module(self, kind, seed, x):
        module = modules.make(kind, seed, x.shape[-1])
        return modules.run(kind, modules.distribute(kind, seed, module, self.mesh), x)

    def whole(self, x):
        return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


class _Writer:
    def __init__(self, seed, kinds):
        self.random = random.Random(seed)
        self.kinds = kinds
        self.mesh = self.random.choice(MESHES)
        self.names = Plain().names()
        self.tensors = []
        self.statements = []

    def layout(self, ndim, partial=False):
        """Placements as text, one for each axis."""
        choices = ["R", *(f"S{d}" for d in range(ndim)), *(["P"] if partial else [])]
        return repr(" ".join(self.random.choice(choices) for _ in self.mesh))

    def fresh(self):
        return f"t{sum('= ' in s for s in self.statements)}"

    def pick(self, keep=lambda t: True):
        """A tensor that has what is asked, as (name, value); None if there is none."""
        found = [(n, self.names[n]) for n in self.tensors if keep(self.names[n])]
        return self.random.choice(found[-6:]) if found else None

    def attempt(self, statement):
        """Run it on plain tensors. What they refuse is no statement; it may have done half its work, so begin again."""
        known = set(self.names)
        try:
            exec(statement, self.names)
            made = [n for n, v in self.names.items() if n not in known and isinstance(v, torch.Tensor)]
            values = [self.names[n].detach() for n in (*self.tensors, *made)]
            if any(v.numel() > 400 or not bool(v.isfinite().all()) for v in values):
                raise _Overflow
            for name in (*self.tensors, *made):
                self.names[name].is_leaf  # noqa: B018 - raises of a view that a write made void
        except (AttributeError, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            self.names = Plain().names()
            for earlier in self.statements:
                exec(earlier, self.names)
            return
        self.tensors += made
        self.statements.append(statement)

    def __call__(self):
        while len(self.tensors) < 2:
            self.attempt(self.make())
        wanted = self.random.randint(5, 25)
        tries = 0
        while len(self.statements) < wanted and tries < 200:
            tries += 1
            kinds, weights = zip(*self.kinds, strict=True)
            statement = self.random.choices(kinds, weights)[0](self)
            if statement:
                self.attempt(statement)
        return tuple(self.statements)

    # -- statements --------------------------------------------------------------------------------

    def make(self):
        shape = self.random.choice(SHAPES)
        kind = self.random.choice(["put", "put", "leaf"])
        number = self.random.randrange(1000)
        layout = self.layout(len(shape), partial=kind == "put")
        return f"{self.fresh()} = {kind}(normal({number}, {shape}), {layout})"

    def unary(self):
        name, _ = self.pick()
        op = self.random.choice([
            ".tanh()", ".sigmoid()", ".relu()", ".abs()", ".square()", ".sin()", ".neg()", ".exp().log1p()", " * 0.5",
            " + 1", " / 3", ".clamp(-1, 1)", ".sign()", ".contiguous()", " - 0.25", ".float().double()", ".detach()",
            ".clone()", ".reciprocal().tanh()",
        ])  # fmt: skip
        if self.random.random() < 0.2:
            op = ""
            fn = self.random.choice(["F.gelu", "F.softsign", "F.silu", "F.softplus", "torch.atan"])
            return f"{self.fresh()} = {fn}({name})"
        return f"{self.fresh()} = {name}{op}"

    def binary(self):
        a, b = self.pick()[0], self.pick()[0]
        form = self.random.choice([
            "{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {b})", "torch.where({a} > 0, {a}, {b})",
            "{a} / ({b}.square() + 1)", "torch.lerp({a}, {b}, 0.3)", "torch.addcmul({a}, {a}, {b}, value=0.5)",
        ])  # fmt: skip
        return f"{self.fresh()} = " + form.format(a=a, b=b)

    def product(self):
        found = self.pick(lambda t: t.ndim >= 1 and t.shape[-1] > 0)
        if not found:
            return None
        name, x = found
        size, number = self.random.randint(1, 5), self.random.randrange(1000)
        weight = f"put(normal({number}, ({size}, {x.shape[-1]})), {self.layout(2)})"
        other = self.pick(lambda t: t.ndim == 2 and t.shape[0] == x.shape[-1])
        if other and self.random.random() < 0.5:
            return f"{self.fresh()} = {name} @ {other[0]}"
        if self.random.random() < 0.3:
            return f"{self.fresh()} = torch.einsum('...i,oi->...o', {name}, {weight})"
        return f"{self.fresh()} = F.linear({name}, {weight})"

    def reduction(self):
        found = self.pick(lambda t: t.ndim >= 1 and t.numel() > 0)
        if not found:
            return None
        name, x = found
        dim = self.random.randrange(-x.ndim, x.ndim)
        keep = self.random.random() < 0.4
        form = self.random.choice([
            f"sum({dim}, keepdim={keep})", f"mean({dim}, keepdim={keep})", f"amax({dim}, keepdim={keep})", "sum()",
            f"softmax({dim})", f"logsumexp({dim}, keepdim={keep})", f"cumsum({dim})", "mean()", "norm()",
            f"amin({dim})", f"var({dim}, correction=0)", f"sort({dim})[0]", f"topk(1, {dim})[0]", f"flip({dim})",
            f"roll(1, {dim})", f"log_softmax({dim})", f"prod({dim})", f"diff(dim={dim})",
            f"std({dim}, correction=0).tanh()",
        ])  # fmt: skip
        return f"{self.fresh()} = {name}.{form}"

    def view(self):
        found = self.pick(lambda t: t.ndim >= 1)
        if not found:
            return None
        return f"{self.fresh()} = {self.view_of(*found)}"

    def view_of(self, name, x):
        dim = self.random.randrange(x.ndim)
        size = x.shape[dim]
        start = self.random.randint(0, max(size - 1, 0))
        other = self.random.randrange(x.ndim)
        lead = ":, " * dim
        return self.random.choice([
            f"{name}[{lead}{start}]", f"{name}[{lead}{start}:]", f"{name}[{lead}:{start}]", f"{name}[{lead}::2]",
            f"{name}[-1]", f"{name}[..., None]", f"{name}.transpose({dim}, {other})", f"{name}.unsqueeze({dim})",
            f"{name}.reshape(-1)", f"{name}.flatten()", f"{name}.squeeze()", f"{name}.movedim(0, -1)",
            f"{name}.narrow({dim}, {start}, {size - start})", f"{name}.chunk(2, {dim})[0]", f"{name}.unbind({dim})[-1]",
            f"{name}.split(2, {dim})[-1]", f"{name}.expand(2, *{name}.shape)", f"{name}.view(-1)", f"{name}.t()",
            f"{name}[{lead}{start}:{start + 1}, None]", f"{name}.select({dim}, {start})", f"{name}.diagonal()",
            f"{name}[{lead}{start}:].reshape(-1)", f"{name}.swapdims({dim}, {other})[{start}:]", f"{name}.detach()",
            f"{name}.{'detach()' if x.requires_grad else 'data'}[{start}:]", f"{name}.unflatten({dim}, (-1, 1))",
            f"{name}[None][..., {start}:]",
            f"{name}.detach()[{lead}{start}]",
        ])  # fmt: skip

    def write(self):
        found = self.pick(lambda t: not (t.requires_grad and t.is_leaf))
        if not found:
            return None
        name, x = found
        target = self.view_of(name, x) if x.ndim and self.random.random() < 0.5 else name
        if self.random.random() < 0.3 and x.ndim:
            start = self.random.randint(0, max(x.shape[0] - 1, 0))
            place = self.random.choice(
                [f"{name}[{start}]", f"{name}[{start}:]", f"{name}[:, ::2]", f"{name}[..., 0]"]
            )
            value = self.random.choice(["1.5", "0", (self.pick() or (name,))[0]])
            return f"{place} {self.random.choice(['=', '+=', '*='])} {value}"
        other, value = self.pick()
        if (other, target) != (
            name,
            name,
        ) and value.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            return None  # what reads the memory that it writes to depends on the order of its loops
        op = self.random.choice([
            "add_(1)", "mul_(0.5)", "zero_()", "fill_(0.3)", "relu_()", "neg_()", f"add_({other})", f"copy_({other})",
            f"mul_({other})", "clamp_(-1, 1)", f"add_({other}, alpha=0.5)", "sub_(0.1)", "tanh_()",
            # A DTensor's data counts writes, so autograd refuses some that plain torch lets through.
            "detach().mul_(0.5)" if x.requires_grad else "data.mul_(0.5)", "detach().add_(0.25)",
            "unsqueeze_(0)", "squeeze_()", "t_()",
        ])  # fmt: skip
        return f"{target}.{op}"

    def write_beside_autograd(self):
        """Writes that autograd does not see: also to leaves."""
        (name, x), (other, y) = self.pick(), self.pick()
        if (
            x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        ):  # lists that overlap mean nothing
            return None
        return self.random.choice([
            f"with torch.no_grad(): {name}.mul_(0.9)",
            f"with torch.no_grad(): torch._foreach_mul_([{name}, {other}], 0.5)",
            f"with torch.no_grad(): {name}.copy_({other})", f"{name}.data = {name}.data * 0.5",
            f"{self.fresh()} = torch.nn.Parameter({name}.detach())",
            f"with torch.inference_mode(): {name}.detach()[:1].add_(1)",
            f"with torch.inference_mode(): {self.fresh()} = {name}[1:] * 2",
        ])  # fmt: skip

    def gradient(self):
        found = self.pick(lambda t: t.requires_grad and t.is_floating_point())
        if not found:
            return None
        name, _ = found
        leaf = self.pick(lambda t: t.requires_grad and t.is_leaf)
        if leaf is None:
            return None
        fn = self.random.choice(
            ["sum()", "square().sum()", "tanh().mean()", "pow(3).sum()", "abs().square().sum()"]
        )
        create = self.random.random() < 0.6
        if self.random.random() < 0.4:
            return f"{name}.{fn}.backward(retain_graph=True); {self.fresh()} = {leaf[0]}.grad.clone()"
        if self.random.random() < 0.3:
            g = f"torch.autograd.grad({name}.{fn}, {leaf[0]}, create_graph=True)[0]"
            return (
                f"{self.fresh()} = torch.autograd.grad({g}.square().sum(), {leaf[0]}, retain_graph=True)[0]"
            )
        options = f"retain_graph=True, create_graph={create}"
        return f"{self.fresh()} = torch.autograd.grad({name}.{fn}, {leaf[0]}, {options})[0]"

    def optimize(self):
        found = self.pick(lambda t: t.requires_grad and t.is_leaf and t.numel())
        if not found:
            return None
        name, _ = found
        kind = self.random.choice([
            "SGD([{n}], lr=0.1, momentum=0.9)", "Adam([{n}], lr=0.1)", "AdamW([{n}], lr=0.1, foreach=True)",
            "Adam([{n}], lr=0.1, amsgrad=True)", "SGD([{n}], lr=0.1)", "RMSprop([{n}], lr=0.01)",
        ]).format(n=name)  # fmt: skip
        number = f"o{len(self.statements)}"
        step = f"{number}.zero_grad(); {name}.square().sum().backward(); {number}.step()"
        return f"{number} = torch.optim.{kind}; {step}; {step}"

    def copied(self):
        name, x = self.pick()
        layout = self.layout(x.ndim)
        form = self.random.choice([
            *[f"move({name}, {layout})"] * 3, f"copy.deepcopy({name}.detach())", f"torch.zeros_like({name})",
            f"torch.cat([{name}, {name}])", f"torch.stack([{name}, {name}], -1)", f"{name}.data + 1",
            f"{name}.new_ones({tuple(x.shape)}) * {name}", f"F.pad({name}, (1, 0))", f"pickled({name})",
            f"F.embedding(torch.tensor([[0, 1], [1, 0]]), {name})",
        ])  # fmt: skip
        return f"{self.fresh()} = {form}"

    def rare(self):
        name, x = self.pick()
        if self.random.random() < 0.3:
            return f"{self.fresh()} = saved({name}, {self.layout(x.ndim)})"
        if self.random.random() < 0.3:
            return f"load_into({name}, normal({self.random.randrange(1000)}, {tuple(x.shape)}))"
        body = self.random.choice([
            "x.tanh() * 2", "x.square().sum()", "(x + 1).relu().mean()", "x * x.sigmoid()", "x.mul_(0.5).sum()",
            "x[1:].sum() + x[:1].square().sum()",
        ])  # fmt: skip
        return f"{self.fresh()} = compiled(lambda x: {body}, {name})"


KINDS = (
    (_Writer.make, 3), (_Writer.unary, 5), (_Writer.binary, 5), (_Writer.product, 3), (_Writer.reduction, 5),
    (_Writer.view, 6), (_Writer.write, 6), (_Writer.gradient, 5), (_Writer.optimize, 1), (_Writer.copied, 4),
    (_Writer.write_beside_autograd, 1), (_Writer.rare, 0.25),
)  # fmt: skip


class _Overflow(Exception):
    """Numbers or sizes grew too large to compare."""


def write_program(seed, wide=False):
    """The program of a seed: the same in every process. `wide`: of more_statements.py and rare_statements.py, too."""
    kinds = (*KINDS, *MORE, *RARE) if wide else KINDS
    for attempt in range(100):
        writer = _Writer(f"{seed}.{attempt}", kinds)
        try:
            statements = writer()
        except _Overflow:
            continue
        return Program(seed, writer.mesh, statements, each=bool(seed % 2))
    raise AssertionError(f"no program for seed {seed}")
