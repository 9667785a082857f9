"""Statements that reach furthest: out=, linear algebra, statistics, torch.func, local parts, modules, optimizers.

Each takes the writer (`programs._Writer`) and returns a statement, or None if no tensor of the program fits.
"""


def _floats(w, keep=lambda t: True):
    return w.pick(lambda t: t.ndim >= 1 and t.numel() > 0 and t.is_floating_point() and keep(t))


def written_out(w):
    """Ops that write where `out` says, in a layout of its own."""
    (a, x), (b, _) = w.pick(), w.pick()
    dim, made = w.random.randrange(-max(x.ndim, 1), max(x.ndim, 1)), w.fresh()
    form = w.random.choice([
        "torch.add({a}.detach(), {b}.detach(), out={n})", "torch.mul({a}.detach(), 2, out={n})",
        "torch.cumsum({a}.detach(), {d}, out={n})", "torch.maximum({a}.detach(), {b}.detach(), out={n})",
        "torch.tanh({a}.detach(), out={n})", "torch.clamp({a}.detach(), -1, 1, out={n})",
        "torch.where({a}.detach() > 0, {a}.detach(), {b}.detach(), out={n})",
        "torch.exp({a}.detach().tanh(), out={n}[...])",
    ])  # fmt: skip
    made_first = f"{made} = put(torch.zeros({tuple(x.shape)}).double(), {w.layout(x.ndim)})"
    return f"{made_first}; {form.format(a=a, b=b, d=dim, n=made)}"


def algebra(w):
    found = _floats(w)
    if not found:
        return None
    a, x = found
    size, dim = x.shape[-1], w.random.randrange(-x.ndim, x.ndim)
    rows = f"{a}.reshape(-1, {size})"
    square = f"({rows}.mT @ {rows} + same(torch.eye({size}).double()))"
    form = w.random.choice([
        "torch.linalg.norm({a}, dim={d})", "torch.linalg.vector_norm({a}, 3, {d})", "torch.linalg.inv({s})",
        "torch.linalg.vector_norm({a}, float('inf'))", "torch.linalg.vector_norm({a}, 1, {d}, keepdim=True)",
        "torch.linalg.solve({s}, {m}.mT)", "torch.linalg.cholesky({s})", "torch.linalg.det({s})", "torch.logdet({s})",
        "torch.linalg.slogdet({s}.mT)[1]", "torch.linalg.svdvals({s})", "torch.linalg.eigvalsh({s})",
        "torch.trace({s})",
        "torch.kron({m}[:2], {m}[:1])", "torch.dot({a}.flatten(), {a}.flatten())", "torch.mv({m}, {m}[0])",
        "torch.addmm({m}, {m}, {s}, beta=0.5)", "torch.bmm({m}[None], {s}[None])", "torch.inner({a}, {m}[0])",
        "torch.baddbmm({m}[None], {m}[None], {s}[None], alpha=2)", "torch.tensordot({a}, {s}, dims=([-1], [0]))",
        "torch.linalg.matrix_norm({m})", "torch.linalg.multi_dot([{m}, {s}, {m}.mT])", "torch.cov({m})",
        "torch.linalg.matrix_power({s}, 3)", "torch.linalg.solve_triangular({s}.tril(), {m}.mT, upper=False)",
        "torch.addr({s}, {m}[0], {m}[-1])", "torch.einsum('ij,kj,j->ik', {m}, {m}, {m}[0])",
        "torch.linalg.matrix_exp({s}.tanh())", "torch.cdist({m}, {m} + 1, p=1)", "F.bilinear({m}, {m}, {s}[None])",
    ])  # fmt: skip
    return f"{w.fresh()} = {form.format(a=a, d=dim, m=rows, s=square)}"


