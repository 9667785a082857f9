"""What a run may be told, and the texts for what it may not."""

import pytest

from longmesh.attention.exchange.named import EXCHANGES
from longmesh.cli.main import make_parser
from longmesh.errors import LongmeshError
from longmesh.train import options as trainer
from longmesh.train.options import TrainOptions

ODD_HEADS = (
    "--dim 100 in --heads 8: a head needs an even number of features, which rotate in pairs; give --dim 96"
)
UNEVEN_BATCH = "--batch 3: each of the 2 groups (--data) takes the same number of sequences; give --batch 4"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"steps": 0}, "--steps 0: give 1 or more"),
        ({"context": -1}, "--context -1: give 1 or more"),
        ({"keep": 0}, "--keep 0: give 1 or more"),
        ({"keep_every": -1}, "--keep-every -1: give 0 or more"),
        ({"check_replicas": -1}, "--check-replicas -1: give 0 or more"),
        ({"timeout": float("nan")}, "--timeout nan: give a positive number of seconds, at most 1e+09"),
        ({"mask": "window"}, "--mask window: it is not known; give one of documents, causal"),
        ({"dim": 100, "heads": 8}, ODD_HEADS),
        ({"heads": 4, "kv_heads": 3}, "--kv-heads 3 must divide --heads 4"),
        (
            {"tensor": 4},
            "--tensor 4: heads are sharded over the tensor axis, so it must divide --kv-heads 2",
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
    assert set(told) == set(TrainOptions.__dataclass_fields__) - {"terminal", "until"}
    assert vars(make_parser().parse_args(["train"])) == {"command": "train"}  # defaults are the trainer's


def test_the_exchanges_are_those_of_attention():
    """They are listed twice, because those of attention import torch."""
    assert sorted(EXCHANGES) == sorted(trainer.EXCHANGES)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("65536", 65536), ("64K", 65536), ("64k", 65536), ("1M", 1 << 20), ("1.5M", 3 << 19), ("1e6", 10**6),
     ("2.5e3", 2500), ("16_384", 16384), ("1G", 1 << 30), ("0", 0), ("-1", -1)],
)  # fmt: skip
def test_a_length_may_have_a_unit(text, tokens):
    assert make_parser().parse_args(["train", f"--seq-len={text}"]).seq_len == tokens
    options = ("random_tokens", "new_tokens", "page", "chunk")
    given = make_parser().parse_args(
        ["generate", *(f"--{name.replace('_', '-')}={text}" for name in options)]
    )
    assert [getattr(given, name) for name in options] == [tokens] * 4


@pytest.mark.parametrize("text", ["1.5", "1e400", "1.3K", "K", "64Kb", "1e-3", "", "nan"])
def test_what_is_no_length(text, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["train", f"--seq-len={text}"])
    said = f"{text!r} is not a number of tokens; give one such as 65536, 64K, 1M or 1e6"
    assert f"longmesh train: argument --seq-len: {said}" in capsys.readouterr().err


def test_an_earlier_runs_checkpoints_are_not_replaced_without_a_word(tmp_path):
    (tmp_path / "checkpoint" / "step-00000020").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-00000020" / ".metadata").touch()
    with pytest.raises(LongmeshError) as error:
        TrainOptions(out=str(tmp_path)).check_paths()
    assert str(error.value) == (
        f"--out {tmp_path}: an earlier run has left checkpoints there, up to step 20, and a new run would replace "
        "them; give --resume auto to continue it, another --out, or --force to begin again there"
    )
    for allowed in ({"resume": "auto"}, {"resume": str(tmp_path)}, {"force": True}):
        TrainOptions(out=str(tmp_path), **allowed).check_paths()
    other = tmp_path / "other"
    TrainOptions(out=str(other), resume=str(tmp_path)).check_paths()
    (other / "checkpoint" / "step-00000001").mkdir(parents=True)
    (other / "checkpoint" / "step-00000001" / ".metadata").touch()
    with pytest.raises(LongmeshError, match="an earlier run has left checkpoints"):
        TrainOptions(out=str(tmp_path), resume=str(other)).check_paths()
