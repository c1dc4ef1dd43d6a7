# SPDX-License-Identifier: Apache-2.0
# Thin on purpose: each target is one command that can also be typed.
SHELL := /bin/bash
CACHE := $(or $(LLMFLEET_CACHE),$(HOME)/.cache/llmfleet)
export PATH := $(CACHE)/venv/bin:$(PATH)
.DEFAULT_GOAL := help
.PHONY: help setup lint unit kernels sanity collection molecule fresh test test-full demo demo-down lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install packages, Python environment and wheels (Debian 12, Ubuntu 24.04)
	tools/setup

lint unit kernels sanity collection fresh: ## Run one test stage (the set-up first, where it is missing)
	tools/test --only setup,$@

molecule: ## Run the Molecule scenarios
	tools/test --only setup,molecule-default,molecule-rollout,molecule-numa

test: ## Run everything that continuous integration runs
	tools/test

test-full: ## Everything, the long stages too, going on after a failed one (ARGS=--resume: what has not passed yet)
	tools/test --full --keep-going $(ARGS)

demo: setup ## Build the demo hosts, deploy, ask a question
	tools/demo up

demo-down: ## Remove everything that the demo made
	tools/demo down

lock: ## Resolve requirements/controller.in anew
	tools/lock

clean: ## Remove what tools left in the tree (caches stay in $(CACHE))
	git clean -qfdX
