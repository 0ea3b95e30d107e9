//! Release artifacts in `target/dist/chiasm-VERSION`: the wheel, the binary, the bill of materials,
//! the licences and the checksums.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cargo::cargo;
use crate::child::{self, Cancel, Output};
use crate::cross::{self, Target};
use crate::error::Error;
use crate::setup::Setup;
use crate::vllm_env;
use crate::vllm_overlay::{self, NEWEST};
use crate::workspace::{VERSION, Workspace};
use crate::{build_profile, models, notices, python, sbom, wheel};

const MAKE_WHEEL: &str = "python/wheel/make_wheel.py";
const SBOM: &str = "chiasm.cdx.json";
const NOTICES: &str = "THIRD-PARTY-LICENSES.txt";
const SUMS: &str = "SHA256SUMS";
/// The maximum size of the wheel. A larger one contains something by mistake.
const MAX_WHEEL_BYTES: u64 = 40_000_000;

/// The cargo profile of the binary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    /// The profile of releases, which takes minutes to build.
    Dist,
    /// The profile of `cargo build --release`, which is usually built already.
    Release,
}

impl Profile {
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        [Self::Dist, Self::Release].into_iter().find(|profile| profile.name() == name)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Dist => "dist",
            Self::Release => "release",
        }
    }

    /// Returns the arguments after `cargo build`. Those of `Release` are the build of README.md.
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Dist => {
                &["--locked", "--profile", "dist", "--package", "chiasm", "--bin", "chiasm"]
            }
            Self::Release => &["--locked", "--release", "--package", "chiasm", "--bin", "chiasm"],
        }
    }
}

/// The paths of the artifacts.
pub(crate) struct Artifacts {
    pub(crate) folder: PathBuf,
    pub(crate) binary: PathBuf,
    pub(crate) wheel: PathBuf,
}

/// Makes all artifacts for `target`, or for this system.
pub(crate) fn run(
    setup: &Setup,
    profile: Profile,
    target: Option<Target>,
) -> Result<Artifacts, Error> {
    let workspace = &setup.workspace;
    let out = workspace.root.join("target/dist").join(format!("chiasm-{VERSION}"));
    // Removes the files of an earlier run.
    if out.exists() {
        fs::remove_dir_all(&out).map_err(Error::io("remove", &out))?;
    }
    fs::create_dir_all(&out).map_err(Error::io("create", &out))?;
    let built = build(setup, profile, target)?;
    let system = target
        .map_or_else(|| build_profile::host(workspace), |target| Ok(target.name().to_owned()))?;
    let binary = out.join(format!("chiasm-{VERSION}-{system}"));
    match target {
        None => strip(&built, &binary)?,
        // The cross build has stripped it already.
        Some(_) => fs::copy(&built, &binary).map(drop).map_err(Error::io("copy", &built))?,
    }
    let bill = out.join(SBOM);
    let sources = sbom::write(workspace, &system, &bill)?;
    let texts = out.join(NOTICES);
    notices::write(&sources, &texts)?;
    let wheel = make_wheel(workspace, &binary, Some((&bill, &texts)), &out)?;
    check_size(&wheel)?;
    write_checksums(&out)?;
    Ok(Artifacts { folder: out, binary, wheel })
}

/// Installs the wheel beside the newest vLLM and serves from there.
pub(crate) fn test(setup: &Setup, wheel: &Path) -> Result<(), Error> {
    let base = vllm_env::ensure(setup)?;
    let models = models::ensure(setup, &base)?;
    let env = vllm_overlay::ensure_version(setup, &base, NEWEST)?;
    let mut tests = wheel::tests_of_wheel(wheel, &setup.workspace, &env, &models)?;
    child::run(&mut tests, "the wheel's tests", &setup.output, &setup.cancel)
}

