PYTHON ?= python

.PHONY: check format test bench compile-report

check:            ## lint, format, types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format:           ## rewrite what ruff can
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

test:
	$(PYTHON) -m pytest

bench:            ## every benchmark at sizes that fit this machine
	$(PYTHON) -m pytest benchmarks/ --benchmark-only

compile-report:   ## every Triton kernel compiled for every architecture, no GPU needed; TARGETS="sm_80 sm_90" for some
	$(PYTHON) -m benchmarks.compile_report $(if $(TARGETS),--target $(TARGETS))
