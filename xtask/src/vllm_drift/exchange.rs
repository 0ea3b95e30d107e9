//! Messages to and from a version's own types: our half is the test `vllm_exchange`, theirs
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

/// What `exchange.py` ends with if this vLLM can't be imported.
const CANNOT_IMPORT: i32 = 3;

/// How an exchange went.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Exchange {
    /// Every message was read as it was meant.
    Same,
    /// Messages were read in another sense, or not at all: what the two halves said.
    Wrong(String),
    /// Its types could not be imported, for this reason: nothing is known.
    NotDone(String),
}

impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Same => {
                write!(f, "the wire: its own types read our requests, and we read what they write")
            }
            Self::Wrong(said) => write!(f, "the wire DIFFERS:\n{said}"),
            Self::NotDone(reason) => {
                write!(
                    f,
                    "the wire: its own types could not be imported: {reason}; the wire was NOT exchanged"
                )
            }
        }
    }
}

/// Our half, by the name of a test in it.
fn ours(setup: &Setup, folder: &Path, test: &str) -> Result<(), Error> {
    let mut half = cargo(&setup.workspace);
    // This is how all tests are built, so dependencies are compiled once.
    half.args(["test", "--quiet", "--workspace", "--test", "vllm_exchange", "--"])
        .args(["--ignored", "--exact", test])
        .env("CHIASM_EXCHANGE_DIR", folder)
        .stdin(Stdio::null());
    child::read(&mut half, test).map(drop)
}

/// Exchanges all kinds of messages. Their frames stay in the cache, for a look at them.
pub(super) fn run(setup: &Setup, env: &VllmEnv, version: &str) -> Result<Exchange, Error> {
    let folder = sources::work_folder(&setup.workspace).join(format!("messages-{version}"));
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(Error::io("remove", &folder))?;
    }
    fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    setup.output.say(&format!("exchanging messages over {}", folder.display()))?;
    ours(setup, &folder, "requests_are_written")?;

    let mut theirs = script(setup, env);
    theirs.arg(format!("{FOLDER}/exchange.py")).arg(&folder);
    let program = theirs.get_program().display().to_string();
    let ended = theirs.output().map_err(|source| Error::Spawn { program, source })?;
    let printed = String::from_utf8_lossy(&ended.stdout).trim_end().to_owned();
    setup.output.say(&printed)?;
    if ended.status.code() == Some(CANNOT_IMPORT) {
        let reason = printed.lines().last().unwrap_or_default().to_owned();
        return Ok(Exchange::NotDone(reason));
    }
    let mut wrong = Vec::new();
    if !ended.status.success() {
        let said = String::from_utf8_lossy(&ended.stderr).trim_end().to_owned();
        wrong.push(format!("exchange.py ended with {}\n{printed}\n{said}", ended.status));
    }
    if folder.join("outputs.json").is_file() {
        // The test says on its standard output what it read otherwise, and cargo fails with it.
        if let Err(error) = ours(setup, &folder, "outputs_are_read") {
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
    fn an_exchange_that_was_not_done_says_so() {
        let text = Exchange::NotDone("ImportError: no _C".into()).to_string();
        assert!(
            text.contains("could not be imported: ImportError: no _C; the wire was NOT exchanged"),
            "{text}"
        );
        assert!(Exchange::Wrong("x".into()).to_string().contains("DIFFERS:\nx"));
    }
}
