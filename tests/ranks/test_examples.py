"""Each example as a script of its own, on the ranks of the pool: it prints what it shows and checks itself."""

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest

from support.accelerated import accelerated
from support.bridges import of_code

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGES = EXAMPLES.parent / "docs" / "examples"

SHOWS = {
    "comm_mode_features": ("wrote comm.json, comm.txt, trace.json", "all_reduce"),
    "convnext": ("largest difference from one process",),
    "cross_attention": ("text whole: 0 collectives", "text contiguous"),
    "finetune_llama": ("on 4 ranks", "loss"),
    "finetune_moe": ("3 of 6 experts on this rank", "the same as one process"),
    "flex_attention_cp": ("dvalue: largest difference",),
    "hybrid_model": ("its state comes from ranks", "largest difference from one process"),
    "layouts_demo": ("columns over both axes", "6 moves, each checked on 4 ranks"),
    "long_prompt": ("the tokens of one process", "branch"),
    "table_sharding": ("table-wise: 2 tables a rank", "row-wise"),
    "visualize_sharding": ("one rank has none", "sharding.svg"),
}


def run_script(name: str) -> str:
    printed = io.StringIO()
    before, sys.argv = sys.argv, [name]
    # accelerate finds its ranks in the environment, where a launcher puts them.
    found = accelerated() if name == "finetune_llama" else contextlib.nullcontext()
    try:
        with contextlib.redirect_stdout(printed), found:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()


@pytest.mark.parametrize(
    "name", [of_code(name, (EXAMPLES / f"{name}.py").read_text()) for name in sorted(SHOWS)]
)
def test_example(pool, name):
    printed = pool.run(run_script, name, ranks=4, timeout=300.0)[0]
    for text in SHOWS[name]:
        assert text in printed, printed


def test_every_example_is_tested_and_has_a_page():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == set(SHOWS)
    for name in scripts - {"layouts_demo"}:
        assert f"longmesh run --ranks 4 examples/{name}.py" in (PAGES / f"{name}.md").read_text()
