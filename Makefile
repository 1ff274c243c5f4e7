# The two commands a newcomer needs: make demo, make test.
#
#   make demo RESUME=1             continues after Ctrl-C
#   make demo ARGS="--data DIR"    any option of examples/train_lm.py
#   make setup PYTHON=python3.12   takes that interpreter
SHELL := /bin/bash
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
unexport PYTHONPATH

.PHONY: help setup build package demo test docs wheel sanitize-gpu format lint clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: ## system packages and the Python environment .venv
	@tools/setup.sh

build: setup ## the C++ library, the command and their tests; the Python package into .venv
	@tools/build.sh

package: ## the Python package alone into .venv, with kernels for this machine's GPUs
	@tools/setup.sh demo
	@tools/build.sh package

demo: package ## train a small MoE language model twice, report in out/demo (about 7 minutes)
	@python examples/train_lm.py $(if $(RESUME),--resume) $(ARGS)

test: build ## every test of C++ and Python, the structure and the format
	@tools/run_tests.sh

docs: setup ## the documentation as a site with search and the Python reference, in build/site
	@python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

wheel: build ## a wheel for other machines and a source distribution, in dist/
	@tools/wheel.sh

sanitize-gpu: build ## the device tests under compute-sanitizer's four tools; needs a GPU
	@python tools/sanitize_gpu.py $(ARGS)

format: setup ## rewrite sources in the project's format
	@tools/format.sh --fix

lint: setup ## report what `make format` would change, and what ruff finds
	@tools/format.sh --check

clean: ## remove what was built; keeps .venv and out/
	rm -rf build dist .pytest_cache .ruff_cache .setup/package
