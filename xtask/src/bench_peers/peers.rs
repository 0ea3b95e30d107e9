//! The measuring programs in `bench/peers`: built in their own workspace, run with what they need
//! around them.

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

/// The built program of the bench `pixels`.
pub(crate) struct Pixels {
    program: PathBuf,
    /// The folder of libturbojpeg, unless the loader finds the library by itself or there is none.
    libraries: Option<PathBuf>,
}

impl Pixels {
    /// Builds it, and finds it the library that it needs to be exact; says loudly if there is none.
    pub(crate) fn build(setup: &Setup) -> Result<Self, Error> {
        let mut peers = Self { program: build(setup, "pixels")?, libraries: None };
        if !peers.has_libturbojpeg()? {
            match turbojpeg::ensure(setup) {
                Ok(libraries) => peers.libraries = Some(libraries),
                Err(error) => setup.output.say(&format!("no libturbojpeg: {error}"))?,
            }
        }
        if !peers.has_libturbojpeg()? {
            setup.output.say(WITHOUT_LIBTURBOJPEG)?;
        }
        Ok(peers)
    }

    fn has_libturbojpeg(&self) -> Result<bool, Error> {
        let what = "pixels has-libturbojpeg";
        let printed = child::read(self.command().arg("has-libturbojpeg"), what)?;
        printed.parse().map_err(|_| Error::Unreadable { what: what.to_owned(), printed })
    }

    /// The program, with the fastest of Chiasm's kernels.
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
!!!  llm-multimodal FINDS NO libturbojpeg: ITS JPEG PIXELS WILL BE OTHERS, AND ITS TIMES THOSE OF ANOTHER DECODER.
!!!  The rows say so. Install Debian's libturbojpeg0 to measure it as it is meant to run.
!!!";

/// Builds the program of a bench, with the feature of its name and no other; returns where it is.
pub(crate) fn build(setup: &Setup, bench: &str) -> Result<PathBuf, Error> {
    let manifest = setup.workspace.file(MANIFEST)?;
    setup.output.say(&format!("building {MANIFEST}, {bench}"))?;
    // Not --locked: what Chiasm's crates depend on changes with the main lock file, and this one
    // has to follow.
    let mut build = cargo(&setup.workspace);
    build
        .args(["build", "--release", "--bin", bench, "--features", bench, "--manifest-path"])
        .arg(&manifest);
    child::run(&mut build, "cargo build of bench/peers", &setup.output, &setup.cancel)?;
    Ok(built::target_directory(setup, &manifest)?.join("release").join(bench))
}

/// Runs `command` to its end and returns the results that it printed.
pub(crate) fn results<T: DeserializeOwned>(
    command: &mut Command,
    what: &str,
) -> Result<Vec<T>, Error> {
    measured::parse(what, &lines(command, what)?)
}

/// Runs `command` to its end and returns the lines that it printed; what it says beside goes to the
/// terminal.
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
