"""The repository's own files hold together: locks, targets, docs."""

import os
import re
import tomllib
from pathlib import Path

import pytest

from stepwire.cli import main

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MARKDOWN = [path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))]
TARGETS = ["setup", "demo", "test", "test-full", "lint", "protos", "bench", "peers", "gpu-check", "gpu-wheels", "lock"]
TARGETS += ["clean", "help"]


def read(name: str) -> str:
    return (ROOT / name).read_text()


def pins(name: str) -> dict[str, str]:
    """Package and version of every requirement of a lock."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", read(f"requirements/{name}"), re.MULTILINE)
    return {normalised(package): version for package, version in found}


def normalised(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


@pytest.mark.parametrize(("name", "least"), [("lock.txt", 30), ("runtime.txt", 30), ("ray.txt", 10)])
def test_every_locked_package_has_hashes(name: str, least: int) -> None:
    entries = re.split(r"\n(?=[A-Za-z0-9])", read(f"requirements/{name}"))
    assert len(entries) > least
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry.splitlines()[0]


@pytest.mark.parametrize("name", ["lock.txt", "runtime.txt", "ray.txt", "ray.in", "torch.txt", "torch.in"])
def test_no_lock_names_an_index_or_a_path(name: str) -> None:
    lines = [line for line in read(f"requirements/{name}").splitlines() if not line.startswith("#")]
    for line in lines:
        assert not re.search(r"https?://|file:|--(extra-)?index|--trusted|--find-links|(^|\s)/", line), line


def test_the_runtime_lock_is_a_part_of_the_lock() -> None:
    assert pins("runtime.txt").items() < pins("lock.txt").items()


def test_ray_is_kept_out_of_the_lock_and_takes_what_is_there() -> None:
    ray, lock = pins("ray.txt"), pins("lock.txt")
    assert "ray" not in lock
    assert {name: ray[name] for name in ray.keys() & lock.keys()}.items() <= lock.items()


def test_every_declared_dependency_is_locked() -> None:
    project = PYPROJECT["project"]
    names = {
        group: {normalised(re.split(r"[\[<>=!~; ]", text)[0]) for text in texts}
        for group, texts in {"runtime": project["dependencies"], **project["optional-dependencies"]}.items()
    }
    assert names["runtime"] <= set(pins("runtime.txt"))
    assert names["dev"] <= set(pins("lock.txt"))
    assert names["worker"] == {"torch"}
    assert names["ray"] <= set(pins("ray.txt"))


def test_torch_is_pinned_by_version_alone() -> None:
    assert re.search(r"^torch==\d+\.\d+\.\d+$", read("requirements/torch.txt"), re.MULTILINE)
    assert "torch" not in pins("lock.txt")


@pytest.mark.parametrize("target", TARGETS)
def test_the_makefile_has_the_target_and_help_shows_it(target: str) -> None:
    makefile = read("Makefile")
    assert re.search(rf"^{target}:.*## .", makefile, re.MULTILINE)
    assert f".PHONY: {target}\n" in makefile


@pytest.mark.parametrize("path", [".ci/run", "scripts/make_peers.sh", "scripts/test_tools.sh"])
def test_scripts_can_be_run_and_stop_at_errors(path: str) -> None:
    assert os.access(ROOT / path, os.X_OK)
    assert read(path).startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in read(path)


@pytest.mark.parametrize("path", MARKDOWN, ids=str)
def test_links_of_the_docs_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", read(str(path))):
        if "://" not in target:
            assert (ROOT / path.parent / target).exists(), target


@pytest.mark.parametrize("path", MARKDOWN, ids=str)
def test_docs_name_commands_and_targets_that_exist(path: Path) -> None:
    text = read(str(path))
    for command in re.findall(r"(?:^    |`)stepwire ([a-z-]+)", text, re.MULTILINE):
        assert command in main._COMMANDS, command
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE):
        assert target in TARGETS, target


def test_flags_of_the_readme_exist() -> None:
    known = set()
    for path in (ROOT / "stepwire" / "cli").rglob("*.py"):
        known |= set(re.findall(r'"(--[a-z-]+)', path.read_text()))
    from stepwire.cli.generate import generate
    from stepwire.cli.settings_groups import GROUPS

    # Those of sampling are made from a table.
    known |= {flag for parameter in generate.params for flag in parameter.opts}
    known |= {spec.flag for group in GROUPS.values() for spec in group.specs.values()}
    lines = [line for line in read("README.md").splitlines() if "stepwire " in line or "`--" in line]
    flags = {flag for line in lines for flag in re.findall(r"--[a-z][a-z-]+", line)}
    assert flags
    assert flags <= known


def test_every_decision_is_in_the_index() -> None:
    index = read("docs/adr/README.md")
    pages = sorted((ROOT / "docs" / "adr").glob("0*.md"))
    # Numbers are given out before pages are written, so some may be missing; none may be there twice.
    numbers = [page.name[:4] for page in pages]
    assert len(set(numbers)) == len(numbers)
    for page in pages:
        title = page.read_text().splitlines()[0].partition(". ")[2]
        assert f"[{page.name[:4]}]({page.name}) {title}" in index


def test_the_licence_is_the_declared_one() -> None:
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0, January 2004" in read("LICENSE")


def test_hooks_use_the_tools_of_the_environment() -> None:
    entries = re.findall(r"entry: (.+)", read(".pre-commit-config.yaml"))
    assert entries
    assert all(".venv/bin/" in entry for entry in entries)
