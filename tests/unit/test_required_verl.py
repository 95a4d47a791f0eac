"""REQUIRED_VERL.txt, the one place that pins verl, against what is installed, the lock files and the other files."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def read_keys(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split("=", 1) for line in lines]
    assert len({key for key, _ in pairs}) == len(pairs), "a key stands twice"
    return dict(pairs)


def read_lock(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / "cpu" / name).read_text().splitlines() if line and not line.startswith("#")]
    pins = [re.fullmatch(r"([\w.-]+)==(\S+)", line) for line in lines]
    assert None not in pins, f"{name}: a line is not name==version"
    return {canonical(pin[1]): pin[2] for pin in pins}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


KEYS = read_keys(ROOT / "REQUIRED_VERL.txt")
TESTED_CPU = KEYS["TESTED_CPU"].split()
TESTED_ENVIRONMENT_SERVER = KEYS["TESTED_ENVIRONMENT_SERVER"].split()


def test_the_keys_of_verls_recipes_are_there():
    assert KEYS["MODE"] == "pinned_release"
    assert {"UPSTREAM", "VERL_RELEASE", "PIP_INSTALL", "CONTAINER_IMAGE", "IMAGE_PIP_INSTALL"} <= set(KEYS)


@pytest.mark.parametrize("key", ["PIP_INSTALL", "IMAGE_PIP_INSTALL", "TESTED_CPU"])
def test_every_line_names_the_same_release_of_verl(key):
    release = KEYS["VERL_RELEASE"]
    assert re.findall(r"verl(?:\[\w+\])?(==[\w.]+)", KEYS[key]) == [release.removeprefix("verl")]


def test_the_install_line_asks_for_what_this_release_of_verl_declares():
    extra = {
        Requirement(line).name: str(Requirement(line).specifier)
        for line in metadata.requires("verl")
        if "extra == 'vllm'" in line or 'extra == "vllm"' in line
    }
    comment = next(line for line in (ROOT / "REQUIRED_VERL.txt").read_text().splitlines() if "# vllm==" in line)
    named = [Requirement(text) for text in re.findall(r"\w+==[\d.]*\d", comment)]
    assert [requirement.name for requirement in named] == ["vllm", "torch", "transformers"]
    for requirement in named:
        assert extra[requirement.name] == str(requirement.specifier)


@pytest.mark.parametrize("pin", TESTED_CPU)
def test_the_tested_version_is_installed(pin):
    name, version = pin.split("==")
    assert metadata.version(name).removesuffix("+cpu") == version


@pytest.mark.parametrize(
    ("pin", "lock"),
    [(pin, "requirements-verl.lock") for pin in TESTED_CPU]
    + [(pin, "requirements-gym.lock") for pin in TESTED_ENVIRONMENT_SERVER],
)
def test_the_tested_version_is_locked(pin, lock):
    name, version = pin.split("==")
    assert read_lock(lock)[canonical(name)] == version


@pytest.mark.parametrize("package", ["torchvision", "torchaudio", "torchcodec"])
def test_packages_that_break_transformers_are_neither_locked_nor_installed(package):
    assert package not in read_lock("requirements-verl.lock")
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version(package)


def test_what_verl_needs_is_locked_in_versions_that_it_accepts():
    lock = read_lock("requirements-verl.lock")
    needed = [Requirement(line) for line in metadata.requires("verl")]
    for requirement in needed:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            assert lock[canonical(requirement.name)] in requirement.specifier, f"{requirement}"


def test_no_other_file_pins_verl():
    files = [path for pattern in ("*.md", "*.toml", "*.sh", "*.txt", "Makefile") for path in ROOT.glob(pattern)]
    files += [ROOT / "cpu/setup.sh", *ROOT.glob("configs/**/*.yaml")]
    pinning = [path.name for path in files if re.search(r"\bverl(\[\w+\])?==\d", path.read_text())]
    assert pinning == ["REQUIRED_VERL.txt"]
