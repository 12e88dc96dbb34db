# Two commands, each doing all its own set-up: `make train` and `make test`.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python

.PHONY: train test test-slow clean

train: $(VENV)/ready
	$(RUN) examples/pretrain_gpt.py $(ARGS)

test: $(VENV)/ready
	$(RUN) -m pytest -m "not slow and not cuda and not npu" $(ARGS)

test-slow: $(VENV)/ready
	$(RUN) -m pytest $(ARGS)

# Torch first and on its own: with it installed at the pinned version, nothing else can pull another build.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(VENV)/bin/pip install -q --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info
