# Needs Python and make; everything else goes into .venv, made on first use. It grows: the demo installs what the package
# runs with (torch, numpy, rich), and the other targets add what they need when they are first called.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test soak lint bench docs

demo: $(VENV)/.has-run
	@rm -rf build/demo
	@$(BIN)/longmesh train --ranks 2 --seq-len 16384 --mask documents --exchange auto --compare \
		--steps 20 --dim 64 --heads 2 --kv-heads 1 --out build/demo

# Two halves at the same time, since a test on ranks leaves cores idle while it waits; the second half's output comes at
# the end. The tests on ranks that OTHERS matches are in the first half, so that both take as long.
OTHERS := test_ops_*.py test_device_attention.py test_recurrent*.py
test: $(VENV)/.has-test
	@mkdir -p build
	@$(BIN)/pytest tests/ranks $(OTHERS:%=--ignore-glob='*/%') > build/ranks.log 2>&1 & ranks=$$!; \
	$(BIN)/pytest tests/pure tests/e2e $(OTHERS:%=tests/ranks/%); others=$$?; \
	wait $$ranks; status=$$?; cat build/ranks.log; exit $$((status + others))

# What takes too long for each change: hundreds of faults, long walks of state machines, and random programs against plain
# torch, as many as PROGRAMS says from the seed SEED on.
PROGRAMS ?= 2000
SEED ?= 0
soak: $(VENV)/.has-test
	@$(BIN)/pytest tests/soak
	@PYTHONPATH=tests $(BIN)/python -m fuzz --wide --programs $(PROGRAMS) --seed $(SEED)

lint: $(VENV)/.has-lint
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports

# The tables, kept in benchmarks/results with the page made of them, and the op table. It takes a quiet machine and an hour.
bench: $(VENV)/.has-test
	@$(BIN)/python benchmarks/record.py
	@$(BIN)/python benchmarks/op_table.py

# A hook makes the pages of docs/files from the sources first; the site is build/site/index.html. Not --quiet: mkdocs counts
# only the warnings that it shows, and with --quiet they would not end the build.
docs: $(VENV)/.has-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "site: build/site/index.html; with its search: $(BIN)/python -m http.server --directory build/site"

# The constraints pin torch: without them pip may bring gigabytes of accelerator packages. The tests build the site, too.
EXTRAS_run :=
EXTRAS_test := [test,docs]
EXTRAS_lint := [lint]
EXTRAS_docs := [docs]

$(VENV)/.has-%: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing what make needs for this: a minute or two, once"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.$(EXTRAS_$*)'
	@touch $@
