//! Exchanges messages with a version's types. Our half is the test `vllm_exchange`, vLLM's half is
//! `python/vllm_drift/exchange.py`.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Stdio;

use super::{FOLDER, script, sources};
use crate::cargo::cargo;
use crate::child;
use crate::error::Error;
use crate::setup::Setup;
use crate::vllm_env::VllmEnv;

/// The exit code of `exchange.py` if vLLM can't be imported.
const CANNOT_IMPORT: i32 = 3;

/// The outcome of an exchange.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Exchange {
    /// Each message was decoded to its intended value.
    Same,
    /// Some messages were decoded to other values or not at all. Has the output of the two halves.
    Wrong(String),
    /// vLLM's types could not be imported, for this reason. The wire was not tested.
    NotDone(String),
}

impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Same => {
                write!(f, "the wire: vLLM's types decode our requests, and ours decode its outputs")
            }
            Self::Wrong(output) => write!(f, "the wire DIFFERS:\n{output}"),
            Self::NotDone(reason) => {
                write!(
                    f,
                    "the wire: vLLM's types could not be imported: {reason}; \
                     the wire was NOT tested"
                )
            }
        }
    }
}

/// Runs a test of our half.
fn run_our_half(setup: &Setup, folder: &Path, test: &str) -> Result<(), Error> {
    let mut half = cargo(&setup.workspace);
    // The same arguments as for other tests, so that dependencies are compiled once.
    half.args(["test", "--quiet", "--workspace", "--test", "vllm_exchange", "--"])
        .args(["--ignored", "--exact", test])
        .env("CHIASM_EXCHANGE_DIR", folder)
        .stdin(Stdio::null());
    child::read(&mut half, test).map(drop)
}

/// Exchanges all kinds of messages. Their frames stay in the cache for inspection.
pub(super) fn run(setup: &Setup, env: &VllmEnv, version: &str) -> Result<Exchange, Error> {
    let folder = sources::work_folder(&setup.workspace).join(format!("messages-{version}"));
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(Error::io("remove", &folder))?;
    }
    fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    setup.output.print_line(&format!("exchanging messages over {}", folder.display()))?;
    run_our_half(setup, &folder, "requests_are_written")?;

    let mut theirs = script(setup, env);
    theirs.arg(format!("{FOLDER}/exchange.py")).arg(&folder);
    let program = theirs.get_program().display().to_string();
    let output = theirs.output().map_err(|source| Error::Spawn { program, source })?;
    let printed = String::from_utf8_lossy(&output.stdout).trim_end().to_owned();
    setup.output.print_line(&printed)?;
    if output.status.code() == Some(CANNOT_IMPORT) {
        let reason = printed.lines().last().unwrap_or_default().to_owned();
        return Ok(Exchange::NotDone(reason));
    }
    let mut wrong = Vec::new();
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
        wrong.push(format!("exchange.py ended with {}\n{printed}\n{stderr}", output.status));
    }
    if folder.join("outputs.json").is_file() {
        // The test prints the differences on its standard output and fails.
        if let Err(error) = run_our_half(setup, &folder, "outputs_are_read") {
            wrong.push(error.to_string());
        }
    } else {
        wrong.push("there are no outputs to read".to_owned());
    }
    Ok(if wrong.is_empty() { Exchange::Same } else { Exchange::Wrong(wrong.join("\n")) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_import_is_reported() {
        let text = Exchange::NotDone("ImportError: no _C".into()).to_string();
        assert!(
            text.contains("could not be imported: ImportError: no _C; the wire was NOT tested"),
            "{text}"
        );
        assert!(Exchange::Wrong("x".into()).to_string().contains("DIFFERS:\nx"));
    }
}
