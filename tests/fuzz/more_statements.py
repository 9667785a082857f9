"""Statements that reach further: index lists and masks, whole numbers and booleans, layers, torch.func, hooks, state.

Each takes the writer (`programs._Writer`) and returns a statement, or None if no tensor of the program fits.
"""


def indexed(w):
    """Read or write at lists, masks, steps, None and Ellipsis."""
    found = w.pick(lambda t: t.ndim >= 1 and t.shape[0] > 0 and not (t.requires_grad and t.is_leaf))
    if not found:
        return None
    name, x = found
    last, rows = x.shape[0] - 1, [w.random.randint(-x.shape[0], x.shape[0] - 1) for _ in range(2)]
    place = w.random.choice(
        [
            f"[{[0, last]}]",
            f"[{rows}]",
            f"[{name}.detach() > 0]",
            "[..., -1:]",
            "[None]",
            f"[{rows[0]}, None]",
            "[::2, ...]",
            f"[torch.tensor({[last, 0]})]",
            f"[..., None, {rows[:1]}]",
            f"[:, {[0]}]",
            f"[{name}.detach().abs() < 0.5]",
            "[-1:]",
            f"[torch.arange({x.shape[0]}) % 2 == 0]",
        ]
    )
    if w.random.random() < 0.4:
        return f"{w.fresh()} = {name}{place}"
    return f"{name}{place} {w.random.choice(['=', '+=', '*='])} {w.random.choice(['1.5', '0', '-0.25'])}"


def by_index(w):
    """Ops that take indices or masks as tensors, in place and not."""
    found = w.pick(lambda t: t.ndim >= 1 and t.numel() > 0 and t.is_floating_point())
    if not found:
        return None
    name, x = found
    dim = w.random.randrange(-x.ndim, x.ndim)
    index = f"torch.tensor({[x.shape[dim] - 1, 0]})"
    reads = [
        f"index_select({dim}, {index})",
        f"masked_fill({name}.detach() > 0, 0.5)",
        f"take_along_dim({name}.argsort({dim}), {dim})",
        f"gather({dim}, {name}.argmax({dim}, keepdim=True))",
        f"index_add({dim}, {index}, {name}.index_select({dim}, {index}))",
        f"index_fill({dim}, {index}, 0.25)",
        "tril()",
        f"scatter_add({dim}, {name}.argmin({dim}, keepdim=True), {name})",
        f"masked_select({name}.detach() > 0)",
        f"cummax({dim})[0]",
        f"kthvalue(1, {dim})[0]",
        f"median({dim})[0]",
        f"repeat_interleave(2, {dim})",
        "nonzero()",
        f"max({dim})[1]",
        f"sort({dim}, descending=True)[0]",
        f"cumprod({dim})",
        f"renorm(2, {dim}, 1.0)",
        f"logcumsumexp({dim})",
        f"unfold({dim}, 1, 1)",
        "tile(2)",
        f"rot90() if {x.ndim} > 1 else {name}",
    ]
    writes = [
        f"masked_fill_({name}.detach() > 0, 0.5)",
        f"index_fill_({dim}, {index}, 0.25)",
        f"index_copy_({dim}, {index}, {name}.detach().index_select({dim}, {index}) * 2)",
        "tril_()",
        "clamp_min_(0)",
        "div_(3)",
        "pow_(2)",
        "sin_()",
    ]
    if w.random.random() < 0.3 and not (x.requires_grad and x.is_leaf):
        return f"{name}.{w.random.choice(writes)}"
    return f"{w.fresh()} = {name}.{w.random.choice(reads)}"


def joined(w):
    (a, x), (b, _) = w.pick(), w.pick()
    dim = w.random.randrange(max(x.ndim, 1))
    form = w.random.choice(
        [
            f"torch.cat([{a}, {b}, {a} * 2], {dim})",
            f"torch.stack([{a}, {b}], {dim})",
            f"torch.cat({a}.split(2, {dim})[::-1], {dim})",
            f"torch.hstack([{a}, {b}])",
            f"torch.broadcast_tensors({a}, {b})[1].clone()",
            f"torch.outer({a}.flatten(), {b}.flatten()[:2])",
            f"torch.einsum('i,j->ij', {a}.reshape(-1)[:3], {b}.reshape(-1)[:4])",
            f"torch.cat({a}.tensor_split(3, {dim}), {dim})",
            f"sum(part.sum() for part in {a}.unbind({dim}))",
            f"torch.stack({a}.chunk(1, {dim}) * 2).sum(0)",
            f"torch.where({a} > {b}, 1.0, {b})",
        ]
    )
    return f"{w.fresh()} = {form}"


