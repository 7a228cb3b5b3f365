# Every target sets up a private environment first, once; tools/setup_env.py tells which variables it heeds.

VENV ?= .venv
BASE = $(or $(PYTHON),python3)
PY = $(VENV)/bin/python
DOCS = $(VENV)-docs

# Triton reads TRITON_INTERPRET when it is imported, so the kernels' interpreter has a process of its own.
# Processes share the tests, each a stretch of files, and who is done takes from the others. Each takes 1 to 2 GB.
JOBS ?= auto
TESTS = -m pytest -q --numprocesses $(JOBS) --maxprocesses 8 --dist worksteal
COMPILED = env -u TRITON_INTERPRET $(PY) $(TESTS)
INTERPRETED = env TRITON_INTERPRET=1 $(PY) $(TESTS)
# What the runs of one target passed, failed and skipped: the last line counts both, and both run where one fails.
COUNTS = $(VENV)/counts.json
# `make test` lists its slowest tests, and warns (it does not fail) where it takes this many minutes.
SLOWEST = --durations 20 --durations-min 3
BUDGET = 14

export PYTHON TORCH TORCH_INDEX_URL XENT_OPS_BUILD_CPP

# What `make test-quick` runs. It leaves out whatever compiles, starts processes or needs a GPU: 90 s on 2 cores.
QUICK = tests/operators tests/eager tests/fuzz/test_fixed_draws.py tests/compile/test_graph_snapshots.py \
	--ignore=tests/operators/test_offline_compile.py --ignore=tests/operators/test_with_grad_shared.py -k "not opcheck"
QUICK_INTERPRETED = tests/eager/test_launch_cache.py tests/operators/test_values.py -k "launch_cache or combination or divisor or target"

.PHONY: help env demo test test-quick test-full test-ascend test-integrations sanitize-gpu lint format release clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '  make %-12s %s\n' "$$name" "$$text"; done

env:  ## set up the private environment; the other targets do it too
	@command -v $(BASE) >/dev/null || { echo "This machine lacks $(BASE). Debian: sudo apt-get install" \
		"python3 python3-venv python3-dev g++. Fedora: sudo dnf install python3-devel gcc-c++" >&2; exit 1; }
	@$(BASE) tools/preflight.py
	@$(BASE) tools/setup_env.py $(VENV)

demo: env  ## train a small GPT with F.cross_entropy and both losses of xent_ops; ARGS="--data FOLDER" for your own text
	$(PY) examples/train_lm.py $(ARGS)

test: env  ## the tests that this machine can run: seven minutes on two cores
	@rm -f $(COUNTS)
	begun=$$(date +%s); $(COMPILED) tests -m "not slow" $(SLOWEST) --add-counts $(COUNTS); first=$$?; \
		$(INTERPRETED) tests -m "interpreter and not slow" $(SLOWEST) --add-counts $(COUNTS); second=$$?; \
		minutes=$$((($$(date +%s) - begun) / 60)); [ $$minutes -lt $(BUDGET) ] || echo "This took $$minutes minutes," \
		"the budget on two idle cores is $(BUDGET): the slowest tests are listed above." >&2; [ $$second = 0 ] && exit $$first

test-quick: env  ## the inner loop, under two minutes: values on the CPU and in the interpreter, eager, graph snapshots
	$(COMPILED) $(QUICK) -m "not slow and not gpu"
	$(INTERPRETED) $(QUICK_INTERPRETED) -m "interpreter and not slow"

test-full: env  ## the slower tests that `make test` leaves out: more dtypes, targets and processes, C++ builds, sanitizers
	$(COMPILED) tests -m slow

sanitize-gpu: env  ## compute-sanitizer over all kernels on an NVIDIA GPU; ARGS="racecheck" for one of its tools
	env -u TRITON_INTERPRET $(PY) tools/sanitize_gpu.py $(ARGS)

test-ascend: env  ## the Ascend kernels through triton-ascend's passes, in an environment of their own, without a device
	@# 75: the environment cannot be had here, and the script has said why.
	@$(PY) tools/setup_ascend.py $(VENV)-ascend && PY=$(VENV)-ascend/bin/python && \
		env -u TRITON_INTERPRET $$PY $(TESTS) tests/ascend/test_ascend_*.py \
		|| test $$? = 75

test-integrations: env  ## trainers of other packages, the newest of each, in an environment of their own
	@$(PY) tools/setup_integrations.py $(VENV)-integrations
	@# Two versions of Megatron-Core, the newest and an old one. Both run where one fails.
	with_megatron() { env -u TRITON_INTERPRET PYTHONPATH=$(abspath $(VENV)-integrations)/megatron-$$1 \
		$(VENV)-integrations/bin/python $(TESTS) $$2; }; \
		with_megatron newest tests/integrations; first=$$?; \
		with_megatron 0.16.1 "tests/integrations -k megatron"; second=$$?; [ $$second = 0 ] && exit $$first

.PHONY: docs docs-env
docs: docs-env  ## the documentation site, into site/; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "To read it: python3 -m http.server --directory site, then open http://localhost:8000"

docs-env: $(DOCS)/finished  ## mkdocs and its plugins, in an environment of their own

$(DOCS)/finished: requirements-docs.txt
	@if [ -e $(DOCS) ] && [ ! -e $(DOCS)/made-by-make ]; then \
		echo "$(DOCS) was not made by make and is left alone. Add VENV=<another folder> to make." >&2; exit 1; fi
	rm -rf $(DOCS) && mkdir -p $(DOCS) && touch $(DOCS)/made-by-make
	$(BASE) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements-docs.txt
	@touch $@

lint: env  ## formatting, lint, types, workflows
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy xent_ops
	$(PY) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PY) -m check_jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml

format: env  ## mend formatting and what lint can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

release: env  ## sdist and wheels in dist/, each tried in a fresh environment; uploads nothing
	$(PY) tools/release.py dist

clean:  ## remove caches, build products and the private environment
	rm -rf build dist site *.egg-info xent_ops/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis train_lm.png grpo_step.png fp8_head.png
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
	for venv in $(VENV) $(VENV)-ascend $(VENV)-integrations $(DOCS); do if [ -e $$venv/made-by-make ]; then rm -rf $$venv; fi; done
