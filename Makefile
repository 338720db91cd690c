# Every recipe is one command. `make help` lists the targets.
#
# Without PYTHON=, make creates a virtual environment (.venv) and installs packages as needed.
# With PYTHON=python3, make uses that interpreter and installs nothing.

# `make attention RUN=...` names runs; from here on RUN is the interpreter, whatever the command line says.
RUNS_NAMED := $(RUN)
ifdef PYTHON
override RUN := $(PYTHON)
SETUP := $(PYTHON) -m scripts.dev.setup --as-it-is
else
override RUN := .venv/bin/python
SETUP := python3 -m scripts.dev.setup
endif

.PHONY: all help setup-base setup-core setup-main setup-tools setup-dev menuconfig savedefconfig olddefconfig \
        data run extend report compare attention control memory bench check faults clean mrproper
.DEFAULT_GOAL := all

all: setup-main  ## Install missing packages, run or resume the study's runs, write the report
	@$(RUN) -m scripts.study

help:  ## List the targets and the defconfigs
	@$(or $(PYTHON),python3) -m scripts.dev.help

defconfig-%: setup-base  ## Write .config [defconfig-NAME+FRAGMENT] [CONFIG_X=value ...]
	@$(RUN) -m scripts.kconfig defconfig '$*'

menuconfig: setup-base  ## Edit .config in menus
	@$(RUN) -m scripts.kconfig menuconfig

savedefconfig: setup-base  ## Write the settings that differ from the defaults to ./defconfig
	@$(RUN) -m scripts.kconfig savedefconfig

olddefconfig: setup-base  ## Update .config to the Kconfig files
	@$(RUN) -m scripts.kconfig olddefconfig

data: setup-main  ## Prepare and check the data that .config names
	@$(RUN) -m scripts.data

run: setup-main  ## The same as make
	@$(RUN) -m scripts.study

extend: setup-main  ## FACTOR=2: plan the finished runs that much longer (CONFIG_SCHEDULE_WSD); UNDO=1: restore them
	@$(RUN) -m scripts.extend $(if $(FACTOR),'$(FACTOR)') $(if $(UNDO),--undo '$(UNDO)')

report: setup-core  ## Rebuild the report from the records [STUDY=results/x; without it the study of .config]
	@$(RUN) -m scripts.report $(if $(STUDY),'$(STUDY)')

compare: setup-core  ## STUDIES="results/a results/b" [OUT=folder]: two or more studies side by side
	@$(RUN) -m scripts.compare $(STUDIES) $(if $(OUT),--out '$(OUT)')

attention: setup-core  ## RUN=results/x/runs/B0 [TEXT=file] [LAYERS="0 3"] [HEADS="0"]: attention maps of runs
	@$(RUN) -m scripts.attention $(RUNS_NAMED) $(if $(TEXT),--text '$(TEXT)') --layers '$(LAYERS)' --heads '$(HEADS)'

control: setup-main  ## Check that B and the reciprocal patterns are one function class (two minutes on a CPU)
	@$(RUN) -m scripts.control

# Switches of earlier versions, set on the command line: the error names what replaced them.
OLD_SWITCHES := GROWTH FIRST_STEP CORPUS EVALUATION PRODUCTS PROFILE CURVES HEAD
OLD_SWITCHES := $(strip $(foreach name,$(OLD_SWITCHES),$(if $(filter command,$(origin $(name))),$(name))))
ifneq (,$(and $(filter bench,$(MAKECMDGOALS)),$(OLD_SWITCHES)))
$(error make bench takes no $(OLD_SWITCHES:%=%=); fix: make bench \
    SUITE=growth|evaluation|profile|loss_parity|startup|corpus|records)
endif
bench: setup-tools  ## Speed and memory; or SUITE=growth|evaluation|profile|loss_parity|startup|corpus|records
	@$(RUN) -m scripts.bench $(if $(SUITE),--suite '$(SUITE)') $(if $(SHAPE),--shape '$(SHAPE)') \
	    $(if $(ROUNDS),--rounds '$(ROUNDS)') $(if $(SECONDS),--seconds '$(SECONDS)') $(if $(CASES),--cases '$(CASES)')

memory: setup-core  ## Peak memory of each variant [TARGET="a100-40g w7900" [FROM=.config] [CONFIG_X=v]] [VARIANTS=]
	@$(RUN) -m scripts.memory --target '$(TARGET)' --from '$(FROM)' --variants '$(VARIANTS)'

check: setup-dev  ## Run the tests, the linter and the type checker
	@$(RUN) -m scripts.dev.check

faults: setup-dev  ## Kill, starve and corrupt a small study and report the outcomes (half an hour)
	@$(RUN) -m tests.faults

clean:  ## Remove caches and prepared data, not results and .venv
	@$(or $(PYTHON),python3) -m scripts.dev.clean caches data

mrproper:  ## Remove .config and .venv as well [RESULTS=yes: and results]
	@$(or $(PYTHON),python3) -m scripts.dev.clean caches data config venv $(if $(filter yes,$(RESULTS)),results)

setup-base setup-core setup-main setup-tools setup-dev: setup-%:
	@$(SETUP) $*