def typed(w):
    """Whole numbers, booleans, half precision."""
    name, _ = w.pick()
    form = w.random.choice(
        [
            "({n} > 0)",
            "({n} > 0).sum(0)",
            "({n} * 4).long()",
            "({n} * 4).int().cumsum(0)",
            "({n} > 0).any()",
            "({n} < 0).all(-1)",
            "({n} * 3).long() % 3",
            "({n} > 0).logical_not().double()",
            "({n} * 4).long().sum()",
            "({n} * 4).int().sort(-1)[0]",
            "({n} == {n}).long().argmax(-1)",
            "torch.count_nonzero({n})",
            "({n} > 0).double().mean()",
            "({n} * 4).long().amax(0)",
            "({n} * 5).short() // 2",
            "({n} * 4).long().clamp(0, 2).bitwise_and(1)",
        ]
    )
    return f"{w.fresh()} = {form.format(n=name)}"


def layer(w):
    found = w.pick(lambda t: t.ndim >= 1 and t.shape[-1] > 0 and t.numel() > 0 and t.is_floating_point())
    if not found:
        return None
    name, x = found
    size, number = x.shape[-1], w.random.randrange(1000)
    weight = f"leaf(normal({number}, ({size},)), {w.layout(1)})"
    form = w.random.choice(
        [
            f"F.layer_norm({name}, ({size},), {weight})",
            f"F.rms_norm({name}, ({size},), {weight})",
            f"F.glu(torch.cat([{name}, {name}], -1))",
            f"F.conv1d({name}.reshape(1, 1, -1), put(normal({number}, (2, 1, 1)), {w.layout(3)}))",
            f"F.normalize({name}, dim=-1)",
            f"F.mse_loss({name}, {name}.detach() * 2)",
            f"F.cross_entropy({name}.reshape(-1, {size}), torch.zeros({x.numel() // size}).long())",
            f"F.dropout({name}, 0.5, training=False)",
            f"F.scaled_dot_product_attention({name}[None, None], {name}[None, None], {name}[None, None])",
            f"F.smooth_l1_loss({name}, {name}.detach() + 1)",
            f"F.pad({name}, (1, 2), value=0.5)",
            f"F.avg_pool1d({name}.reshape(1, 1, -1), 1)",
            f"F.cosine_similarity({name}, {name} + 1, -1)",
            f"F.hardtanh({name}).cumsum(-1)",
            f"F.kl_div({name}.log_softmax(-1), {name}.detach().softmax(-1))",
            f"F.prelu({name}, put(normal({number}, (1,)), {w.layout(0)}))",
            f"F.interpolate({name}.reshape(1, 1, -1), scale_factor=2)",
            f"torch.cdist({name}.reshape(-1, {size}), {name}.reshape(-1, {size}) + 1)",
            f"F.group_norm({name}.reshape(-1, {size}), 1)",
        ]
    )
    return f"{w.fresh()} = {form}"


def transformed(w):
    """torch.func, autocast, hooks, retained gradients, vectors of parameters, clipped gradients, state dicts."""
    found = w.pick(lambda t: t.is_floating_point() and t.numel() > 0)
    if not found:
        return None
    name, x = found
    new = w.fresh()
    grad = [
        f"{name}.register_hook(lambda g: g * 2); {new} = torch.autograd.grad({name}.tanh().sum(), {name})[0]",
        f"{name}.retain_grad(); {name}.square().sum().backward(retain_graph=True); {new} = {name}.grad.clone()",
    ]
    leaf = [
        f"{name}.square().sum().backward(); torch.nn.utils.clip_grad_norm_([{name}], 0.1); {new} = {name}.grad.clone()",
        f"{name}.grad = None; {name}.sum().backward(); {new} = {name}.grad.clone(); {name}.grad.zero_()",
        f"torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector([{name}]).detach() * 2, [{name}])",
    ]
    any_ = [
        f"{new} = torch.func.grad(lambda x: x.square().sum())({name}.detach())",
        f"{new} = torch.func.vmap(lambda x: x.sum() * x)({name}.detach())",
        f"{new} = copy.copy({name}.detach())",
        f"{new} = torch.utils.checkpoint.checkpoint(lambda x: x.tanh() * x.sum(), {name}, use_reentrant=False)",
        f"m = torch.nn.ParameterList([{name}.detach()]); m.load_state_dict({{'0': m[0] * 2}}); {new} = m[0].detach()",
    ]
    choices = any_ + (grad if x.requires_grad else []) + (leaf if x.requires_grad and x.is_leaf else [])
    return w.random.choice(choices)


MORE = ((indexed, 2), (by_index, 3), (joined, 2), (typed, 1), (layer, 2), (transformed, 1))
