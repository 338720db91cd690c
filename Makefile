# Every recipe is one command. `make help` lists the targets.
#
# Without PYTHON=, make creates a virtual environment (.venv) and installs packages as needed.
# With PYTHON=python3, make uses that interpreter and installs nothing.

# No recipe expands a variable that a user sets, so that no shell interprets it: the commands read the variables of
# the command line from MAKEFLAGS. PYTHON and defconfig's NAME are environment variables of the recipe.
# The variables that each target reads. Its command refuses the others.
READS.admit := VARIANT
READS.attention := RUN TEXT LAYERS HEADS
READS.bench := SUITE SHAPE ROUNDS SECONDS CASES
READS.bisect := RUN AGAINST STEP SYMPTOM OUT
READS.card := OUT CHECKS
READS.check-config := A B OUT
READS.compare := STUDIES OUT
READS.compare-records := A B OUT
READS.diagnose := RUNS OUT
READS.evaluate := RUN PLATFORM MACHINE
READS.export := RUN OUT
READS.lm-eval := RUN TASKS TASK_DATA
READS.logp-diff := RUN THRESHOLD OUT
READS.memory := TARGET FROM VARIANTS
READS.monitor := RUN ON OFF
READS.oracle := RUN STEP RECORD OTHER OUT
READS.pack-run := RUN OUT
READS.plan := SPREAD
READS.record := RUN STEP LEVEL TASK OUT
READS.repeat := RUN STEP TIMES OUT
READS.report := STUDY FORMAT
READS.sample := RUN PROMPT TOKENS COUNT TEMPERATURE TOP_K TOP_P SEED OUT
READS.status := STUDY
READS.stress := MINUTES OUT
READS.transfer := STUDIES PLATFORMS MACHINE OUT
READS.trend := RUNS OUT
READS.verify := STUDY
export override MAKE_GOALS := $(or $(MAKECMDGOALS),all)
ARGUMENTS := $(foreach list,$(filter READS.%,$(.VARIABLES)),$($(list)))
unexport $(ARGUMENTS) $(filter CONFIG_%,$(.VARIABLES))  # make would expand them: a$b to a
unexport PYTHONDONTWRITEBYTECODE  # every process would compile torch again
ifdef PYTHON
export override PYTHON := $(value PYTHON)
# A path with spaces is one word; otherwise words may follow the interpreter, such as -X dev.
override INTERPRETER := $(if $(wildcard $(subst $() ,?,$(PYTHON))),"$$PYTHON",$$PYTHON)
override BARE := $(INTERPRETER)
override FOUND := command -v $(INTERPRETER) > /dev/null || \
  { echo "error: PYTHON=$$PYTHON is not a command; fix: make PYTHON=python3" >&2; exit 1; }
override SETUP := $(FOUND); $(INTERPRETER) -m scripts.dev.setup --as-it-is
else
override INTERPRETER := .venv/bin/python
override BARE := $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
override SETUP := python3 -m scripts.dev.setup
endif

.PHONY: all help setup-base setup-core setup-main setup-exchange setup-lm-eval setup-dev menuconfig savedefconfig \
        olddefconfig demo data run plan report status verify compare diagnose monitor trend record \
        bisect stress repeat compare-records check-config pack-run logp-diff oracle attention sample export \
        lm-eval evaluate transfer admit control memory bench card check faults clean mrproper
.DEFAULT_GOAL := all

all: setup-main  ## Install missing packages, run or resume the study's runs, write the report
	@$(INTERPRETER) -m scripts.study

help: setup-base  ## List the targets and the defconfigs
	@$(INTERPRETER) -m scripts.dev.help

defconfig-%: export DEFCONFIG = $*
defconfig-%: setup-base  ## Write .config [defconfig-NAME+FRAGMENT] [CONFIG_X=value ...]
	@$(INTERPRETER) -m scripts.kconfig defconfig

menuconfig: setup-base  ## Edit .config in menus
	@$(INTERPRETER) -m scripts.kconfig menuconfig

savedefconfig: setup-base  ## Write the settings that differ from the defaults to ./defconfig
	@$(INTERPRETER) -m scripts.kconfig savedefconfig

olddefconfig: setup-base  ## Update .config to the Kconfig files
	@$(INTERPRETER) -m scripts.kconfig olddefconfig

data: setup-main  ## Prepare and check the data that .config names
	@$(INTERPRETER) -m scripts.data

demo: setup-core  ## A study of a tiny model with a known result on the CPU: three minutes, three verdicts
	@$(INTERPRETER) -m scripts.demo

run: setup-main  ## The same as make
	@$(INTERPRETER) -m scripts.study

plan: setup-core  ## [SPREAD=0.5]: hours, disk space, memory and detectable difference of the study of .config
	@$(INTERPRETER) -m scripts.plan

report: setup-core  ## Rebuild the report [STUDY=results/x, else that of .config] [FORMAT=latex: table for a paper]
	@$(INTERPRETER) -m scripts.report

status: setup-core  ## State, progress and host of every run, also while they run [STUDY=results/x]
	@$(INTERPRETER) -m scripts.status

verify: setup-core  ## Check records, side files and checkpoints against their checksums [STUDY=results/x]
	@$(INTERPRETER) -m scripts.verify

compare: setup-core  ## STUDIES="results/a results/b" [OUT=folder]: two or more studies side by side
	@$(INTERPRETER) -m scripts.compare

