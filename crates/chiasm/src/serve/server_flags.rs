//! Flags after `--` that configure vLLM's HTTP server, and have no effect on Chiasm's.

use chiasm_engine::EngineError;
use chiasm_engine::launch::ServerFlag;
use chiasm_pipeline::answers::ParserChoice;

use crate::cli::ServeArgs;
use crate::error::CliError;
use crate::side::Side;

/// Warns about each flag that configures only vLLM's HTTP server, with the flag to use instead.
///
/// # Errors
/// [`CliError::Usage`] for a flag whose loss would be dangerous, such as an API key, even if no
/// engine is launched here.
pub(super) fn check(args: &ServeArgs, side: Side) -> Result<(), CliError> {
    for arg in &args.vllm_args {
        let Some(server_flag) = ServerFlag::find(arg) else { continue };
        let flag = flag_name(arg);
        if server_flag.is_refused {
            let error = EngineError::OwnedFlag { flag, instead: server_flag.instead };
            return Err(CliError::Usage(error.to_string()));
        }
        if let Some(instead) = advice(server_flag, args, side) {
            tracing::warn!(
                flag,
                instead,
                "a flag after -- only applies to engines, and Chiasm's server ignores it"
            );
        }
    }
    Ok(())
}

/// Returns the flag without its value, which may be secret.
fn flag_name(arg: &str) -> String {
    arg.split('=').next().unwrap_or_default().to_owned()
}

/// Returns the advice for a flag, or `None` if the user follows it already.
fn advice(flag: &ServerFlag, args: &ServeArgs, side: Side) -> Option<&'static str> {
    const REASONING: &str = "--reasoning-parser";
    if side == Side::Agent {
        // Engines of an agent need the reasoning parser as a flag after `--`.
        return (flag.name != REASONING).then_some(
            "it is a flag of frontends: give it to chiasm serve, if chiasm serve has it",
        );
    }
    let is_followed = match flag.name {
        "--tool-call-parser" => args.answers.tool_call_parser != ParserChoice::Detect,
        REASONING => args.answers.reasoning_parser != ParserChoice::Detect,
        "--served-model-name" => args.served_model_name.is_some(),
        _ => false,
    };
    (!is_followed).then_some(flag.instead)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn serve(flags: &[&str]) -> Box<ServeArgs> {
        let Command::Serve(args) =
            Cli::parse_from([&["chiasm", "serve", "m"], flags].concat()).command
        else {
            panic!("serve")
        };
        args
    }

    #[test]
    fn api_key_after_dashes_is_refused_for_each_engine_kind() {
        for engines in ["--sim=1", "--attach=tcp://a:1", "--engines=1", "--upstream=http://a:1"] {
            let error = check(&serve(&[engines, "--", "--api_key=secret"]), Side::Frontend)
                .unwrap_err()
                .to_string();
            assert!(error.contains("--api_key") && !error.contains("secret"), "{engines}: {error}");
        }
    }

    #[test]
    fn flag_given_before_dashes_needs_no_advice() {
        let advice_for = |flags: &[&str], flag: &str, side| {
            let args = serve(flags);
            check(&args, side).unwrap();
            advice(ServerFlag::find(flag).unwrap(), &args, side)
        };
        let after_dashes = [
            "--",
            "--tool-call-parser",
            "hermes",
            "--reasoning-parser=qwen3",
            "--enable-auto-tool-choice",
        ];
        for flag in ["--tool-call-parser", "--reasoning-parser", "--enable-auto-tool-choice"] {
            assert!(
                advice_for(&after_dashes, flag, Side::Frontend)
                    .is_some_and(|advice| advice.contains("before --")),
                "{flag}"
            );
        }
        let before_dashes = ["--tool-call-parser", "hermes", "--served-model-name", "x"];
        let both = [&before_dashes[..], &after_dashes].concat();
        assert_eq!(advice_for(&both, "--tool-call-parser", Side::Frontend), None);
        assert_eq!(advice_for(&both, "--served-model-name", Side::Frontend), None);
        assert!(advice_for(&both, "--reasoning-parser", Side::Frontend).is_some());
        assert_eq!(advice_for(&after_dashes, "--reasoning-parser", Side::Agent), None);
        assert!(
            advice_for(&after_dashes, "--tool-call-parser", Side::Agent)
                .is_some_and(|advice| advice.contains("chiasm serve"))
        );
    }
}
