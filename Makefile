# `make demo`, `make notebook`, `make docs` and `make test` do all. Each makes .venv and installs on first use only.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# A machine with an NVIDIA driver gets the CUDA packages. Any other gets the CPU build of PyTorch, named exactly:
# a bare `torch` takes the CUDA build. FlashAttention-4 is installed there too, since its kernels compile without a GPU.
TORCH_CPU ?= torch==2.13.0
ifneq ($(wildcard /proc/driver/nvidia)$(shell command -v nvidia-smi),)
FLAVOUR  := cuda13
PACKAGES := -e ".[cuda13,demo,notebook,docs,dev]"
MARKS    := not slow
REQUIRE  := torch,jax,flash-attn-4,flashinfer
else
FLAVOUR  := cpu
PACKAGES := "$(TORCH_CPU)" -e ".[torch,jax,flash-attn-4,demo,notebook,docs,dev]"
MARKS    := not slow and not gpu
REQUIRE  := torch,jax,flash-attn-4
endif
STAMP := $(VENV)/.installed-$(FLAVOUR)

# Kernels that are built on the way stay in .venv, so that a clone is removed whole.
export MLA_INTEROP_CACHE ?= $(CURDIR)/$(VENV)/kernels
# What must be there, so that no test is skipped because an install went wrong.
export MLA_INTEROP_REQUIRE ?= $(REQUIRE)
# Two processes: most of a test's time here is one thread's (imports, tracing, compilers).
PYTEST_ARGS ?= -n 2

.PHONY: demo notebook docs test test-all lint install clean

demo: $(STAMP)
	@$(BIN)/mla-interop demo $(DEMO_ARGS)
	@echo "Next: make notebook; or \`. $(BIN)/activate\`, and mla-interop --help."

# Runs one notebook from top to bottom; NOTEBOOK=notebooks/03_lse_and_merging.ipynb, say, runs another.
NOTEBOOK ?= notebooks/01_first_prefill.ipynb
notebook: $(STAMP)
	@echo "Running $(NOTEBOOK); half a minute or more."
	@$(BIN)/python -m nbconvert --log-level=ERROR --ExecutePreprocessor.extra_arguments=--IPKernelApp.log_level=40 --execute --to html --output-dir notebooks-output $(NOTEBOOK)
	@echo "Open $(CURDIR)/notebooks-output/$(basename $(notdir $(NOTEBOOK))).html in a browser."
	@echo "To work in the notebooks: $(BIN)/pip install jupyterlab && $(BIN)/python -m jupyter lab notebooks"

# Warnings are errors, as in the tests. Material's notice about its own successor is no warning about these pages.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir site
	@echo "Open $(CURDIR)/site/index.html; with search: $(BIN)/python -m http.server --directory site"

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "$(MARKS)"

test-all: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

install: $(STAMP)

# One line, in place, names the file that pip is at, so that some minutes are not silent; all that pip says is shown where it fails.
$(STAMP): SHELL := bash
$(STAMP): .SHELLFLAGS := -o pipefail -c
$(STAMP): pyproject.toml Makefile
	@echo "Installing into $(VENV) for $(FLAVOUR), once; this takes some minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --upgrade pip
	@$(BIN)/python -m pip install --progress-bar off $(PACKAGES) 2>&1 | tee $(VENV)/install.log | \
	  awk '/^ *(Downloading|Using cached) / {sub(/^ */, ""); printf "\r\033[K  %.76s", $$0; fflush()} /^Installing/ {printf "\r\033[K  Unpacking"; fflush()} END {printf "\r\033[K"}' \
	  || { cat $(VENV)/install.log; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) demo-output notebooks-output site dist build .pytest_cache .ruff_cache