def gathered(w):
    """Values that go elsewhere, and what is said of all of them."""
    found = _floats(w)
    if not found:
        return None
    a, x = found
    dim = w.random.randrange(-x.ndim, x.ndim)
    words = {
        "a": a, "d": dim, "i": f"{a}.detach().argsort({dim})", "f": f"torch.tensor({[0, x.shape[dim] - 1, 0]})",
        "r": f"torch.tensor({[0, x.shape[0] - 1, 0]})", "e": f"same(torch.tensor([0, {x.numel() - 1}]))",
        "h": "torch.tensor(0.5).double()", "k": w.random.choice(["sum", "prod", "mean", "amax", "amin"]),
        "o": w.random.choice([True, False]), "shape": tuple(x.shape), "stride": x.stride(),
    }  # fmt: skip
    reads = [
        "{a}.scatter_reduce({d}, {i}, {a}, '{k}', include_self={o})", "{a}.index_put(({r},), {h}, accumulate=True)",
        "{a}.index_put(({r},), {a}[:1].detach(), accumulate=True)", "torch.take({a}, {e})", "torch.msort({a})",
        "{a}.index_reduce({d}, {f}, {a}.index_select({d}, {f}), 'mean')", "{a}.put({e}, same(torch.ones(2).double()))",
        "{a}.masked_scatter({a}.detach() > 0, {a}.detach() * 2)", "torch.histc({a}.detach(), 4, -1, 1)",
        "torch.bucketize({a}, same(torch.tensor([-1.0, 0.0, 1.0]).double()))", "{a}.mode({d})[0]",
        "torch.searchsorted({a}.detach().sort(-1)[0].contiguous(), {a}.detach().contiguous())", "{a}.nansum({d})",
        "({a} * 2).long().abs().flatten().bincount(minlength=9)", "torch.unique(({a}.detach() * 2).long())",
        "torch.isin({a}.detach().long(), torch.tensor([0, 1]))", "torch.quantile({a}, 0.5, {d})", "{a}.nanmean({d})",
        "{a}.aminmax(dim={d})[1]", "torch.std_mean({a}, {d}, correction=0)[1]", "{a}.cummin({d})[0]",
        "torch.var_mean({a}, {d}, correction=0)[0]", "torch.trapezoid({a}, dim={d})", "{a}.diff(n=2, dim={d})",
        "torch.fft.fft({a}, dim={d}).abs()", "torch.fft.rfft({a}, dim={d}).real", "torch.complex({a}, {a} * 2).abs()",
        "torch.view_as_real(torch.complex({a}, {a} + 1))", "torch.argwhere({a} > 0)", "torch.gradient({a}, dim={d})[0]",
        "torch.roll({a}, (2, 1), ({d}, 0))", "{a}.fliplr()", "{a}.triu(1)", "torch.diag_embed({a})",
        "torch.block_diag({a}.flatten()[:2], {a}.flatten()[-1:])", "torch.combinations({a}.flatten()[:4])",
        "torch.cartesian_prod({a}.flatten()[:2], {a}.flatten()[-2:])", "torch.diagflat({a})",
        "torch.dstack([{a}, {a}])",
        "torch.cumulative_trapezoid({a}, dim={d})", "torch.logaddexp({a}, {a}.flip({d}))", "torch.hypot({a}, {a} + 1)",
        "torch.copysign({a}, {a}.roll(1, {d}))", "torch.heaviside({a}.detach(), {h})", "torch.column_stack([{a}, {a}])",
        "torch.tensor_split({a}, [1], {d})[-1]", "{a}.slice_scatter({a}[:1] * 2, 0, 0, 1)",
        "torch.meshgrid({a}.flatten()[:2], {a}.flatten()[:3], indexing='ij')[1]",
        "{a}.diagonal_scatter({a}.diagonal() * 3)",
        "{a}.select_scatter({a}.select({d}, 0) * 2, {d}, -1)",
    ]  # fmt: skip
    writes = [
        "{a}.scatter_({d}, {i}, 0.5)", "{a}.scatter_add_({d}, {i}, {a}.detach().clone())", "{a}.fill_diagonal_(0.5)",
        "{a}.index_put_(({r},), {h}, accumulate=True)", "{a}.diagonal().add_(1)", "{a}.mT.mul_(2)",
        "{a}[{a} > 0] = 0.25",
        "{a}[{a}.detach() < 0] *= 2", "{a}.index_add_({d}, {f}, {a}.detach().index_select({d}, {f}))",
        "{a}.cumsum_({d})",
        "{a}.unfold({d}, 1, 1).mul_(2)", "{a}.masked_scatter_({a}.detach() > 0, {a}.detach() * 2)", "{a}.triu_()",
        "{a}.transpose_(0, -1)", "{a}.movedim(0, -1)[..., :1].fill_(0.5)", "{a}.copy_({a}.detach().flip({d}))",
        "{a}[{r}] = {a}.detach()[{r}] + 1", "{a}.addcmul_({a}.detach(), {a}.detach(), value=0.1)", "{a}.nan_to_num_()",
        "{a}.lerp_({a}.detach().clone().roll(1, {d}), 0.25)", "{a}.as_strided({shape}, {stride}).add_(1)",
        "{a}.clamp_({a}.detach() - 1, 0.5)", "torch.relu_({a})", "{a}.remainder_(1.5)", "{a}.logical_not_()",
    ]  # fmt: skip
    if w.random.random() < 0.35 and not (x.requires_grad and x.is_leaf):
        return w.random.choice(writes).format(**words)
    return f"{w.fresh()} = {w.random.choice(reads).format(**words)}"


def functional(w):
    """More of torch.func, and autograd's own functions."""
    found = _floats(w, lambda t: t.numel() < 13)
    if not found:
        return None
    a, _ = found
    fn = w.random.choice([
        "lambda x: x.square().sum()", "lambda x: x.tanh().sum(0)", "lambda x: x * x.sum()", "lambda x: x.softmax(-1)",
        "lambda x: (x[:1] * 2).sum()", "lambda x: x.cumsum(0)", "lambda x: x.logsumexp(0)",
    ])  # fmt: skip
    form = w.random.choice([
        "torch.func.jacrev({f})({x})", "torch.func.jvp({f}, ({x},), ({x} * 2,))[1]", "torch.func.vmap({f})({x})",
        "torch.func.vmap({f}, in_dims=-1)({x})", "torch.func.vjp({f}, {x})[0]", "torch.func.jacfwd({f})({x})",
        "torch.autograd.functional.jacobian({f}, {x})", "torch.func.hessian(lambda x: x.pow(3).sum())({x})",
        "torch.autograd.functional.hvp(lambda x: x.pow(3).sum(), {x}, {x})[1]", "torch.func.functionalize({f})({x})",
        "torch.func.grad_and_value(lambda x: x.square().mean())({x})[0]", "Cube.apply({a})", "Cube.apply({a}[:1])",
        "torch.func.vmap(torch.func.grad(lambda x: x.square().sum()))({x})",
    ])  # fmt: skip
    return f"{w.fresh()} = {form.format(f=fn, x=f'{a}.detach()', a=a)}"


