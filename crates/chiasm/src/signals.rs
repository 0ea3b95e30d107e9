//! SIGTERM, Ctrl-C and SIGHUP.

use std::io::{self, IsTerminal};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Every Ctrl-C from when it is made.
pub(crate) struct Interrupts(Option<Signal>);

impl Interrupts {
    pub(crate) fn listen() -> Self {
        Self(signal(SignalKind::interrupt()).ok())
    }

    /// Ends with the next Ctrl-C: who asks again at a terminal does not want to wait. A supervisor may send SIGTERM more than once.
    pub(crate) async fn next(&mut self) {
        wait(&mut self.0).await;
    }
}

/// Every SIGHUP from when it is made; none of them ends the process any more.
pub(crate) struct Hangups {
    hangups: Option<Signal>,
    had_terminal: bool,
}

/// The reason for a SIGHUP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hangup {
    /// Somebody has sent it, to have files read again.
    Reload,
    /// The terminal that the process was started at is gone.
    TerminalGone,
}

impl Hangups {
    pub(crate) fn listen() -> Self {
        Self { hangups: signal(SignalKind::hangup()).ok(), had_terminal: has_terminal() }
    }

    pub(crate) async fn next(&mut self) -> Hangup {
        wait(&mut self.hangups).await;
        if self.had_terminal && !has_terminal() { Hangup::TerminalGone } else { Hangup::Reload }
    }
}

/// Waits for the next of these signals, for ever where none can be heard.
async fn wait(signals: &mut Option<Signal>) {
    if let Some(signals) = signals
        && signals.recv().await.is_some()
    {
        return;
    }
    std::future::pending().await
}

/// Returns whether the process stands at a terminal. One that is gone answers with an error.
fn has_terminal() -> bool {
    io::stdin().is_terminal() || io::stdout().is_terminal() || io::stderr().is_terminal()
}

/// Ends when the process is asked to end.
pub(crate) async fn terminated() {
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}
