//! Builds and runs the measuring programs in `bench/peers`, which is a workspace of its own.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde::de::DeserializeOwned;

use crate::bench_peers::{built, measured, turbojpeg};
use crate::cargo::cargo;
use crate::child;
use crate::error::Error;
use crate::setup::Setup;

const MANIFEST: &str = "bench/peers/Cargo.toml";

/// The built program of the benchmark `pixels`.
pub(crate) struct Pixels {
    program: PathBuf,
    /// The folder of libturbojpeg; `None` if the loader finds the library by itself or it is
    /// missing.
    libraries: Option<PathBuf>,
}

impl Pixels {
    /// Builds the program and finds libturbojpeg, which the peer needs for exact pixels. Prints a
    /// warning if the library is missing.
    pub(crate) fn build(setup: &Setup) -> Result<Self, Error> {
        let mut peers = Self { program: build(setup, "pixels")?, libraries: None };
        if !peers.has_libturbojpeg()? {
            match turbojpeg::ensure(setup) {
                Ok(libraries) => peers.libraries = Some(libraries),
                Err(error) => setup.output.print_line(&format!("no libturbojpeg: {error}"))?,
            }
        }
        if !peers.has_libturbojpeg()? {
            setup.output.print_line(WITHOUT_LIBTURBOJPEG)?;
        }
        Ok(peers)
    }

    fn has_libturbojpeg(&self) -> Result<bool, Error> {
        let what = "pixels has-libturbojpeg";
        let printed = child::read(self.command().arg("has-libturbojpeg"), what)?;
        printed.parse().map_err(|_| Error::Unreadable { what: what.to_owned(), printed })
    }

    /// Returns a command that runs the program with Chiasm's fastest kernels.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env_remove("CHIASM_KERNELS").stdin(Stdio::null());
        if let Some(libraries) = &self.libraries {
            command.env("LD_LIBRARY_PATH", libraries);
        }
        command
    }
}

const WITHOUT_LIBTURBOJPEG: &str = "\
!!!
!!!  llm-multimodal FINDS NO libturbojpeg: ITS JPEG PIXELS WILL BE OTHERS, \
AND ITS TIMES THOSE OF ANOTHER DECODER.
!!!  The rows say so. Install Debian's libturbojpeg0 to measure it as it is meant to run.
!!!";

/// Builds the program of a benchmark with the feature of the same name only, and returns its path.
pub(crate) fn build(setup: &Setup, bench: &str) -> Result<PathBuf, Error> {
    let manifest = setup.workspace.file(MANIFEST)?;
    setup.output.print_line(&format!("building {MANIFEST}, {bench}"))?;
    // Without --locked: the dependencies of Chiasm's crates change with the main lock file, and
    // this lock file has to follow.
    let mut build = cargo(&setup.workspace);
    build
        .args(["build", "--release", "--bin", bench, "--features", bench, "--manifest-path"])
        .arg(&manifest);
    child::run(&mut build, "cargo build of bench/peers", &setup.output, &setup.cancel)?;
    Ok(built::target_directory(setup, &manifest)?.join("release").join(bench))
}

/// Runs `command` to its end and parses the results that it prints.
pub(crate) fn results<T: DeserializeOwned>(
    command: &mut Command,
    what: &str,
) -> Result<Vec<T>, Error> {
    measured::parse(what, &lines(command, what)?)
}

/// Runs `command` to its end and returns the lines of its standard output. Its standard error goes
/// to the terminal.
pub(crate) fn lines(command: &mut Command, what: &str) -> Result<Vec<String>, Error> {
    let spawn = command.stdout(Stdio::piped()).spawn();
    let mut child = spawn.map_err(|source| Error::Spawn {
        program: command.get_program().display().to_string(),
        source,
    })?;
    let output = child.stdout.take().map(BufReader::new);
    let lines: Result<Vec<String>, _> = output.into_iter().flat_map(BufReader::lines).collect();
    let status = child.wait().map_err(Error::io("wait for", what))?;
    if !status.success() {
        return Err(Error::Failed { what: what.to_owned(), status, log: String::new() });
    }
    lines.map_err(Error::io("read the output of", what))
}