diagnose: setup-core  ## RUNS="results/a/runs/B0 results/b/runs/B0" [OUT=folder]: why two runs differ, and what is next
	@$(INTERPRETER) -m scripts.diagnose

trend: setup-core  ## RUNS="results/a/runs/B0 [results/b/runs/B0]" [OUT=folder]: monitored tensors over steps
	@$(INTERPRETER) -m scripts.trend

record: setup-core  ## RUN=results/x/runs/B0 STEP=40 [LEVEL=mix] [TASK=statistics] [OUT=]: replay a step and record it
	@$(INTERPRETER) -m scripts.record

monitor: setup-core  ## RUN=results/x/runs/B0 [ON="grad:blocks.3"] [OFF=all]: tables and triggers
	@$(INTERPRETER) -m scripts.monitor

repeat: setup-core  ## RUN=results/x/runs/B0 STEP=40 [TIMES=8] [OUT=]: is the step reproducible, and if not, why
	@$(INTERPRETER) -m scripts.repeat

stress: setup-core  ## MINUTES=10 [OUT=]: golden computations over and over, to find a faulty device
	@$(INTERPRETER) -m scripts.stress

bisect: setup-core  ## RUN=results/x/runs/B0 [AGAINST=results/y/runs/B0] [STEP=40] [SYMPTOM=nan]: find a culprit
	@$(INTERPRETER) -m scripts.bisect

compare-records: export COMPARE_A = $(value A)
compare-records: export COMPARE_B = $(value B)
compare-records: export COMPARE_OUT = $(value OUT)
compare-records: setup-core  ## A=x/step0 B=y/step0 [OUT=folder]: compare two records
	@$(INTERPRETER) -m referee compare

check-config: export CHECK_A = $(value A)
check-config: export CHECK_B = $(value B)
check-config: export CHECK_OUT = $(value OUT)
check-config: setup-core  ## A=a.zip B=b.zip [OUT=folder]: compare the checklists of two machines
	@$(INTERPRETER) -m referee check-config compare

pack-run: setup-core  ## RUN=results/x/runs/B0 [OUT=a.zip]: the checklist of a run as a zip for make check-config
	@$(INTERPRETER) -m scripts.pack_run

logp-diff: setup-core  ## RUN=results/x/runs/B0 [THRESHOLD=0.01] [OUT=]: sample with a KV cache, compare with training
	@$(INTERPRETER) -m scripts.logp_diff

oracle: setup-core  ## RUN=results/x/runs/B0 STEP=40 [OTHER=oracle.json] [OUT=]: operations against float64
	@$(INTERPRETER) -m scripts.oracle

evaluate: setup-core  ## RUN=results/x/runs/B0 PLATFORM="bf16 int4" [MACHINE=w7900]: other arithmetic; RUN=models/gpt2
	@$(INTERPRETER) -m scripts.evaluate

transfer: setup-core  ## [STUDIES=results/a] [PLATFORMS="int4 bf16"] [MACHINE=w7900] [OUT=]: does noise help elsewhere
	@$(INTERPRETER) -m scripts.transfer

attention: setup-core  ## RUN=results/x/runs/B0 [TEXT=file] [LAYERS="0 3"] [HEADS="0"]: attention maps of runs
	@$(INTERPRETER) -m scripts.attention

sample: setup-core  ## RUN=results/x/runs/B0 [PROMPT="if "] [TEMPERATURE=] [TOP_K=] [TOP_P=] [SEED=]: write texts
	@$(INTERPRETER) -m scripts.sample

export: setup-exchange  ## RUN=results/x/runs/B0 [OUT=folder]: a folder that transformers loads (B and fixed patterns)
	@$(INTERPRETER) -m scripts.export

lm-eval: setup-lm-eval  ## RUN="results/x/runs/B0 ..." TASKS="hellaswag piqa" [TASK_DATA=folder]: lm-evaluation-harness
	@$(INTERPRETER) -m scripts.lm_eval

admit: setup-core  ## VARIANT=MINE: examine one attention for leaks and other faults (seconds)
	@$(INTERPRETER) -m scripts.admit

control: setup-main  ## Check that B and the reciprocal patterns are one function class (two minutes on a CPU)
	@$(INTERPRETER) -m scripts.dev.control

bench: setup-core  ## Speed; or SUITE=loss_parity|recorder|monitor (docs/benches.md)
	@$(INTERPRETER) -m scripts.bench

card: setup-core  ## Check this card: speed, kernels, gradients, studies, memory (500 s) [OUT=dir] [CHECKS=second]
	@$(INTERPRETER) -m bench.card

memory: setup-core  ## Peak memory of each variant [TARGET="a100-40g w7900" [FROM=.config] [CONFIG_X=v]] [VARIANTS=]
	@$(INTERPRETER) -m scripts.memory

check: setup-dev  ## Run the tests, the linter and the type checker
	@$(INTERPRETER) -m scripts.dev.check

faults: setup-dev  ## Kill, starve and corrupt a small study and report the outcomes (half an hour)
	@$(INTERPRETER) -m tests.faults

clean:  ## Remove caches and prepared data, not results and .venv
	@$(BARE) -m scripts.dev.clean caches data

mrproper:  ## Remove .config and .venv as well; results and downloads stay
	@$(BARE) -m scripts.dev.clean caches data config venv

setup-base setup-core setup-main setup-exchange setup-lm-eval setup-dev: setup-%:
	@$(SETUP) $*
