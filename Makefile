# Targets and nothing else: every recipe is one call. `make help` lists them.
#
# Without PYTHON= a virtual environment (.venv) is made and filled as needed;
# with PYTHON=python3 that interpreter is used as it is.

ifdef PYTHON
RUN := $(PYTHON)
SETUP := $(PYTHON) -m scripts.setup --as-it-is
else
RUN := .venv/bin/python
SETUP := python3 -m scripts.setup
endif

.PHONY: all help setup-base setup-main setup-dev menuconfig savedefconfig olddefconfig \
        data run report control memory check clean mrproper
.DEFAULT_GOAL := all

all: setup-main  ## Set up what is missing, run what is missing, resume what was cut off, report
	@$(RUN) -m scripts.study

help:  ## This list, and the defconfigs
	@$(or $(PYTHON),python3) -m scripts.help

defconfig-%: setup-base  ## defconfig-NAME[+FRAGMENT...] [CONFIG_X=v ...]: write .config
	@$(RUN) -m scripts.kconfig defconfig '$*'

menuconfig: setup-base  ## Edit .config in menus
	@$(RUN) -m scripts.kconfig menuconfig

savedefconfig: setup-base  ## Write what differs from the defaults to ./defconfig
	@$(RUN) -m scripts.kconfig savedefconfig

olddefconfig: setup-base  ## Bring .config up to date with the Kconfig files
	@$(RUN) -m scripts.kconfig olddefconfig

data: setup-main  ## Prepare the data that .config names
	@$(RUN) -m scripts.data

run: setup-main  ## Run what is missing, without the set-up of data by name (same as make)
	@$(RUN) -m scripts.study

report: setup-main  ## Rebuild the report of the study from its records
	@$(RUN) -m scripts.report

control: setup-main  ## The equivalence control: B and RAALL from swapped initial weights
	@$(RUN) -m scripts.control

memory: setup-main  ## Peak memory of each variant [TARGET="a100-40g w7900"] [VARIANTS="B RALEARN"]: predicted, and measured here
	@$(RUN) -m scripts.memory --target '$(TARGET)' --variants '$(VARIANTS)'

check: setup-dev  ## The tests, the linter and the type checker
	@$(RUN) -m scripts.check

clean:  ## Remove caches and prepared data; results and .venv stay
	@$(or $(PYTHON),python3) -m scripts.clean caches data

mrproper:  ## Remove .config and .venv as well; results stay unless RESULTS=yes
	@$(or $(PYTHON),python3) -m scripts.clean caches data config venv $(if $(filter yes,$(RESULTS)),results)

setup-base setup-main setup-dev: setup-%:
	@$(SETUP) $*
