//! `chiasm completions` and `chiasm man`: completion scripts for shells, and manual pages.

use std::io::{self, Write};

use clap_complete::{Shell, generate};
use clap_mangen::Man;

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

/// Prints the manual page of a command, or of `chiasm` itself.
pub(crate) fn print_manual(command: Option<&str>) -> Result<(), CliError> {
    let page = manual(command)?;
    let _ = io::stdout().write_all(&page);
    Ok(())
}

/// Returns a manual page in roff.
///
/// # Errors
/// [`CliError::Usage`] if there is no such command.
fn manual(command: Option<&str>) -> Result<Vec<u8>, CliError> {
    let mut definition = Cli::definition();
    definition.build();
    let definition = match command {
        None => definition,
        Some(name) => definition.find_subcommand(name).cloned().ok_or_else(|| {
            CliError::Usage(format!("'{name}' is not a command: see chiasm --help"))
        })?,
    };
    let title = command.map_or_else(|| "chiasm".to_owned(), |name| format!("chiasm-{name}"));
    let mut page = Vec::new();
    Man::new(definition)
        .title(title)
        .source(concat!("chiasm ", env!("CARGO_PKG_VERSION")))
        .render(&mut page)
        .map_err(|error| CliError::Usage(format!("can't write the manual page: {error}")))?;
    Ok(page)
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

    #[test]
    fn manual_page_has_each_flag() {
        let page = String::from_utf8(manual(Some("serve")).unwrap()).unwrap();
        let title = page.lines().find(|line| line.starts_with(".TH chiasm-serve 1")).unwrap();
        assert!(title.contains(concat!("chiasm ", env!("CARGO_PKG_VERSION"))), "{title}");
        for flag in ["gpus\\-per\\-engine", "config", "quarantine"] {
            assert!(page.contains(flag), "{flag} is missing");
        }
        assert!(manual(None).is_ok());
        let error = manual(Some("serv")).unwrap_err().to_string();
        assert!(error.contains("'serv'"), "{error}");
    }
}
