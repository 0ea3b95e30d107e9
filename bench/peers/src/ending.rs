//! The ends of programs: an error that is printed, or a signal.

use std::error::Error;
use std::process::ExitCode;

/// Prints an error, if there is one.
pub fn exit(done: Result<(), Box<dyn Error>>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs `work` on one thread until it or the process is to end. Then `work` is dropped, and what it
/// has started ends.
#[cfg(any(feature = "door", feature = "serve"))]
pub fn run(work: impl Future<Output = Result<(), Box<dyn Error>>>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    exit(runtime.map_err(Into::into).and_then(|runtime| {
        runtime.block_on(async {
            tokio::select! {
                done = work => done,
                signal = ended_by_signal() => signal,
            }
        })
    }))
}

/// Returns when this process is to end.
#[cfg(any(feature = "door", feature = "serve"))]
async fn ended_by_signal() -> Result<(), Box<dyn Error>> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => {}
        pressed = tokio::signal::ctrl_c() => pressed?,
    }
    Err("ended by a signal".into())
}
