"""What a run may be told, and the texts for what it may not."""

import pytest

from longmesh.cli.main import make_parser
from longmesh.errors import LongmeshError
from longmesh.train import TrainOptions

ODD_HEADS = "dim=100 in heads=8: a head needs an even number of features, which rotate in pairs; use dim=96"
UNEVEN_BATCH = "batch=3: each of the data=2 groups takes the same number of sequences; use batch=4"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"steps": 0}, "steps=0: give at least 1"),
        ({"context": -1}, "context=-1: give at least 1"),
        ({"keep": 0}, "keep=0: give 1 or more"),
        ({"keep_every": -1}, "keep_every=-1: give 0 or more"),
        ({"check_replicas": -1}, "check_replicas=-1: give 0 or more"),
        ({"timeout": float("nan")}, "timeout=nan: give a positive number of seconds, at most 1e+09"),
        ({"mask": "window"}, "mask='window' is not known; use one of documents, causal"),
        ({"dim": 100, "heads": 8}, ODD_HEADS),
        ({"heads": 4, "kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        (
            {"tensor": 4},
            "tensor=4: heads are sharded over the tensor axis, so it must divide kv_heads=2",
        ),
        ({"data": 2, "batch": 3}, UNEVEN_BATCH),
    ],
)
def test_mistakes_are_told(options, text):
    with pytest.raises(LongmeshError) as error:
        TrainOptions(**options)
    assert str(error.value) == text


def test_the_curve_does_not_depend_on_the_mesh_or_the_files():
    here = TrainOptions(data=2, batch=2, context=3, tensor=2, exchange="ring", out="a", resume="b")
    assert here.curve == TrainOptions(batch=2).curve
    assert here.curve != TrainOptions(batch=2, seed=1).curve


def test_the_command_lines_options_are_the_trainers():
    numbers = [
        "ranks",
        "threads",
        "data",
        "context",
        "tensor",
        "seq-len",
        "batch",
        "steps",
        "dim",
        "layers",
        "heads",
    ]
    numbers += ["kv-heads", "seed", "save-every", "keep", "keep-every", "check-replicas"]
    words = {
        "learning-rate": "0.1",
        "timeout": "60",
        "mask": "causal",
        "exchange": "ring",
        "cluster": "h100",
        "out": "a",
        "resume": "b",
        "baseline": "c",
    }
    arguments = [f"--{name}=2" for name in numbers] + [f"--{name}={value}" for name, value in words.items()]
    given = make_parser().parse_args(["train", "--compare", "--force", *arguments])
    told = {k: v for k, v in vars(given).items() if k not in ("command", "ranks", "threads", "compare")}
    options = TrainOptions(**{**told, "dim": 16})
    assert (options.seq_len, options.kv_heads, options.learning_rate) == (2, 2, 0.1)
    assert set(told) == set(TrainOptions.__dataclass_fields__) - {"terminal"}
    assert vars(make_parser().parse_args(["train"])) == {"command": "train"}  # defaults are the trainer's
