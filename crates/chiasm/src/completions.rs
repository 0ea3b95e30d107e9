//! `chiasm completions`: prints completion scripts for shells.

use std::io::{self, Write};

use clap_complete::{Shell, generate};

use crate::cli::Cli;
use crate::error::CliError;

/// Prints the script for this shell. A closed standard output is not an error.
pub(crate) fn run(shell: Shell) -> Result<(), CliError> {
    // Generated into memory first: the generator panics on a closed output.
    let mut script = Vec::new();
    generate(shell, &mut Cli::definition(), "chiasm", &mut script);
    let _ = io::stdout().write_all(&script);
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn each_shell_completes_commands_with_flags() {
        for shell in Shell::value_variants() {
            let mut script = Vec::new();
            generate(*shell, &mut Cli::definition(), "chiasm", &mut script);
            let script = String::from_utf8(script).unwrap();
            for word in ["serve", "doctor", "gpus-per-engine"] {
                assert!(script.contains(word), "{shell} does not complete {word}");
            }
        }
    }
}
