//! The task that keeps a fork server running. Requests never start a server, so a cancelled request
//! never cancels a start.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::greeting::Greeting;
use crate::server::Server;
use crate::{ProcessorError, ProcessorOptions};

/// The maximum pause between two failing starts.
const MAX_PAUSE: Duration = Duration::from_secs(120);

/// The handle of the task, with the current fork server. Dropping it ends the server.
pub(crate) struct Supervisor {
    state: watch::Receiver<State>,
}

enum State {
    Running(Arc<Server>),
    Starting,
    /// Not running; the next start comes after a pause.
    Paused(ProcessorError),
}

impl Supervisor {
    /// Starts a fork server and waits until it is ready. When the server ends or stops answering
    /// forks, the task replaces it in the background.
    pub(crate) async fn start(
        options: &ProcessorOptions,
    ) -> Result<(Self, Greeting), ProcessorError> {
        let started = Instant::now();
        let (server, greeting) = Server::start(options).await?;
        let server = Arc::new(server);
        let (sender, state) = watch::channel(State::Running(server.clone()));
        let options = options.clone();
        let task = RestartTask { options, greeting: greeting.clone(), state: sender };
        tokio::spawn(task.run(server, started));
        Ok((Self { state }, greeting))
    }

    /// Returns the running server. Waits for a start in progress, but not for a pause between
    /// starts.
    pub(crate) async fn running_server(&self) -> Result<Arc<Server>, ProcessorError> {
        let mut state = self.state.clone();
        loop {
            match &*state.borrow_and_update() {
                // The task has not noticed the loss yet.
                State::Running(server) if server.is_lost() => {}
                State::Running(server) => return Ok(server.clone()),
                State::Paused(error) => return Err(error.clone()),
                State::Starting => {}
            }
            let stopped = || ProcessorError::Unavailable("its restart task has ended".to_owned());
            state.changed().await.map_err(|_| stopped())?;
        }
    }
}

/// The task of a [`Supervisor`].
struct RestartTask {
    options: ProcessorOptions,
    /// The greeting of the first server, for which plans were made.
    greeting: Greeting,
    state: watch::Sender<State>,
}

impl RestartTask {
    /// Replaces lost servers until the [`Supervisor`] is dropped.
    async fn run(self, mut server: Arc<Server>, mut started: Instant) {
        loop {
            let reason = tokio::select! {
                () = self.state.closed() => return,
                reason = server.wait_lost() => reason,
            };
            tracing::warn!(reason, "restarting vLLM's processor");
            server = tokio::select! {
                () = self.state.closed() => return,
                server = self.start_replacement(&mut started) => server,
            };
        }
    }

    /// Starts servers until one is ready. The pauses between starts double with each failure, up to
    /// [`MAX_PAUSE`].
    async fn start_replacement(&self, started: &mut Instant) -> Arc<Server> {
        let mut pause = self.options.restart_pause;
        let unavailable = |reason: &str| ProcessorError::Unavailable(reason.to_owned());
        let mut error = unavailable("it has ended and will be restarted soon");
        loop {
            let elapsed = started.elapsed();
            if elapsed < pause {
                self.state.send_replace(State::Paused(error));
                sleep(pause - elapsed).await;
            }
            self.state.send_replace(State::Starting);
            *started = Instant::now();
            error = match Server::start(&self.options).await {
                Ok((server, greeting)) if greeting == self.greeting => {
                    tracing::info!("vLLM's processor was restarted");
                    let server = Arc::new(server);
                    self.state.send_replace(State::Running(server.clone()));
                    return server;
                }
                Ok(_) => unavailable(
                    "the restarted process differs from the first one; restart chiasm serve",
                ),
                // The first start succeeded, so the cause may be temporary. Clients may retry.
                Err(ProcessorError::Unsupported(reason)) => ProcessorError::Unavailable(reason),
                Err(error @ ProcessorError::NoPython { .. }) => {
                    ProcessorError::Unavailable(error.to_string())
                }
                Err(error) => error,
            };
            tracing::warn!(%error, "cannot restart vLLM's processor; trying again after a pause");
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }
}
