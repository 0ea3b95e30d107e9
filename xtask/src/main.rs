//! Developer commands, run as `cargo xtask COMMAND`: tests, environments with real engines,
//! benchmarks, generated pages and releases.
//!
//! | file | contents |
//! |---|---|
//! | `command_line` | the parser of the command line |
//! | `test_steps`, `test_run`, `test_step_run` | the table of steps of `test`; a run of steps; the execution of one step |
//! | `check` | a short form of `test` for changed crates |
//! | `real_engines` | the setup of real engines in the background |
//! | `debian`, `etcd`, `chromium`, `prometheus`, `nginx` | packages unpacked without root, and their programs for tests and benchmarks |
//! | `vllm_env`, `venv`, `python`, `free_disk` | a Python environment with vLLM for CPU |
//! | `vllm_overlay` | other versions of vLLM over that environment |
//! | `sglang_env` | real SGLang for CPU over that environment |
//! | `manifests` | tests of the manifests in `deploy/kubernetes` against Kubernetes' schemas |
//! | `clients_env` | a Python environment with third-party clients, and recordings of their requests |
//! | `plugin` | the tests and the installation of the vLLM plugin |
//! | `vllm_drift` | changes in a version of vLLM that affect Chiasm |
//! | `versions_page` | `docs/versions.md`: the supported versions of vLLM |
//! | `models_page` | `docs/models.md`: the models of vLLM and how they are served |
//! | `models` | tiny random models |
//! | `structure` | lines per crate, cycles of files and the order of modules, with limits |
//! | `page_links`, `comment_width` | tests of links in the documentation and of the width of comments |
//! | `agent_proto` | the generated code of the agent protocol |
//! | `goldens` | golden files, made again and compared |
//! | `dist`, `sbom`, `notices` | release artifacts, their bill of materials and licences |
//! | `pgo`, `build_profile` | profile-guided optimisation of the binaries of releases |
//! | `cross` | binaries for other systems and for older ones |
//! | `wheel` | tests of the wheel beside a real vLLM |
//! | `soak` | the soak test for any number of minutes |
//! | `bench_peers` | benchmarks against peers |
//! | `keyed_dir` | a cached directory that is complete or absent, also after a crash |
//! | `workspace` | the paths of the repository and the cache |
//! | `setup`, `error`, `outcome` | the context, the errors and the outcomes of commands |
//! | `cargo`, `child` | running cargo and other programs |

#![forbid(unsafe_code)]

mod agent_proto;
mod bench_peers;
mod build_profile;
mod cargo;
mod check;
mod child;
mod chromium;
mod clients_env;
mod command_line;
#[cfg(test)]
mod comment_width;
mod cross;
mod debian;
mod dist;
mod error;
mod etcd;
mod ffmpeg;
mod free_disk;
mod goldens;
mod keyed_dir;
mod manifests;
mod models;
mod models_page;
mod nginx;
mod notices;
mod outcome;
#[cfg(test)]
mod page_links;
mod pgo;
mod plugin;
mod prometheus;
mod python;
mod real_engines;
mod sbom;
mod setup;
mod sglang_env;
mod soak;
mod structure;
mod test_run;
mod test_step_run;
mod test_steps;
mod venv;
mod versions_page;
mod vllm_drift;
mod vllm_env;
mod vllm_overlay;
mod wheel;
mod workspace;

use std::process::ExitCode;

