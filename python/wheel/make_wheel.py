"""Packs a ``chiasm`` binary and vLLM's plugin as a wheel, by Python's standard library alone.

A wheel is a zip file of known names (PEP 427). pip puts the binary beside the environment's Python and the plugin among its packages, where
vLLM finds it by its entry point. The processor's Python is in the binary already. The wheel's tag says since which glibc
the binary runs (PEP 600): that is read out of the binary, so it is true wherever it was built.
"""

import argparse
import base64
import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = REPOSITORY / "python/chiasm_vllm"
# By the field e_machine of an ELF header.
MACHINES = {0x3E: "x86_64", 0xB7: "aarch64"}
# The libraries that every manylinux system has, of those that a Rust binary may need.
LIBRARIES = re.compile(r"(libc\.so\.6|libm\.so\.6|libdl\.so\.2|librt\.so\.1|libpthread\.so\.0|libgcc_s\.so\.1|ld-linux-[\w-]+\.so\.\d)")
# The newest symbols of libgcc_s that manylinux2014, and so every later policy, has.
NEWEST_GCC = (4, 8)
# PEP 600 begins with glibc 2.5; older numbers are what a binary asks of its first symbols.
OLDEST_GLIBC = (2, 17)


class NotPortable(Exception):
    """The binary does not run on every system that a tag could name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--version", required=True, help="the version of the binary, which the plugin has to have too")
    parser.add_argument("--sbom", type=Path, help="a bill of materials to carry along (PEP 770)")
    parser.add_argument("--notices", type=Path, help="the licences of what is linked into the binary")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the wheel to; its path is printed")
    arguments = parser.parse_args()
    try:
        print(make(arguments.binary, arguments.version, arguments.sbom, arguments.notices, arguments.out))
    except NotPortable as error:
        sys.exit(f"error: {error}")


def make(binary: Path, version: str, sbom: Path | None, notices: Path | None, out: Path) -> Path:
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    plugin_version = re.search(r'__version__ = "(.+)"', (PLUGIN / "chiasm_vllm/__init__.py").read_text())
    if plugin_version is None or plugin_version[1] != version:
        raise NotPortable(f"chiasm is {version} and chiasm_vllm is not: give them the same version")
    tag = f"py3-none-{platform_tag(binary)}"
    info = f"chiasm-{version}.dist-info"
    files = {f"chiasm_vllm/{path.name}": path.read_bytes() for path in sorted((PLUGIN / "chiasm_vllm").glob("*.py"))}
    files[f"chiasm-{version}.data/scripts/chiasm"] = binary.read_bytes()
    files[f"{info}/METADATA"] = metadata(version, project["requires-python"], notices).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: chiasm\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    files[f"{info}/entry_points.txt"] = entry_points(project["entry-points"]).encode()
    files[f"{info}/licenses/LICENSE"] = (REPOSITORY / "LICENSE").read_bytes()
    if notices is not None:
        files[f"{info}/licenses/{notices.name}"] = notices.read_bytes()
    if sbom is not None:
        files[f"{info}/sboms/{sbom.name}"] = sbom.read_bytes()
    files[f"{info}/RECORD"] = record(files, info).encode()
    wheel = out / f"chiasm-{version}-{tag}.whl"
    write(files, wheel)
    return wheel


def metadata(version: str, requires_python: str, notices: Path | None) -> str:
    licences = ["LICENSE"] if notices is None else ["LICENSE", notices.name]
    about = (Path(__file__).parent / "README.md").read_text()
    # No Requires-Dist: frontends of engines elsewhere and simulated engines need no vLLM, and pip must not choose one.
    return (
        f"Metadata-Version: 2.4\nName: chiasm\nVersion: {version}\n"
        "Summary: One fast front door before many multimodal LLM engines\n"
        "License-Expression: Apache-2.0\n"
        + "".join(f"License-File: {name}\n" for name in licences)
        + f"Requires-Python: {requires_python}\nDescription-Content-Type: text/markdown\n\n{about}"
    )


def entry_points(groups: dict[str, dict[str, str]]) -> str:
    lines: list[str] = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in points.items()), ""]
    return "\n".join(lines)


def record(files: dict[str, bytes], info: str) -> str:
    def line(name: str, content: bytes) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        return f"{name},sha256={digest},{len(content)}\n"

    return "".join(line(name, content) for name, content in files.items()) + f"{info}/RECORD,,\n"


def write(files: dict[str, bytes], wheel: Path) -> None:
    """The same files make the same bytes: no time of day is kept."""
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if "/scripts/" in name else 0o100644) << 16
            archive.writestr(entry, content)


def platform_tag(binary: Path) -> str:
    """``manylinux_2_XX_MACHINE``, the oldest glibc that has all symbols that the binary asks for."""
    with binary.open("rb") as file:
        header = file.read(20)
    machine = MACHINES.get(int.from_bytes(header[18:20], "little"))
    if header[:4] != b"\x7fELF" or machine is None:
        raise NotPortable(f"{binary} is no Linux program for {' or '.join(MACHINES.values())}")
    foreign = [name for name in needed(readelf("--dynamic", binary)) if not LIBRARIES.fullmatch(name)]
    if foreign:
        raise NotPortable(f"{binary} needs {', '.join(foreign)}, which not every system has: build it without")
    major, minor = newest_glibc(readelf("--version-info", binary))
    return f"manylinux_{major}_{minor}_{machine}"


def readelf(question: str, binary: Path) -> str:
    command = ["readelf", "--wide", question, str(binary)]
    try:
        return subprocess.run(command, env={"LC_ALL": "C", "PATH": "/usr/local/bin:/usr/bin:/bin"}, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotPortable(f"readelf, of binutils, has to tell which glibc {binary} needs: {error}") from error


def needed(dynamic: str) -> Iterator[str]:
    return (match[1] for match in re.finditer(r"\(NEEDED\).*\[(.+)\]", dynamic))


def newest_glibc(version_info: str) -> tuple[int, int]:
    def numbers(library: str) -> list[tuple[int, ...]]:
        # Symbols that the binary defines have no `Name:` before the version they need.
        found = re.findall(rf"Name: {library}_([\d.]+)\s", version_info)
        return [tuple(int(part) for part in version.split("."))[:2] for version in found]

    if max(numbers("GCC"), default=(0, 0)) > NEWEST_GCC:
        raise NotPortable(f"the binary needs symbols of libgcc_s newer than GCC_{'.'.join(map(str, NEWEST_GCC))}")
    major, minor = max([*numbers("GLIBC"), OLDEST_GLIBC])
    return major, minor


if __name__ == "__main__":
    main()
