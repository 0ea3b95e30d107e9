//! Waits on bound sockets until an engine has introduced itself, or has come back to a frontend
//! that was started again.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_zmtp::{Event, Pull, Router, SendError};
use futures_util::FutureExt;

use super::adoption::{Former, Heard};
use super::connection::Connection;
use super::delivery::Delivery;
use super::probe::keep_asking;
use super::tasks;
use super::{ClientHandle, ClientOptions, EngineClient};
use crate::endpoints::EngineEndpoints;
use crate::error::EngineError;
use crate::wire::handshake::{self, EngineReady, Hello, InitMessage};
use crate::wire::request;
use crate::wire::version::{self, Support};

/// How long a port that was in use a moment ago may take to become free: the sockets of an engine's
/// predecessor are closed by tasks of their own.
const REBIND_PATIENCE: Duration = Duration::from_secs(2);

/// How long what is sent in a handshake may take to be read. Only somebody who is no engine lets it
/// wait.
const READ_WITHIN: Duration = Duration::from_secs(5);

/// Sockets that wait for their engine. Dropping it closes them.
pub struct PendingEngine {
    handshake: Router,
    input: Router,
    output: Pull,
    addresses: EngineEndpoints,
    options: ClientOptions,
    /// The engine that was ready for a frontend before this one, while it may still come back.
    former: Option<Former>,
    /// An engine has said hello.
    greeted: bool,
    /// The address that the engine last connected to the input socket from; `None` where it comes
    /// by a Unix socket.
    peer: Option<IpAddr>,
}

/// An engine that can be used.
struct Introduced {
    /// What it said when it became ready.
    report: Bytes,
    ready: EngineReady,
    /// It said so to a frontend before this one, and may be working for that still.
    adopted: bool,
}

impl PendingEngine {
    pub(super) async fn bind(
        endpoints: EngineEndpoints,
        options: ClientOptions,
    ) -> Result<Self, EngineError> {
        let handshake = bound(Router::bind, endpoints.handshake).await?;
        let input = bound(Router::bind, endpoints.input).await?;
        let output = bound(Pull::bind, endpoints.output).await?;
        let addresses = EngineEndpoints {
            handshake: handshake.address().to_owned(),
            input: input.address().to_owned(),
            output: output.address().to_owned(),
        };
        Ok(Self {
            handshake,
            input,
            output,
            addresses,
            options,
            former: None,
            greeted: false,
            peer: None,
        })
    }

    /// Waits for an engine that was ready for a frontend before this one as well, at the addresses
    /// that it was told then. `report` is what [`EngineClient::report`] gave that frontend.
    /// Whichever comes first counts: this engine's return or another one's hello.
    ///
    /// An engine that returns is used once it has emptied its receiver cache, and what it still
    /// does for its former frontend is aborted. If it will not be used `forget` is awaited, before
    /// any other engine is told these addresses: that one may come back to a later frontend, which
    /// must not believe this report of it.
    ///
    /// # Errors
    /// [`EngineError::Handshake`]: the report can't be read.
    pub fn or_return_of(
        mut self,
        report: Bytes,
        forget: impl Future<Output = ()> + Send + 'static,
    ) -> Result<Self, EngineError> {
        self.former = Some(Former::new(report, forget.boxed())?);
        Ok(self)
    }

    /// The addresses as bound, with the ports that the system picked.
    pub fn endpoints(&self) -> &EngineEndpoints {
        &self.addresses
    }

    /// Waits until the engine has loaded its model and said so, which takes minutes for large ones.
    ///
    /// The handshake socket is closed then: a hello of the engine's next start waits for the next
    /// client.
    pub async fn ready(mut self) -> Result<EngineClient, EngineError> {
        let Introduced { report, ready, adopted } = match self.options.ready_timeout {
            None => self.shake_hands().await?,
            Some(after) => match tokio::time::timeout(after, self.shake_hands()).await {
                Ok(shaken) => shaken?,
                Err(_) => {
                    let handshake = self.addresses.handshake.clone();
                    return Err(EngineError::ReadyTimeout { handshake, after });
                }
            },
        };
        check_version(&ready.vllm_version, self.options.strict_version)?;
        self.handshake.close().await;

        let identity = Bytes::copy_from_slice(&handshake::identity(self.options.rank));
        let (connection, messages) = Connection::new(adopted);
        tokio::spawn(tasks::send_requests(self.input, identity, messages, connection.clone()));
        tokio::spawn(tasks::receive_outputs(self.output, connection.clone()));
        if let Some(every) = self.options.ask_after {
            tokio::spawn(keep_asking(connection.clone(), every));
        }
        let delivery = Delivery::new(self.options.receiver_cache_bytes);
        let handle = ClientHandle {
            connection,
            report,
            ready,
            options: self.options,
            addresses: self.addresses,
            peer: self.peer,
            delivery,
        };
        Ok(EngineClient { handle: Arc::new(handle) })
    }

