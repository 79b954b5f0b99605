# Thin front of CMake; README.md explains. Everything lands in build/.
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)
RELEASE := build/release
# The CUDA backend takes minutes to compile: it is built where there is a GPU to run it. CUDA=ON builds it anyway.
CUDA ?= $(if $(wildcard /dev/nvidia0),AUTO,OFF)
WERROR ?= OFF
FIRST := $(if $(wildcard $(RELEASE)/CMakeCache.txt),,yes)
# What was chosen once stays until something else is asked for.
chosen = $(if $(or $(FIRST),$(filter command environment,$(origin $1))),-DLILY_$1=$($1))
# Groups of sources at once make a build from scratch nearly twice as quick; OFF is quicker after a small change.
UNITY ?= ON
# Some tests wait (for servers, downloads, limits of time) while others compute.
TEST_JOBS := $(shell expr $(JOBS) + 1)
SLOW_LABELS := slow|device-metal|device-cuda|model

PREFIX ?= /usr/local

.PHONY: run build install uninstall package test test-all bench format check ci-extra clean

run: build  ## installs what is missing, builds, and lets the bundled model answer a prompt
	$(RELEASE)/lily run -m models/lily-tiny --no-think "What does the word river mean?" </dev/null

build:  ## the program alone: build/release/lily
	@scripts/deps build
	$(if $(FIRST),@cmake --preset release -DLILY_TESTS=OFF -DLILY_EMULATOR=OFF $(call chosen,CUDA) $(call chosen,UNITY))
	$(if $(and $(if $(FIRST),,yes),$(call chosen,CUDA)$(call chosen,UNITY)),@cmake --preset release $(call chosen,CUDA) $(call chosen,UNITY))
	@cmake --build $(RELEASE) -j $(JOBS) --target lily

install:  ## into PREFIX (/usr/local), below DESTDIR if that is set
	@$(MAKE) --no-print-directory build
	@cmake --build $(RELEASE) -j $(JOBS) --target lily_written
	@cmake --install $(RELEASE) --prefix $(PREFIX) --strip

uninstall:  ## what the last install from this folder put there
	@scripts/uninstall $(RELEASE)/installed_files.txt

package:  ## a Debian package in build/
	@$(MAKE) --no-print-directory build
	@cmake --build $(RELEASE) -j $(JOBS) --target lily_written
	@cd build && cpack --config release/CPackConfig.cmake

test: build-tests  ## installs what is missing, builds, and runs every test that needs no special hardware
	@ctest --test-dir $(RELEASE) --output-on-failure -j $(TEST_JOBS) -LE '$(SLOW_LABELS)'

test-all: build-tests  ## the slow tests too, and those of the devices that this machine has
	@cmake --build $(RELEASE) -j $(JOBS) --target lily_slow_tests
	@ctest --test-dir $(RELEASE) --output-on-failure -j $(TEST_JOBS)

.PHONY: build-tests
build-tests:
	@scripts/deps build test
	@cmake --preset release -DLILY_TESTS=ON -DLILY_EMULATOR=ON -DLILY_WERROR=$(WERROR) $(call chosen,CUDA) $(call chosen,UNITY)
	@cmake --build $(RELEASE) -j $(JOBS)

.PHONY: interop
interop: build  ## real clients of the server's APIs; installs them from the Python package index
	@scripts/interop

bench:  ## the kernels' micro-benchmarks
	@scripts/deps build bench
	@cmake --preset release -DLILY_BENCH=ON
	@cmake --build $(RELEASE) -j $(JOBS)

format:
	@scripts/deps check
	@scripts/format

check:  ## format, static analysis of what changed, warnings as errors
	@scripts/deps build test check
	@scripts/check

ci-extra:  ## sanitizers, NEON under qemu, the whole emulated Metal backend, the CUDA compile, installation
	@scripts/deps build test check extra
	@scripts/ci-extra

clean:
	rm -rf build
