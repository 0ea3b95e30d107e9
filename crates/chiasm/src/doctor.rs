//! `chiasm doctor`: checks that this machine has what `chiasm serve` needs, without starting it.
//!
//! | module | contents |
//! |---|---|
//! | `facts` | gathers facts about this machine |
//! | `environment` | inspects the Python environment of a `vllm` |
//! | `deadline` | runs commands and blocking functions with a deadline |
//! | `checks` | judges the facts: pure functions |
//! | `finding` | one line of the output |

mod checks;
mod deadline;
mod environment;
mod facts;
mod finding;

use crate::cli::DoctorArgs;
use crate::error::CliError;
use crate::stdout::line;

use facts::Facts;
use finding::Severity;

/// Prints a line per check.
///
/// # Errors
/// [`CliError::Unhealthy`] if a check finds a problem.
pub(crate) async fn run(args: DoctorArgs) -> Result<(), CliError> {
    let facts = Facts::gather(&args).await;
    let findings = checks::run_all(&facts);
    for finding in &findings {
        if args.json {
            line!("{}", finding.to_json());
        } else {
            line!("{}", finding.to_text());
        }
    }
    match findings.iter().filter(|finding| finding.severity == Severity::Problem).count() {
        0 => Ok(()),
        problems => Err(CliError::Unhealthy { problems }),
    }
}