def local_parts(w):
    """Out of DTensors and back."""
    a, x = w.pick()
    form = w.random.choice([
        "through_local({a})", "through_full({a}, {y})", "through_map(lambda t: t * 2 + 1, {a})",
        "through_map(torch.tanh, {a})", "through_full({a}, {y}) * {a}", "through_local({a} * 2)",
    ])  # fmt: skip
    return f"{w.fresh()} = {form.format(a=a, y=w.layout(x.ndim))}"


def module(w):
    found = _floats(w, lambda t: t.ndim >= 2)
    if not found:
        return None
    kind = w.random.choice([
        "linear", "mlp", "lstm", "gru", "rnn", "mha", "encoder", "decoder", "conv", "norm", "group", "prelu", "batch",
        "bilinear", "styled", "styled", "styled norm", "styled sequence",
    ])  # fmt: skip
    return f"{w.fresh()} = run_module('{kind}', {w.random.randrange(1000)}, {found[0]})"


def optimize(w):
    found = w.pick(lambda t: t.requires_grad and t.is_leaf and t.numel())
    if not found:
        return None
    name, _ = found
    kind = w.random.choice([
        "NAdam([{n}], lr=0.01)", "RAdam([{n}], lr=0.01)", "Adadelta([{n}], lr=0.1)", "Adagrad([{n}], lr=0.1)",
        "Adamax([{n}], lr=0.1)", "ASGD([{n}], lr=0.1)", "Rprop([{n}], lr=0.01)", "AdamW([{n}], lr=torch.tensor(0.1))",
        "Adam([{n}], lr=0.1, maximize=True, weight_decay=0.1)", "Adagrad([{n}], lr=0.1, foreach=False)",
        "SGD([{n}], lr=0.1, nesterov=True, momentum=0.9, weight_decay=0.1)", "NAdam([{n}], lr=0.01, foreach=True)",
        "RMSprop([{n}], lr=0.01, centered=True, momentum=0.5)",
    ]).format(n=name)  # fmt: skip
    own = f"o{len(w.statements)}"
    step = f"{own}.zero_grad(); ({name} * {name} * {name}).sum().backward(); {own}.step()"
    slower = f"q = torch.optim.lr_scheduler.ExponentialLR({own}, 0.5); q.step()"
    return f"{own} = torch.optim.{kind}; {step}; {slower}; {own}.load_state_dict({own}.state_dict()); {step}"


def compiled(w):
    (a, _), (b, _) = w.pick(), w.pick()
    body = w.random.choice([
        "(x.tanh() * y).sum()", "x + y * 2", "torch.where(x > 0, x, y)", "F.gelu(x) - y.mean()", "x.softmax(-1) * y",
        "(x.unsqueeze(0) * y).sum(0).square()", "torch.cat([x, x]).sum() * y", "x[..., :1] + y.sum()",
    ])  # fmt: skip
    return f"{w.fresh()} = compiled(lambda x, y: {body}, {a}, {b})"


def hooked(w):
    """Saved tensors, checkpoints, hooks, and several gradients at once."""
    found = w.pick(lambda t: t.requires_grad and t.is_floating_point() and t.numel() > 0)
    if not found:
        return None
    form = w.random.choice([
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t): {n} = {a}.tanh() * {a}",
        "with torch.autograd.graph.save_on_cpu(): {n} = ({a} * {a}).exp().log1p()",
        "{n} = torch.utils.checkpoint.checkpoint(lambda x: x.softmax(-1) * x, {a}, use_reentrant=False)",
        "{n} = torch.utils.checkpoint.checkpoint(lambda x: x.sin().cumsum(0), {a}, use_reentrant=True)",
        "{n} = {a}.clone(); {n}.register_hook(lambda g: g.clamp(-1, 1))",
        "{n} = torch.autograd.grad({a}.tanh().sum(), {a}, create_graph=True)[0]",
        "{n} = {a} * 1; {n}.retain_grad(); {n}.sum().backward(retain_graph=True)",
        "{n} = torch.autograd.grad({a}.square(), {a}, {a}.detach(), retain_graph=True)[0]",
        "{n} = torch.autograd.grad([{a}.sum(), {a}.square().sum()], {a}, retain_graph=True)[0]",
    ])  # fmt: skip
    return form.format(a=found[0], n=w.fresh())


RARE = (
    (written_out, 1), (algebra, 2), (gathered, 5), (functional, 1.5), (local_parts, 1.5), (module, 1.5),
    (optimize, 0.5),
    (compiled, 0.3), (hooked, 1),
)  # fmt: skip
