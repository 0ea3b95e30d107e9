//! The `chiasm` binary as a library, so that its tests can play the same conversations as its demo.
//!
//! | module | contents |
//! |---|---|
//! | `cli` | the command line; `cli::config_file` merges a configuration file into it |
//! | `agent` | `chiasm agent`: this machine's engines, for frontends on any machine |
//! | `agents` | a frontend's side of agents: finding them and connecting their engines |
//! | `key_secret` | the block key secret that several processes share |
//! | `serve` | `chiasm serve`: engines, the frontend, graceful shutdown |
//! | `hub_model` | a model given by its id on the Hugging Face hub |
//! | `download_bar` | the progress of a download from the hub, on a terminal or in the log |
//! | `vllm_command` | the path of the `vllm` program |
//! | `vllm_flags` | vLLM flags that change image tensors or prompts |
//! | `demo` | `chiasm demo`: a demo of about a minute on simulated engines |
//! | `log` | non-blocking log lines on standard error |
//! | `inspect` | an image's identity, layout and tensors for a model |
//! | `doctor` | checks of what serving needs on this machine |
//! | `completions` | shell completions |
//! | `config_command` | `chiasm config`: checks and shows configuration files |
//! | `engines` | engines that outlive their frontends |
//! | `sim_engine` | one simulated engine as a process |
//! | `state_folder` | the folder for state that outlives a frontend |
//! | `simulate` | routing policies on a modelled fleet |
//! | `dynamo` | Dynamo's workers as workers of a frontend |
//! | `vllm_processor` | the settings of vLLM's own processor |
//! | `lora` | LoRA adapters: their files, and the engine flags that they need |
//! | `nixl` | starts NIXL, to lend tensors to agents or to read lent tensors |
//! | `kept_indexes` | the folder for prefix indexes that outlive this process |
//! | `sim_host` | simulated engines inside this process |
//! | `side` | the two kinds of process that start engines |
//! | `signals` | SIGTERM, Ctrl-C and SIGHUP |
//! | `open_files` | the limit of open files |
//! | `free_memory` | the memory that this process may use |
//! | `npy` | NumPy's `.npy` files |
//! | `stdout` | lines on standard output, which may be closed |
//! | `error` | the errors of commands |
//! | [`scenarios`] | the conversations of demo and tests, with their expectations |
#![forbid(unsafe_code)]

mod agent;
mod agents;
mod cli;
mod completions;
mod config_command;
mod demo;
mod doctor;
mod download_bar;
mod dynamo;
mod engines;
mod error;
mod free_memory;
mod hub_model;
mod inspect;
mod kept_indexes;
mod key_secret;
mod log;
mod lora;
mod nixl;
mod npy;
mod open_files;
pub mod scenarios;
mod serve;
mod side;
mod signals;
mod sim_engine;
mod sim_host;
mod simulate;
mod state_folder;
mod stdout;
mod vllm_command;
mod vllm_flags;
mod vllm_processor;

use std::cell::Cell;
use std::io::{self, Write};
use std::process::ExitCode;

use chiasm_backend::unread::UnreadBudget;

use cli::{Cli, Command};
use log::Log;

/// Installs ring as the crypto provider for all TLS in this process.
///
/// Chiasm's own TLS code names its provider; reqwest requires an installed default.
pub fn install_crypto_provider() {
    // Fails only if a provider is installed already, which works as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

thread_local! {
    /// The number of 16 MiB steps of released unread answers when this thread last returned
    /// memory.
    static LAST_RETURN: Cell<u64> = const { Cell::new(0) };
}

/// Calls `return_memory` if the total of released unread answers has crossed a multiple of 16 MiB
/// since this thread's last check. Runs on a thread that is about to park.
fn return_memory_if_due(return_memory: fn()) {
    /// Returning memory takes milliseconds, which pays off from this amount on.
    const STEP_BYTES: u64 = 16 << 20;
    let released_steps = UnreadBudget::global().released() / STEP_BYTES;
    if LAST_RETURN.replace(released_steps) != released_steps {
        return_memory();
    }
}

/// Runs the command line of this process.
///
/// `return_memory` gives back to the system the memory that the calling thread allocated and other
/// threads freed.
pub fn main(return_memory: fn()) -> ExitCode {
    let cli = Cli::parse_or_exit();
    install_crypto_provider();
    // The other commands print their own output, which log lines would clutter.
    // Engines log a lot while they start; their last lines are reported when they fail.
    let filter = if matches!(cli.command, Command::Serve(_) | Command::Agent(_)) {
        "info,vllm=warn"
    } else {
        "warn"
    };
    let log = match Log::to_stderr(filter) {
        Ok(log) => log,
        Err(error) => {
            // Standard error may be closed.
            let _ = writeln!(io::stderr(), "error: can't log to standard error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    // A busy thread polls for ready sockets once per this many tasks. A client that pipelines
    // requests without end makes each task take a millisecond or two.
    builder.event_interval(16);
    builder.on_thread_park(move || return_memory_if_due(return_memory));
    if let Command::Serve(args) | Command::Agent(args) = &cli.command {
        builder.worker_threads(args.limits.async_threads());
        UnreadBudget::global().set_max_bytes(args.limits.max_unread_bytes);
    }
    let runtime = match builder.enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            log.print(&format!("error: can't start the async runtime: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let outcome = runtime.block_on(async {
        match cli.command {
            Command::Serve(args) => serve::run(*args, log.counts()).await,
            Command::Agent(args) => agent::run(*args).await,
            Command::Drain(args) => agents::drain(args).await,
            Command::Probe(args) => agents::probe(args).await,
            Command::Demo(args) => demo::run(args).await,
            Command::Inspect(args) => inspect::run(args).await,
            Command::Doctor(args) => doctor::run(args).await,
            Command::Config(command) => config_command::run(command),
            Command::Completions { shell } => completions::run(shell),
            Command::Man { command } => completions::print_manual(command.as_deref()),
            Command::Engines(args) => engines::run(args).await,
            Command::SimEngine(args) => sim_engine::run(args).await,
            // Nothing else runs in this process.
            Command::Simulate(args) => simulate::run(&args),
        }
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log.print(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}
