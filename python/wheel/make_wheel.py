"""Packs a ``chiasm`` binary and the vLLM plugin as a wheel, with Python's standard library only.

A wheel is a zip file with specified names (PEP 427). pip installs the binary beside the
environment's Python and the plugin among its packages, where vLLM finds it by its entry point. The
binary already contains the processor's Python. The wheel's tag names the oldest glibc that the
binary supports (PEP 600). It is read from the binary, so it is correct for every build machine.
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
# The machines by the field e_machine of an ELF header.
MACHINES = {0x3E: "x86_64", 0xB7: "aarch64"}
# The libraries that a Rust binary may need and every manylinux system has.
ALLOWED_LIBRARIES = re.compile(
    r"(libc\.so\.6|libm\.so\.6|libdl\.so\.2|librt\.so\.1|libpthread\.so\.0|libgcc_s\.so\.1"
    r"|ld-linux-[\w-]+\.so\.\d)"
)
# The newest libgcc_s symbols that manylinux2014, and so every later policy, has.
NEWEST_GCC = (4, 8)
# The oldest glibc of a tag. PEP 600 begins with glibc 2.5, but a binary can require symbols with
# older version numbers.
OLDEST_GLIBC = (2, 17)


class NotPortable(Exception):
    """No tag describes the systems on which the binary runs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument(
        "--version", required=True, help="the version of the binary; the plugin must have the same"
    )
    parser.add_argument("--sbom", type=Path, help="a bill of materials to include (PEP 770)")
    parser.add_argument("--notices", type=Path, help="the licences of the binary's dependencies")
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder for the wheel, whose path is printed"
    )
    arguments = parser.parse_args()
    try:
        wheel = make(
            arguments.binary, arguments.version, arguments.sbom, arguments.notices, arguments.out
        )
        print(wheel)
    except NotPortable as error:
        sys.exit(f"error: {error}")


def make(binary: Path, version: str, sbom: Path | None, notices: Path | None, out: Path) -> Path:
    """Writes the wheel to the folder ``out`` and returns its path.

    Raises NotPortable for an unsupported binary, or if the plugin has another version.
    """
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    package = PLUGIN / "chiasm_vllm"
    plugin_version = re.search(r'__version__ = "(.+)"', (package / "__init__.py").read_text())
    if plugin_version is None or plugin_version[1] != version:
        raise NotPortable(f"chiasm is {version} and chiasm_vllm is not: give them the same version")
    tag = f"py3-none-{platform_tag(binary)}"
    info = f"chiasm-{version}.dist-info"
    sources = sorted(package.glob("*.py"))
    files = {f"chiasm_vllm/{path.name}": path.read_bytes() for path in sources}
    files[f"chiasm-{version}.data/scripts/chiasm"] = binary.read_bytes()
    files[f"{info}/METADATA"] = metadata(version, project["requires-python"], notices).encode()
    wheel_lines = f"Wheel-Version: 1.0\nGenerator: chiasm\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files[f"{info}/WHEEL"] = wheel_lines.encode()
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
    license_files = ["LICENSE"] if notices is None else ["LICENSE", notices.name]
    description = (Path(__file__).parent / "README.md").read_text()
    # No Requires-Dist: frontends of engines on other machines and simulated engines need no vLLM,
    # and pip must not choose a version of it.
    return (
        f"Metadata-Version: 2.4\nName: chiasm\nVersion: {version}\n"
        "Summary: One fast front door before many multimodal LLM engines\n"
        "License-Expression: Apache-2.0\n"
        + "".join(f"License-File: {name}\n" for name in license_files)
        + f"Requires-Python: {requires_python}\n"
        + f"Description-Content-Type: text/markdown\n\n{description}"
    )


def entry_points(groups: dict[str, dict[str, str]]) -> str:
    lines: list[str] = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
    return "\n".join(lines)


def record(files: dict[str, bytes], info: str) -> str:
    def record_line(name: str, content: bytes) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        return f"{name},sha256={digest},{len(content)}\n"

    lines = (record_line(name, content) for name, content in files.items())
    return "".join(lines) + f"{info}/RECORD,,\n"


def write(files: dict[str, bytes], wheel: Path) -> None:
    """Writes a zip file without timestamps, so the same files result in the same bytes."""
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if "/scripts/" in name else 0o100644) << 16
            archive.writestr(entry, content)


def platform_tag(binary: Path) -> str:
    """Returns ``manylinux_2_XX_MACHINE`` for the oldest glibc with all required symbols."""
    with binary.open("rb") as file:
        header = file.read(20)
    machine = MACHINES.get(int.from_bytes(header[18:20], "little"))
    if header[:4] != b"\x7fELF" or machine is None:
        raise NotPortable(f"{binary} is no Linux program for {' or '.join(MACHINES.values())}")
    needed = needed_libraries(readelf("--dynamic", binary))
    foreign = [name for name in needed if not ALLOWED_LIBRARIES.fullmatch(name)]
    if foreign:
        raise NotPortable(
            f"{binary} needs {', '.join(foreign)}, which not every system has: build it without"
        )
    major, minor = newest_glibc(readelf("--version-info", binary))
    return f"manylinux_{major}_{minor}_{machine}"


def readelf(option: str, binary: Path) -> str:
    """Returns the output of readelf, without translations."""
    command = ["readelf", "--wide", option, str(binary)]
    environment = {"LC_ALL": "C", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotPortable(
            f"failed to read with readelf (of binutils) which glibc {binary} needs: {error}"
        ) from error
    return done.stdout


def needed_libraries(dynamic: str) -> Iterator[str]:
    return (match[1] for match in re.finditer(r"\(NEEDED\).*\[(.+)\]", dynamic))


def newest_glibc(version_info: str) -> tuple[int, int]:
    def numbers(library: str) -> list[tuple[int, ...]]:
        # Versions of symbols that the binary defines do not follow a `Name:`.
        versions = re.findall(rf"Name: {library}_([\d.]+)\s", version_info)
        return [tuple(int(part) for part in version.split("."))[:2] for version in versions]

    if max(numbers("GCC"), default=(0, 0)) > NEWEST_GCC:
        newest = ".".join(map(str, NEWEST_GCC))
        raise NotPortable(f"the binary needs symbols of libgcc_s newer than GCC_{newest}")
    major, minor = max([*numbers("GLIBC"), OLDEST_GLIBC])
    return major, minor


if __name__ == "__main__":
    main()
