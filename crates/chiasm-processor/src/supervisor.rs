//! The task that keeps a fork server running. Requests start none, and a cancelled request cancels
//! no start.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::message::Greeting;
use crate::server::Server;
use crate::{ProcessorError, ProcessorOptions};

/// The longest pause between two starts that fail.
const MAX_PAUSE: Duration = Duration::from_secs(120);

/// The handle of the task, with the fork server that runs now. Dropping it ends the server.
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
    /// Starts a fork server and waits until it is ready. It is replaced in the background when it
    /// ends or forks no children any more.
    pub(crate) async fn start(
        options: &ProcessorOptions,
    ) -> Result<(Self, Greeting), ProcessorError> {
        let started = Instant::now();
        let (server, greeting) = Server::start(options).await?;
        let server = Arc::new(server);
        let (sender, state) = watch::channel(State::Running(server.clone()));
        let options = options.clone();
        let restarts = Restarts { options, greeting: greeting.clone(), state: sender };
        tokio::spawn(restarts.run(server, started));
        Ok((Self { state }, greeting))
    }

    /// Returns the running server. Waits for a start that is under way, and for nothing else.
    pub(crate) async fn server(&self) -> Result<Arc<Server>, ProcessorError> {
        let mut state = self.state.clone();
        loop {
            match &*state.borrow_and_update() {
                // The task has not noticed yet.
                State::Running(server) if server.is_lost() => {}
                State::Running(server) => return Ok(server.clone()),
                State::Paused(error) => return Err(error.clone()),
                State::Starting => {}
            }
            let stopped = || ProcessorError::Gone("it is not started again".to_owned());
            state.changed().await.map_err(|_| stopped())?;
        }
    }
}

/// The other end of a [`Supervisor`].
struct Restarts {
    options: ProcessorOptions,
    /// The greeting of the first server. Plans were made for it.
    greeting: Greeting,
    state: watch::Sender<State>,
}

impl Restarts {
    async fn run(self, mut server: Arc<Server>, mut started: Instant) {
        loop {
            let reason = tokio::select! {
                () = self.state.closed() => return,
                reason = server.lost() => reason,
            };
            tracing::warn!(reason, "vLLM's processor is started again");
            server = tokio::select! {
                () = self.state.closed() => return,
                server = self.replacement(&mut started) => server,
            };
        }
    }

    /// Starts servers until one is ready. Pauses grow with the number of failures.
    async fn replacement(&self, started: &mut Instant) -> Arc<Server> {
        let mut pause = self.options.restart_pause;
        let gone = |reason: &str| ProcessorError::Gone(reason.to_owned());
        let mut reason = gone("it ended a moment ago, and is started again soon");
        loop {
            let since = started.elapsed();
            if since < pause {
                self.state.send_replace(State::Paused(reason));
                sleep(pause - since).await;
            }
            self.state.send_replace(State::Starting);
            *started = Instant::now();
            reason = match Server::start(&self.options).await {
                Ok((server, greeting)) if greeting == self.greeting => {
                    tracing::info!("vLLM's processor is there again");
                    let server = Arc::new(server);
                    self.state.send_replace(State::Running(server.clone()));
                    return server;
                }
                Ok(_) => gone("it is another one than at the start; start chiasm serve again"),
                // The first start has succeeded, so the reason may pass: clients may try again.
                Err(ProcessorError::NotServed(reason)) => ProcessorError::Gone(reason),
                Err(error @ ProcessorError::NoPython { .. }) => {
                    ProcessorError::Gone(error.to_string())
                }
                Err(error) => error,
            };
            tracing::warn!(error = %reason, "vLLM's processor could not be started again");
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }
}
