//! SIGTERM, Ctrl-C and SIGHUP.

use std::io::{self, IsTerminal};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// A listener for Ctrl-C. Catches every one from its creation on.
pub(crate) struct Interrupts(Option<Signal>);

impl Interrupts {
    pub(crate) fn listen() -> Self {
        Self(signal(SignalKind::interrupt()).ok())
    }

    /// Waits for the next Ctrl-C, which cuts a graceful shutdown short. SIGTERM does not count, as
    /// supervisors may repeat it.
    pub(crate) async fn next(&mut self) {
        wait(&mut self.0).await;
    }
}

/// A listener for SIGHUP. Once it is created, SIGHUP does not end the process any more.
pub(crate) struct Hangups {
    hangups: Option<Signal>,
    had_terminal: bool,
}

/// The reason for a SIGHUP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hangup {
    /// A request to read files again, sent by an operator or a program.
    Reload,
    /// The terminal that the process was started at is gone.
    TerminalGone,
}

impl Hangups {
    pub(crate) fn listen() -> Self {
        Self { hangups: signal(SignalKind::hangup()).ok(), had_terminal: has_terminal() }
    }

    /// Waits for the next SIGHUP and returns its reason.
    pub(crate) async fn next(&mut self) -> Hangup {
        wait(&mut self.hangups).await;
        if self.had_terminal && !has_terminal() { Hangup::TerminalGone } else { Hangup::Reload }
    }
}

/// Waits for the next signal, or for ever if there is no listener.
async fn wait(signals: &mut Option<Signal>) {
    if let Some(signals) = signals
        && signals.recv().await.is_some()
    {
        return;
    }
    std::future::pending().await
}

/// Returns `true` if an input or output of the process is a terminal that still exists.
fn has_terminal() -> bool {
    io::stdin().is_terminal() || io::stdout().is_terminal() || io::stderr().is_terminal()
}

/// Waits for SIGTERM or Ctrl-C.
pub(crate) async fn terminated() {
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}