use crate::child::{Cancel, Output};
use crate::command_line::{Command, USAGE};
use crate::error::Error;
use crate::setup::Setup;
use crate::vllm_overlay::NEWEST;
use crate::workspace::Workspace;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match command_line::parse(&arguments).and_then(|command| run(command, &arguments)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the same command in the release build of xtask.
fn rerun_in_release(setup: &Setup, arguments: &[String]) -> Result<ExitCode, Error> {
    let mut cargo = cargo::cargo(&setup.workspace);
    cargo.args(["run", "--quiet", "--release", "--package", "xtask", "--"]).args(arguments);
    let status =
        cargo.status().map_err(|source| Error::Spawn { program: "cargo".to_owned(), source })?;
    Ok(exit_code(status.success()))
}

fn exit_code(passed: bool) -> ExitCode {
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(command: Command, arguments: &[String]) -> Result<ExitCode, Error> {
    let setup = || -> Result<Setup, Error> {
        Ok(Setup {
            workspace: Workspace::find()?,
            output: Output::Terminal,
            cancel: Cancel::default(),
        })
    };
    match command {
        Command::Help => print!("{USAGE}"),
        Command::VllmEnv { version } => {
            let setup = setup()?;
            let base = vllm_env::ensure(&setup)?;
            let env = vllm_overlay::ensure_version(&setup, &base, version)?;
            let mut current = vllm_overlay::paths(&setup.workspace)?;
            current.push(base.path().to_owned());
            vllm_env::print_unused(&setup, &current);
            println!("{}", env.path().display());
        }
        Command::SglangEnv { version } => {
            let setup = setup()?;
            let base = vllm_env::ensure(&setup)?;
            let env = sglang_env::ensure(&setup, &base, version)?;
            println!("{}", env.path().display());
        }
        Command::ClientsEnv => println!("{}", clients_env::ensure(&setup()?)?.path().display()),
        Command::RecordClients => {
            let setup = setup()?;
            let clients = clients_env::ensure(&setup)?;
            let base = vllm_env::ensure(&setup)?;
            let vllm = vllm_overlay::ensure_version(&setup, &base, NEWEST)?;
            clients_env::record(&setup, &clients, &vllm)?;
        }
        Command::Models => {
            let setup = setup()?;
            let env = vllm_env::ensure(&setup)?;
            println!("{}", models::ensure(&setup, &env)?.display());
        }
        Command::Goldens { version } => {
            let setup = setup()?;
            let base = vllm_env::ensure(&setup)?;
            let models = models::ensure(&setup, &base)?;
            let env = vllm_overlay::ensure_version(&setup, &base, version)?;
            match version {
                NEWEST => goldens::remake(&setup, &env, &models)?,
                _ => goldens::compare(&setup, &env, &models)?,
            }
        }
        // An unoptimized build generates load too slowly for measurements.
        Command::BenchPeers { .. } | Command::Pgo if cfg!(debug_assertions) => {
            return rerun_in_release(&setup()?, arguments);
        }
        Command::BenchPeers { bench, rounds, json, sides } => {
            bench_peers::run(&setup()?, bench, rounds, json, &sides)?
        }
        Command::VllmDrift { version, write } => {
            return vllm_drift::run(&setup()?, &version, write).map(exit_code);
        }
        Command::Pgo => println!("{}", pgo::make(&setup()?)?.display()),
        Command::Dist { profile, target, test } => {
            let setup = setup()?;
            let artifacts = dist::run(&setup, profile, target)?;
            match target {
                Some(target) if test => cross::test(&setup, target, &artifacts.binary)?,
                None if test => dist::test(&setup, &artifacts.wheel)?,
                _ => {}
            }
            println!("{}", artifacts.folder.display());
        }
        Command::AgentProto => agent_proto::run(&setup()?)?,
        Command::ModelsPage => models_page::run(&setup()?)?,
        Command::VersionsPage => versions_page::write_page(&Workspace::find()?)?,
        Command::Soak { minutes, seed } => soak::run(&setup()?, minutes, seed)?,
        Command::Test(options) => {
            return test_run::run(&Workspace::find()?, &options).map(exit_code);
        }
        Command::Structure { name: Some(name) } => {
            print!("{}", structure::describe(&Workspace::find()?.root, &name)?);
        }
        Command::Structure { name: None } => {
            let report = structure::measure(&Workspace::find()?.root)?;
            print!("{}", report.text);
            for problem in &report.problems {
                println!("LIMIT: {problem}");
            }
            return Ok(exit_code(report.problems.is_empty()));
        }
        Command::Check => check::run(&setup()?)?,
    }
    Ok(ExitCode::SUCCESS)
}
