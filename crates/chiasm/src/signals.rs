//! SIGTERM and Ctrl-C.

use tokio::signal::unix::{SignalKind, signal};

/// Ends with the next Ctrl-C: who asks again at a terminal does not want to wait. A supervisor may send SIGTERM more than once.
pub(crate) async fn interrupted() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending().await
    }
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
