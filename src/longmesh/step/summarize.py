"""From a recording to the numbers of each section: products, traffic, saved storages, peaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from longmesh.comm.record import CommEvent
from longmesh.step.record import OUTSIDE, PRODUCTS, Op, Place, Recorder
from longmesh.step.trace import AttentionCall, LayerTrace, Message, Product, Saved, Work


class SectionFacts(NamedTuple):
    """What a recording does not tell of a section."""

    name: str
    repeats: int
    parameters: int
    expert_parameters: int
    blocks: int
    top_k: float


def summarize(
    recorder: Recorder,
    section: int,
    facts: SectionFacts,
    parameters: Collection[int],
    gradients: Collection[int],
    messages: Sequence[tuple[Place, bool, CommEvent]] = (),
) -> LayerTrace:
    """The trace of one section. `parameters` and `gradients`: numbers of their storages."""
    work = {
        (is_backward, inner): _work(recorder, Place(section, inner), is_backward)
        for is_backward in (False, True)
        for inner in (False, True)
    }
    left_out = {*parameters, *gradients}
    sent = [
        [e for p, backward, e in messages if p.section == section and backward is way]
        for way in (False, True)
    ]
    return LayerTrace(
        name=facts.name,
        repeats=facts.repeats,
        forward_inner=work[False, True],
        forward_outer=work[False, False],
        backward_inner=work[True, True],
        backward_outer=work[True, False],
        saved=_saved(recorder, section, left_out),
        forward_peak=_peak(recorder, section, False, left_out),
        backward_peak=_peak(recorder, section, True, left_out),
        input_bytes=float(recorder.sizes.get(recorder.inputs.get(section, -1), 0)),
        parameters=facts.parameters,
        expert_parameters=facts.expert_parameters,
        calls=_calls(recorder, section),
        messages_forward=_messages(sent[0]),
        messages_backward=_messages(sent[1]),
        blocks=facts.blocks,
        top_k=facts.top_k,
        alternate_products=_alternate_products(recorder, section),
    )


def _alternate_products(recorder: Recorder, section: int) -> float:
    """What selective checkpointing keeps of products: the result of the first, the third, and so on."""
    here = [
        op
        for op in recorder.ops
        if op.place.section == section and op.kind == "product" and not op.is_backward
    ]
    return float(sum(op.writes[0].num_bytes for op in here[::2]))


def _work(recorder: Recorder, place: Place, is_backward: bool) -> Work:
    here = [op for op in recorder.ops if op.place == place and op.is_backward is is_backward]
    memory = [op for op in here if op.kind == "memory"]
    fused, groups = _fused_bytes(recorder, place, is_backward)
    return Work(
        products=_products([op for op in here if op.kind == "product"]),
        traffic=float(sum(use.num_bytes for op in memory for use in (*op.reads, *op.writes))),
        fused=fused,
        launches=float(len(memory)),
        fused_launches=groups,
    )


def _products(ops: Sequence[Op]) -> tuple[Product, ...]:
    """Equal ones are one, with how often."""
    counts: Counter[Product] = Counter()
    for op in ops:
        d = op.dims
        assert d is not None
        written = op.writes[0]
        itemsize = written.num_bytes / max(1, _numel(written.shape))
        weights = float(d.k * d.n * d.groups) if d.batch == 1 else float(d.k * d.n)
        one = Product(
            float(d.m),
            float(d.n),
            float(d.k),
            float(d.batch),
            weights,
            itemsize,
            op.name not in ("bmm", "baddbmm"),
        )
        counts[one] += 1
    return tuple(
        Product(p.m, p.n, p.k, p.times * count, p.weights, p.itemsize, p.is_linear)
        for p, count in counts.items()
    )


def _numel(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def _fused_bytes(recorder: Recorder, place: Place, is_backward: bool) -> tuple[float, float]:
    """Bytes that chains of memory-bound ops read and write if each chain is one kernel, and how many chains there are.
    A chain ends at a product, at attention, and where the place changes."""
    last_read: dict[int, int] = {}
    for number, op in enumerate(recorder.ops):
        for use in op.reads:
            last_read[use.storage] = number
    total, chains, chain = 0.0, 0, list[tuple[int, Op]]()
    ops = [*enumerate(recorder.ops), (len(recorder.ops), None)]
    for number, op in ops:
        if op is not None and (op.kind, op.place, op.is_backward) == ("memory", place, is_backward):
            chain.append((number, op))
            continue
        if chain:
            total += _chain_bytes(chain, last_read)
            chains += 1
        chain = []
    return total, float(chains)


def _chain_bytes(chain: Sequence[tuple[int, Op]], last_read: dict[int, int]) -> float:
    end = chain[-1][0]
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    for _, op in chain:
        for use in op.reads:
            if use.storage not in made:
                read[use.storage] = max(read.get(use.storage, 0), use.num_bytes)
        for use in op.writes:
            made[use.storage] = max(made.get(use.storage, 0), use.num_bytes)
    kept = sum(size for storage, size in made.items() if last_read.get(storage, end + 1) > end)
    return float(sum(read.values()) + kept)


def _saved(recorder: Recorder, section: int, left_out: Collection[int]) -> tuple[Saved, ...]:
    made_in = {event.storage: event.place for event in recorder.events if event.num_bytes >= 0}
    given = recorder.inputs.get(section)
    found: Counter[tuple[str, str, bool]] = Counter()
    for number in recorder.saved:
        # What was made outside the layers and is no layer's input (tables of angles) is there once for all of them.
        is_input = number == given
        made = made_in.get(number, OUTSIDE)
        home = section if is_input else made.section
        if number in left_out or home != section or (section == 0 and number in recorder.inputs.values()):
            continue
        op = recorder.made_by.get(number, "given")
        kind = "input" if is_input else "product" if op in PRODUCTS else op if op == "attention" else "other"
        found[op, kind, made.inner] += recorder.sizes[number]
    return tuple(Saved(float(size), *key) for key, size in found.items())


def _peak(recorder: Recorder, section: int, is_backward: bool, left_out: Collection[int]) -> float:
    """The most bytes alive in a pass of the section, above those alive when it began. Layers run within the pass of
    what is outside them: their storages don't count there."""
    if section == 0:
        others = {e.storage for e in recorder.events if e.num_bytes > 0 and e.place.section != 0}
        left_out = {*left_out, *others}
    alive, start, peak = 0, None, 0
    for event in recorder.events:
        is_here = event.place.section == section and event.is_backward is is_backward
        if is_here and start is None:
            start = peak = alive
        if event.storage not in left_out:
            alive += event.num_bytes
        if is_here:
            peak = max(peak, alive)
    return float(peak - (start or 0))


def _calls(recorder: Recorder, section: int) -> tuple[AttentionCall, ...]:
    found = Counter(
        (plan.mask, plan.heads)
        for place, plan, way in recorder.calls
        if place.section == section and way == "forward"
    )
    return tuple(AttentionCall(mask, heads, times) for (mask, heads), times in found.items())


def _messages(events: Sequence[CommEvent]) -> tuple[Message, ...]:
    found = Counter((event.kind, event.sent_bytes) for event in events)
    return tuple(Message(kind, float(size), float(times)) for (kind, size), times in found.items())
