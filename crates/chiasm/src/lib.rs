//! The `chiasm` binary as a library, so that its tests can play the same conversations as its demo.
//!
//! | module | is |
//! |---|---|
//! | `cli` | the command line |
//! | `agent` | the engines of this machine, for frontends on any |
//! | `agents` | the engines of agents, for this frontend |
//! | `key_secret` | what block keys of several processes are made with |
//! | `serve` | engines, a frontend before them, an orderly end |
//! | `hub_model` | a model given by its id on the Hugging Face hub |
//! | `download_bar` | how far its download is, on a terminal or in the log |
//! | `vllm_command` | which `vllm` is meant |
//! | `vllm_flags` | flags for vLLM that change what an image becomes |
//! | `demo` | the main job in a minute, on simulated engines |
//! | `log` | lines on standard error that nobody waits for |
//! | `inspect` | what an image means for a model's prompt |
//! | `doctor` | whether this machine has what serving needs |
//! | `completions` | what a shell completes |
//! | `engines` | engines that outlive their frontends |
//! | `sim_engine` | one simulated engine as a process |
//! | `state_folder` | where what is known of engines outlives their frontend |
//! | `simulate` | routing policies on a modelled fleet |
//! | [`scenarios`] | the conversations of demo and tests, and what they must show |
#![forbid(unsafe_code)]

mod agent;
mod agents;
mod cli;
mod completions;
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

use chiasm_backend::unread::Unread;

use cli::{Cli, Command};
use log::Log;

/// Makes ring the cryptography of all TLS in this process. No request of ours needs it, but HTTP
/// clients ask for one.
pub fn use_ring() {
    // Fails only when one was chosen before, and that one does too.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

thread_local! {
    /// The amount of unread answers that had been released when this thread last gave back memory,
    /// in steps of 16 MiB.
    static GAVE_BACK_AT: Cell<u64> = const { Cell::new(0) };
}

/// Calls `give_back` on a thread that is about to wait, once for every 16 MiB of unread answers
/// that were released.
fn give_back_if_due(give_back: fn()) {
    /// The amount that is worth the milliseconds which giving back takes.
    const WORTH_BYTES: u64 = 16 << 20;
    let released = Unread::of_process().released() / WORTH_BYTES;
    if GAVE_BACK_AT.replace(released) != released {
        give_back();
    }
}

/// Runs the command line of this process. `give_back` returns memory to the system that the calling
/// thread has allocated and others have freed.
pub fn main(give_back: fn()) -> ExitCode {
    let cli = Cli::of_this_process();
    use_ring();
    // The demo's own lines are its output; what its parts log would only blur them.
    // Engines say a lot while they start; their last lines are told when they fail.
    let filter = if matches!(cli.command, Command::Serve(_) | Command::Agent(_)) {
        "info,vllm=warn"
    } else {
        "warn"
    };
    let log = match Log::to_stderr(filter) {
        Ok(log) => log,
        Err(error) => {
            // Nobody may be there to read it.
            let _ = writeln!(io::stderr(), "error: can't log to standard error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    // Threads that have work see only between so many tasks whose sockets are ready. Of a client
    // that asks ahead without end each takes a millisecond or two.
    builder.event_interval(16);
    builder.on_thread_park(move || give_back_if_due(give_back));
    if let Command::Serve(args) | Command::Agent(args) = &cli.command {
        builder.worker_threads(args.limits.async_threads());
        Unread::of_process().set_max_bytes(args.limits.max_unread_bytes);
    }
    let runtime = match builder.enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            log.say(&format!("error: can't start the async runtime: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let done = runtime.block_on(async {
        match cli.command {
            Command::Serve(args) => serve::run(*args, log.counts()).await,
            Command::Agent(args) => agent::run(*args).await,
            Command::Drain(args) => agents::drain(args).await,
            Command::Probe(args) => agents::probe(args).await,
            Command::Demo(args) => demo::run(args).await,
            Command::Inspect(args) => inspect::run(args).await,
            Command::Doctor(args) => doctor::run(args).await,
            Command::Completions { shell } => completions::run(shell),
            Command::Engines(args) => engines::run(args).await,
            Command::SimEngine(args) => sim_engine::run(args).await,
            // Nothing else runs in this process.
            Command::Simulate(args) => simulate::run(&args),
        }
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log.say(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}