    /// HELLO is answered by INIT. The report on the input socket and READY then come in either
    /// order.
    ///
    /// An engine that was told these addresses while it loaded its model says the last two to the
    /// next frontend, without a HELLO.
    async fn shake_hands(&mut self) -> Result<Introduced, EngineError> {
        let init = InitMessage::new(&self.addresses.input, &self.addresses.output).encode();
        let (mut report, mut ready) = (None, false);
        loop {
            let former_speaks = self.former.as_ref().is_some_and(Former::is_asked);
            tokio::select! {
                event = self.handshake.next() => {
                    let Some((identity, payload)) = self.accept(event) else { continue };
                    match Hello::decode(&payload) {
                        Ok(hello) if hello.is_hello() => {
                            tracing::debug!(handshake = %self.addresses.handshake, "engine said hello");
                            // A second hello comes from an engine that was started again meanwhile.
                            (report, ready, self.greeted) = (None, false, true);
                            self.give_up_former().await;
                            if let Err(error) = tell(&mut self.handshake, &identity, vec![init.clone()]).await {
                                tracing::warn!(%error, "engine left during the handshake");
                            }
                        }
                        Ok(hello) if hello.is_ready() => ready = true,
                        Ok(hello) => tracing::warn!(status = %hello.status, "unknown handshake status ignored"),
                        Err(error) => tracing::warn!(%error, "unreadable handshake message ignored"),
                    }
                }
                event = self.input.next() => match event {
                    Event::Connected { identity, from } => self.connected(&identity, from).await,
                    event => {
                        let Some((_, payload)) = self.accept(event) else { continue };
                        report = Some((EngineReady::decode(&payload)?, payload));
                    }
                },
                event = self.output.next(), if former_speaks => {
                    let Event::Message { frames, .. } = event else { continue };
                    if let Some((report, ready)) = self.hear_former(&frames).await {
                        return Ok(Introduced { report, ready, adopted: true });
                    }
                }
            }
            if ready && let Some((ready, report)) = report.take() {
                return Ok(Introduced { report, ready, adopted: false });
            }
        }
    }

    /// Takes note of the engine's connection to the input socket, and asks a former engine that has
    /// come back for a sign of life.
    async fn connected(&mut self, identity: &[u8], from: Option<IpAddr>) {
        if handshake::rank(identity) != Some(self.options.rank) {
            return;
        }
        self.peer = from;
        let (input, greeted) = (&self.addresses.input, self.greeted);
        match &mut self.former {
            Some(former) => {
                tracing::debug!(input, "an engine has come back and is asked for a sign of life");
                let question = former.question();
                self.tell(question).await;
            }
            None if !greeted => {
                tracing::warn!(
                    input,
                    "an engine has come back of which nothing is known; unless it still loads, start it again"
                );
            }
            None => {}
        }
    }

    /// Takes what a former engine says. Its report once it can be used.
    async fn hear_former(&mut self, frames: &[Bytes]) -> Option<(Bytes, EngineReady)> {
        match self.former.as_mut()?.hear(frames) {
            Heard::Nothing => None,
            Heard::Strangers(ids) => {
                self.tell(request::encode_abort(&ids)).await;
                None
            }
            Heard::Answer => self.former.take().map(Former::into_report),
            Heard::Unusable(why) => {
                tracing::warn!(
                    why,
                    "an engine has come back that can't be used, waiting for another one"
                );
                self.give_up_former().await;
                None
            }
        }
    }

    async fn give_up_former(&mut self) {
        if let Some(former) = self.former.take() {
            former.give_up().await;
        }
    }

    /// Sends to the engine. One that has left meanwhile is asked anew when it comes back.
    async fn tell(&mut self, frames: Vec<Bytes>) {
        let identity = handshake::identity(self.options.rank);
        if let Err(error) = tell(&mut self.input, &identity, frames).await {
            tracing::debug!(%error, "an engine that had come back has left again");
        }
    }

    /// Identity and payload of a message from the engine that is waited for.
    fn accept(&self, event: Event) -> Option<(Bytes, Bytes)> {
        let Event::Message { identity, frames } = event else { return None };
        let [payload] = &frames[..] else {
            tracing::warn!(
                frames = frames.len(),
                "handshake message with an unexpected number of frames ignored"
            );
            return None;
        };
        if handshake::rank(&identity) != Some(self.options.rank) {
            tracing::warn!(
                ?identity,
                rank = self.options.rank,
                "message of another engine ignored"
            );
            return None;
        }
        Some((identity, payload.clone()))
    }
}

/// Sends what every engine reads at once.
async fn tell(socket: &mut Router, identity: &[u8], frames: Vec<Bytes>) -> Result<(), SendError> {
    tokio::time::timeout(READ_WITHIN, socket.send(identity, frames))
        .await
        .unwrap_or(Err(SendError::Lost))
}

/// Binds, waiting a moment for a port to become free.
async fn bound<S>(
    bind: impl AsyncFn(&str) -> io::Result<S>,
    address: String,
) -> Result<S, EngineError> {
    let deadline = tokio::time::Instant::now() + REBIND_PATIENCE;
    loop {
        match bind(&address).await {
            Ok(socket) => return Ok(socket),
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse
                    && tokio::time::Instant::now() < deadline =>
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(source) => return Err(EngineError::Bind { address, source }),
        }
    }
}

fn check_version(found: &str, strict: bool) -> Result<(), EngineError> {
    match version::support(found) {
        Support::Supported => Ok(()),
        Support::Newer | Support::Unknown if !strict => {
            tracing::warn!(
                found,
                tested = version::window(),
                "the engine runs a version of vLLM that Chiasm was not tested with; answers may be wrong"
            );
            Ok(())
        }
        _ => Err(EngineError::Version { found: found.to_owned(), tested: version::window() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_versions_are_refused_and_newer_ones_only_if_strict() {
        assert!(check_version("0.32.0", true).is_ok());
        assert!(check_version("0.34.1", false).is_ok());
        assert!(check_version("main", false).is_ok());
        for (found, strict) in [("0.30.9", false), ("0.34.1", true), ("main", true)] {
            assert!(
                matches!(check_version(found, strict), Err(EngineError::Version { .. })),
                "{found}"
            );
        }
    }
}
