//! SIGTERM and Ctrl-C.

use tokio::signal::unix::{SignalKind, signal};

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
