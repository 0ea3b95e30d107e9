//! Flags behind `--` that would say something to vLLM's server, and say nothing to Chiasm's.

use chiasm_engine::EngineError;
use chiasm_engine::launch::ServerFlag;
use chiasm_pipeline::answers::ParserChoice;

use crate::cli::ServeArgs;
use crate::error::CliError;
use crate::side::Side;

/// Says of each that it changes nothing, and what does.
///
/// # Errors
/// [`CliError::Usage`] names one that somebody may rely on, whoever starts the engines.
pub(super) fn check(args: &ServeArgs, side: Side) -> Result<(), CliError> {
    for (flag, of_server) in
        args.vllm_args.iter().filter_map(|arg| Some((name(arg), ServerFlag::of(arg)?)))
    {
        if of_server.is_refused {
            let error = EngineError::OwnedFlag { flag, instead: of_server.instead };
            return Err(CliError::Usage(error.to_string()));
        }
        if let Some(instead) = instead(of_server, args, side) {
            tracing::warn!(
                flag,
                instead,
                "this flag is behind --, where engines take it and Chiasm's own server does not heed it"
            );
        }
    }
    Ok(())
}

/// The flag without its value, which may be a key.
fn name(arg: &str) -> String {
    arg.split('=').next().unwrap_or_default().to_owned()
}

/// What to do instead; `None` if it was done.
fn instead(flag: &ServerFlag, args: &ServeArgs, side: Side) -> Option<&'static str> {
    const REASONING: &str = "--reasoning-parser";
    if side == Side::Agent {
        // An agent's engines are told where reasoning ends by whoever starts them.
        return (flag.name != REASONING)
            .then_some("it is of frontends: give it to chiasm serve, if that has it");
    }
    let is_told = match flag.name {
        "--tool-call-parser" => args.answers.tool_call_parser != ParserChoice::Detect,
        REASONING => args.answers.reasoning_parser != ParserChoice::Detect,
        "--served-model-name" => args.served_model_name.is_some(),
        _ => false,
    };
    (!is_told).then_some(flag.instead)
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
    fn flags_that_would_be_relied_on_are_refused_whoever_starts_the_engines() {
        for how in ["--sim=1", "--attach=tcp://a:1", "--engines=1", "--upstream=http://a:1"] {
            let error = check(&serve(&[how, "--", "--api_key=secret"]), Side::Frontend)
                .unwrap_err()
                .to_string();
            assert!(error.contains("--api_key") && !error.contains("secret"), "{how}: {error}");
        }
    }

    #[test]
    fn what_is_told_before_is_not_asked_for() {
        let asked = |flags: &[&str], flag: &str, side| {
            let args = serve(flags);
            check(&args, side).unwrap();
            instead(ServerFlag::of(flag).unwrap(), &args, side)
        };
        let behind = [
            "--",
            "--tool-call-parser",
            "hermes",
            "--reasoning-parser=qwen3",
            "--enable-auto-tool-choice",
        ];
        for flag in ["--tool-call-parser", "--reasoning-parser", "--enable-auto-tool-choice"] {
            assert!(
                asked(&behind, flag, Side::Frontend)
                    .is_some_and(|instead| instead.contains("before --")),
                "{flag}"
            );
        }
        let told =
            [&["--tool-call-parser", "hermes", "--served-model-name", "x"][..], &behind].concat();
        assert_eq!(asked(&told, "--tool-call-parser", Side::Frontend), None);
        assert_eq!(asked(&told, "--served-model-name", Side::Frontend), None);
        assert!(asked(&told, "--reasoning-parser", Side::Frontend).is_some());
        assert_eq!(asked(&behind, "--reasoning-parser", Side::Agent), None);
        assert!(
            asked(&behind, "--tool-call-parser", Side::Agent)
                .is_some_and(|instead| instead.contains("chiasm serve"))
        );
    }
}