/// Builds the binary and returns its path.
fn build(setup: &Setup, profile: Profile, target: Option<Target>) -> Result<PathBuf, Error> {
    let mut cargo = match target {
        Some(target) => cross::cargo(setup, target, profile.name())?,
        None => {
            let mut cargo = cargo(&setup.workspace);
            cargo.arg("build");
            cargo
        }
    };
    cargo.args(profile.arguments());
    let mut target_folder = target.map_or("", Target::name).to_owned();
    if target.is_none() && profile == Profile::Dist {
        match build_profile::find(&setup.workspace)? {
            Some(data) => {
                target_folder = build_profile::use_data(&setup.workspace, &mut cargo, &data)?;
                setup
                    .output
                    .print_line(&format!("building with the profile {}", data.display()))?;
            }
            None => setup
                .output
                .print_line("building without a profile: `cargo xtask pgo` records one")?,
        }
    }
    let what = format!("cargo build {}", profile.arguments().join(" "));
    child::run(&mut cargo, &what, &Output::Terminal, &Cancel::default())?;
    let folder =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    Ok(setup.workspace.root.join(folder).join(target_folder).join(profile.name()).join("chiasm"))
}

/// Packs a binary as a wheel in the folder `out` and returns its path. `documents` are the bill of
/// materials and the licences.
pub(crate) fn make_wheel(
    workspace: &Workspace,
    binary: &Path,
    documents: Option<(&Path, &Path)>,
    out: &Path,
) -> Result<PathBuf, Error> {
    let mut python = Command::new(python::find()?);
    python
        .arg("-B")
        .arg(workspace.file(MAKE_WHEEL)?)
        .args(["--version", VERSION, "--binary"])
        .arg(binary);
    python.arg("--out").arg(out);
    if let Some((bill, notices)) = documents {
        python.arg("--sbom").arg(bill).arg("--notices").arg(notices);
    }
    child::read(&mut python, MAKE_WHEEL).map(PathBuf::from)
}

/// Writes the binary without symbols.
fn strip(built: &Path, binary: &Path) -> Result<(), Error> {
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(binary).arg(built);
    child::read(&mut strip, "strip, of binutils").map(drop)
}

fn check_size(wheel: &Path) -> Result<(), Error> {
    let bytes = fs::metadata(wheel).map_err(Error::io("read", wheel))?.len();
    if bytes <= MAX_WHEEL_BYTES {
        Ok(())
    } else {
        Err(Error::TooLarge { path: wheel.to_owned(), bytes, max_bytes: MAX_WHEEL_BYTES })
    }
}

/// Writes the checksums of all files in the folder, in the format of `sha256sum --check`.
fn write_checksums(out: &Path) -> Result<(), Error> {
    let entries = fs::read_dir(out).map_err(Error::io("list", out))?;
    let mut names: Vec<_> =
        entries.flatten().map(|entry| entry.file_name()).filter(|name| name != SUMS).collect();
    names.sort();
    let mut sha256sum = Command::new("sha256sum");
    let sums = child::read(sha256sum.args(names).current_dir(out), "sha256sum")?;
    let path = out.join(SUMS);
    fs::write(&path, sums + "\n").map_err(Error::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_exclude_their_own_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("b"), "b").unwrap();
        fs::write(dir.path().join("a"), "abc").unwrap();
        write_checksums(dir.path()).unwrap();
        let first = fs::read_to_string(dir.path().join(SUMS)).unwrap();
        assert!(
            first.starts_with(
                "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  a\n"
            ),
            "{first}"
        );
        write_checksums(dir.path()).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join(SUMS)).unwrap(), first);
        assert_eq!(first.lines().count(), 2);
    }

    #[test]
    fn wheel_over_size_limit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let wheel = dir.path().join("w.whl");
        let file = fs::File::create(&wheel).unwrap();
        file.set_len(MAX_WHEEL_BYTES).unwrap();
        assert!(check_size(&wheel).is_ok());
        file.set_len(MAX_WHEEL_BYTES + 1).unwrap();
        assert!(check_size(&wheel).unwrap_err().to_string().contains("w.whl"));
    }
}
