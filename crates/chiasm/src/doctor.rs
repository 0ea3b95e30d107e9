//! `chiasm doctor`: whether this machine has what `chiasm serve` needs, before anything is started.
//!
//! | module | is |
//! |---|---|
//! | `facts` | what is so on this machine; the only part that looks at it |
//! | `environment` | what is in the Python environment of a `vllm` |
//! | `deadline` | looks that end in time |
//! | `checks` | what each fact means: pure functions |
//! | `finding` | one line of the answer |

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
/// [`CliError::Unhealthy`] if one of them has found a problem.
pub(crate) async fn run(args: DoctorArgs) -> Result<(), CliError> {
    let facts = Facts::gather(&args).await;
    let findings = checks::all(&facts);
    for finding in &findings {
        if args.json {
            line!("{}", finding.as_json());
        } else {
            line!("{}", finding.as_text());
        }
    }
    match findings.iter().filter(|finding| finding.severity == Severity::Problem).count() {
        0 => Ok(()),
        problems => Err(CliError::Unhealthy { problems }),
    }
}
